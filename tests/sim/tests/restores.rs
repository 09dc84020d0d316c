//! Back to a checkpoint: when nobody holds some units any more, and when an operator says so.

use reknit_control_sim::*;
use reknit_engine::*;
use reknit_layout::job::Restore;
use reknit_layout::*;

/// A checkpoint every 4 steps.
fn saving(restore: Restore) -> JobSpec {
    let mut spec = spec("demo", 2, ENDLESS);
    spec.checkpoint.dir = "/checkpoints".to_owned();
    spec.checkpoint.every_steps = 4;
    spec.checkpoint.restore = restore;
    spec
}

fn trained_to(step: u64, restore: Restore) -> World {
    let mut world = World::with_spec(7, saving(restore));
    world.run_until_step(step);
    world.run_until("the checkpoints to be known", |world| {
        world.view().checkpoints.first().is_some_and(|id| id.step.0 == step / 4 * 4)
    });
    world.told.clear();
    world
}

/// Both workers that hold the units of slot 1.
fn lose_both(world: &mut World) {
    world.kill(&gpu(0, 1));
    world.kill(&gpu(1, 1));
}

fn restore(world: &mut World, step: Option<u64>) {
    let step = step.map(Step);
    assert_eq!(world.state().refuse_restore_job(&job_name(), step), None);
    world.tell(Event::RestoreJob { job: job_name(), step });
}

#[test]
fn a_job_without_a_live_holder_waits_names_the_checkpoint_and_goes_back_when_told() {
    let mut world = trained_to(6, Restore::Ask);
    lose_both(&mut world);
    world.run_until_phase(Phase::Waiting);
    let stood = world.view().committed_step.0;
    let says = world.view().explanation;
    let back = format!("of step 4 ({} steps back): `reknit job restore demo`", stood - 4);
    assert!(says.contains("no live GPU holds") && says.contains(&back), "{says}");
    restore(&mut world, None);
    world.run_until_phase(Phase::Running);
    let from = "/checkpoints/demo/step-000000000004-";
    let prepared = world.told.iter().filter(|line| line.starts_with("prepare") && line.contains(from));
    assert!(
        prepared.clone().count() >= 2 && prepared.clone().all(|line| line.contains(" at 4 ")),
        "{:?}",
        world.told
    );
    let note = format!("note goes back to the checkpoint of step 4: {} steps are lost", stood - 4);
    assert!(world.told.contains(&note), "{:?}", world.told);
    world.run_until_step(stood + 3);
    world.run_until_degrees(&[2, 2]);
    let lost: Vec<_> =
        world.incidents().into_iter().filter(|found| found.kind != IncidentKind::Planned).collect();
    assert!(lost.iter().all(|incident| incident.steps_lost == stood - 4), "{lost:#?}");
    assert!(lost.iter().all(|incident| incident.recovered.is_some()));
}

#[test]
fn a_job_that_shall_act_goes_back_by_itself() {
    let mut world = trained_to(9, Restore::Act);
    lose_both(&mut world);
    world.run_until("the job to go back", |world| {
        world.told.iter().any(|line| line.starts_with("note goes back"))
    });
    assert!(!world.told.contains(&"phase Waiting".to_owned()), "{:?}", world.told);
    world.run_until_step(14);
}

#[test]
fn a_job_that_trains_goes_back_on_request_and_old_reports_do_not_count() {
    let mut world = trained_to(10, Restore::Ask);
    let refused =
        world.state().refuse_restore_job(&job_name(), Some(Step(5))).expect("there is none of step 5");
    assert!(refused.to_string().contains("complete: 8, 4"), "{refused}");
    let late = Event::Committed {
        job: job_name(),
        worker: world.keys()[0].clone(),
        epoch: world.view().epoch,
        step: world.view().committed_step,
        vote: StepVote { grad_norm_squared: 1.0, loss: 9.0 },
        first_sample: (world.view().committed_step.0 - 1) * 8,
        samples: 4,
        step_ms: 60,
        tokens: 1,
        rolled_forward: false,
    };
    restore(&mut world, Some(4));
    world.run_until("the older one to be restored", |world| world.view().committed_step.0 < 8);
    world.run_until_phase(Phase::Running);
    world.tell(late);
    assert!(world.view().committed_step.0 < 8, "{:?}", world.view());
    let record = world.stored().clone();
    assert_eq!(record.restored, world.view().epoch);
    // The new run's steps are told, its checkpoint is the newest, and the next daemon goes on with them.
    world.run_until_step(9);
    assert_eq!(world.view().checkpoints[0].step, Step(8));
    world.restart_daemon();
    world.run_until_phase(Phase::Running);
    world.run_until_step(12);
}

#[test]
fn a_checkpoint_that_cannot_be_read_is_named_and_the_job_waits_again() {
    let mut world = trained_to(10, Restore::Ask);
    lose_both(&mut world);
    world.run_until_phase(Phase::Waiting);
    restore(&mut world, None);
    world.run_until("a preparation", |world| world.told.iter().any(|line| line.contains(" at 8 from ")));
    let reason = "vocab-0.safetensors is damaged".to_owned();
    let worker = world.keys()[0].clone();
    world.tell(Event::NoCheckpoint { job: job_name(), worker, step: Step(8), reason });
    world.run_until_phase(Phase::Waiting);
    assert!(world.view().explanation.contains("of step 4"), "the next one: {}", world.view().explanation);
    restore(&mut world, None);
    world.run_until_phase(Phase::Running);
    assert!(world.view().committed_step < Step(8));
    world.run_until_step(6);
}

#[test]
fn who_looked_earlier_does_not_make_a_newer_checkpoint_forgotten() {
    let mut world = trained_to(10, Restore::Ask);
    let known = world.view().checkpoints;
    let (worker, ids) = (world.keys()[0].clone(), known[1..].to_vec());
    world.tell(Event::Checkpoints { job: job_name(), worker, ids, written: Time(1) });
    assert_eq!(world.view().checkpoints, known);
}

#[test]
fn a_worker_lost_while_it_loads_costs_nothing_but_time() {
    let mut world = trained_to(6, Restore::Ask);
    lose_both(&mut world);
    world.run_until_phase(Phase::Waiting);
    restore(&mut world, None);
    world.run_until("a preparation", |world| world.told.iter().any(|line| line.contains(" at 4 from ")));
    world.kill(&gpu(0, 0));
    world.run_until("the job to go back", |world| {
        world.told.iter().any(|line| line.starts_with("note goes back"))
    });
    world.run_until_step(8);
    world.run_until_degrees(&[2, 2]);
}

#[test]
fn a_new_job_begins_with_the_checkpoint_that_its_file_names() {
    let mut spec = saving(Restore::Ask);
    spec.checkpoint.from = "/elsewhere/other/step-000000000020-00000000000000aa".to_owned();
    let mut world = World::with_spec(7, spec);
    world.run_until_phase(Phase::Running);
    let from = " at 20 from /elsewhere/other/step-000000000020-00000000000000aa";
    assert!(world.told.iter().any(|line| line.contains(from)), "{:?}", world.told);
    assert!(world.view().committed_step >= Step(20));
    world.run_until_step(24);
}

#[test]
fn before_its_own_first_checkpoint_a_job_goes_back_to_the_one_that_it_began_with() {
    let mut spec = saving(Restore::Ask);
    let from = "/elsewhere/other/step-000000000021-00000000000000aa";
    spec.checkpoint.from = from.to_owned();
    spec.checkpoint.every_steps = 40;
    let mut world = World::with_spec(7, spec);
    world.run_until_step(24);
    let steps = |world: &World| world.view().checkpoints.iter().map(|id| id.step.0).collect::<Vec<_>>();
    assert_eq!(steps(&world), [21]);
    lose_both(&mut world);
    world.run_until_phase(Phase::Waiting);
    assert!(world.view().explanation.contains("of step 21"), "{}", world.view().explanation);
    world.told.clear();
    restore(&mut world, None);
    world.run_until_phase(Phase::Running);
    assert!(world.told.iter().any(|line| line.contains(&format!(" at 21 from {from}"))), "{:?}", world.told);
    world.run_until("its own to be known", |world| steps(world).len() > 1);
    assert_eq!(steps(&world), [40, 21]);
}

#[test]
fn what_workers_of_an_earlier_run_know_is_not_this_runs() {
    let mut spec = saving(Restore::Act);
    spec.run.steps = 9;
    let mut world = World::with_spec(7, spec.clone());
    world.run_until_phase(Phase::Completed);
    let (old, ids) = (world.keys()[0].clone(), world.view().checkpoints);
    assert_ne!(ids, []);
    spec.run.seed += 1;
    world.tell(Event::Submit { spec: Box::new(spec) });
    // It had been writing until now.
    world.tell(Event::Checkpoints { job: job_name(), worker: old, ids, written: Time(u64::MAX) });
    assert_eq!(world.view().checkpoints, []);
}
