//! What cannot be true changes nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use reknit_control_sim::*;
use reknit_engine::*;
use reknit_layout::*;

fn member() -> (World, WorkerKey) {
    let mut world = World::with_spec(7, spec("demo", 2, 1_000));
    world.run_until_phase(Phase::Running);
    world.run_until_step(3);
    let member = world.on(&gpu(0, 0)).expect("a member").key;
    (world, member)
}

/// A kill is survived, and training goes on.
fn heals(mut world: World) {
    world.kill(&gpu(1, 1));
    world.run_until("a layout without it", |world| world.view().epoch > Epoch(1));
    let step = world.view().committed_step.0;
    assert!(step < 1_000, "{step}");
    world.run_until_step(step + 5);
    assert_eq!(world.view().phase, Phase::Running);
}

#[test]
fn a_step_beyond_the_jobs_last_is_not_believed() {
    let (mut world, worker) = member();
    world.tell(Event::Committed {
        job: job_name(),
        worker,
        epoch: Epoch(1),
        step: Step(u64::MAX),
        vote: StepVote { grad_norm_squared: f64::NAN, loss: f64::NAN },
        first_sample: u64::MAX,
        samples: u32::MAX,
        step_ms: 1,
        tokens: 1,
        rolled_forward: false,
    });
    heals(world);
}

#[test]
fn a_state_beyond_the_jobs_last_step_is_not_believed() {
    let (mut world, worker) = member();
    let mut state = world.worker(&gpu(0, 0)).state.clone();
    state.holding.step = Step(u64::MAX);
    world.tell(Event::Quiesced { job: job_name(), worker, state });
    heals(world);
}

#[test]
fn only_its_own_agent_says_that_a_worker_ended() {
    let (mut world, worker) = member();
    let exit = ExitStatus { how: "killed by signal 9".to_owned(), signal: Some(9), status: None };
    let before = world.view().epoch;
    world.tell(Event::WorkerExited {
        node: node(1),
        job: job_name(),
        worker: worker.clone(),
        exit: exit.clone(),
    });
    world.run_until_step(10);
    assert_eq!(world.view().epoch, before);
    world.tell(Event::WorkerExited { node: node(0), job: job_name(), worker, exit });
    world.run_until("its loss", |world| world.view().epoch > before);
}
