//! What is only told, and who is not killed.

use reknit_control_sim::*;
use reknit_engine::*;
use reknit_layout::job::{Reaction, RecoverySpec};
use reknit_layout::*;

fn running(spec: JobSpec) -> World {
    let mut world = World::with_spec(7, spec);
    world.run_until_phase(Phase::Running);
    world.run_until_step(12);
    world
}

fn of_kind(world: &World, kind: IncidentKind) -> Vec<Incident> {
    let all = world.incidents();
    all.into_iter().filter(|incident| incident.kind == kind).collect()
}

/// One replica: whatever a rank owns nobody else has.
fn without_copies() -> JobSpec {
    let mut spec = spec("demo", 4, 100_000);
    spec.parallel.data = 1;
    spec
}

#[test]
fn what_was_told_is_still_only_told_after_a_take_over() {
    let told = RecoverySpec { on_hang: Reaction::Report, ..RecoverySpec::default() };
    let mut world = running(JobSpec { recovery: told, ..spec("demo", 4, 100_000) });
    world.freeze(&gpu(1, 0));
    world.run_until("a hang is told", |world| !of_kind(world, IncidentKind::Frozen).is_empty());
    world.restart_daemon();
    world.run_until_phase(Phase::Running);
    world.kill(&gpu(0, 2));
    world.run_until_degrees(&[3, 3]);
    let told = of_kind(&world, IncidentKind::Frozen).remove(0);
    assert!(told.told && told.quiesced.is_none() && told.epoch_after.is_none(), "{told:#?}");
    let killed = of_kind(&world, IncidentKind::WorkerKilled);
    assert_eq!(killed.len(), 1, "the loss has a record of its own");
    assert!(killed[0].recovered.is_some(), "{killed:#?}");
    assert!(told.recovered.is_some(), "the hung rank is gone: {told:#?}");
}

#[test]
fn the_only_holder_is_not_killed_for_a_hang() {
    let mut world = running(without_copies());
    let frozen = world.on(&gpu(0, 1)).expect("a worker");
    world.freeze(&gpu(0, 1));
    // Its peers give up after the operation's limit, and then it has as long as any other to stop.
    let limit = TIMEOUTS.operation() + TIMEOUTS.quiesce();
    world.run_ms(limit.as_millis() as u64 + 5_000);
    let told = of_kind(&world, IncidentKind::Frozen);
    assert!(told[0].signal.ends_with("nobody else holds what it holds, so it is not killed"), "{told:#?}");
    let view = world.view();
    assert!(
        view.explanation.starts_with("waits for worker 0.0.1, which does not answer"),
        "{}",
        view.explanation
    );
    world.thaw(&gpu(0, 1));
    world.run_until("it trains again", |world| world.view().epoch > Epoch(1));
    world.run_until_degrees(&[4]);
    assert_eq!(world.on(&gpu(0, 1)), Some(frozen), "the same process");
    let step = world.view().committed_step.0;
    world.run_until_step(step + 5);
}

#[test]
fn stragglers_are_drained_one_at_a_time_and_no_replica_is_given_up_for_them() {
    let act = RecoverySpec { on_straggler: Reaction::Act, ..RecoverySpec::default() };
    let mut world = running(JobSpec { recovery: act.clone(), ..spec("demo", 4, 100_000) });
    for straggler in [gpu(0, 1), gpu(1, 2)] {
        world.slow(&straggler, 60_000);
    }
    world.run_ms(20_000);
    assert_eq!(of_kind(&world, IncidentKind::Slow).len(), 2, "both are told");
    assert_eq!(world.degrees(), [3, 4], "one is out");
    assert!(of_kind(&world, IncidentKind::Planned)[0].signal.contains("by policy"));
    world.tell(Event::RestoreGpu { gpu: gpu(0, 1) });
    world.run_until_degrees(&[4, 3]);

    let mut full = JobSpec { recovery: act, ..spec("demo", 4, 100_000) };
    full.parallel.min_tensor = 4;
    let mut world = running(full);
    world.slow(&gpu(0, 1), 60_000);
    world.run_ms(20_000);
    assert_eq!(of_kind(&world, IncidentKind::Slow).len(), 1);
    assert_eq!(world.degrees(), [4, 4], "without it a replica could not go on");
}

#[test]
fn the_kill_that_a_fence_is_does_not_hide_the_hang_from_the_next_daemon() {
    let mut world = running(spec("demo", 4, 100_000));
    world.freeze(&gpu(0, 3));
    world.run_until_degrees(&[3, 4]);
    let before = fault(&world);
    assert_eq!(before.kind, IncidentKind::Frozen);
    world.restart_daemon();
    world.run_until_degrees(&[4, 4]);
    let after = of_kind(&world, IncidentKind::Frozen);
    assert_eq!(after.len(), 1, "{:#?}", world.incidents());
}
