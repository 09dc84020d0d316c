//! Stories of hangs and stragglers.

use reknit_control_sim::*;
use reknit_engine::*;
use reknit_layout::job::{Reaction, RecoverySpec};
use reknit_layout::*;

fn running_with(recovery: RecoverySpec) -> World {
    let mut world = World::with_spec(7, JobSpec { recovery, ..spec("demo", 4, 100_000) });
    world.run_until_phase(Phase::Running);
    world.run_until_step(12);
    world.told.clear();
    world
}

fn told(world: &World, kind: IncidentKind) -> Vec<Incident> {
    let all = world.incidents();
    all.into_iter().filter(|incident| incident.kind == kind).collect()
}

fn fences(world: &World) -> usize {
    world.told.iter().filter(|line| line.starts_with("fence")).count()
}

#[test]
fn a_hang_is_acted_on_long_before_the_operation_deadline() {
    let mut world = running_with(RecoverySpec::default());
    let before = world.now();
    world.freeze(&gpu(0, 3));
    world.run_until_degrees(&[3, 4]);
    let incident = fault(&world);
    assert_eq!((incident.kind, incident.place), (IncidentKind::Frozen, Some(Place::new(0, 0, 3))));
    assert!(
        incident.signal.contains("worker 0.0.3 (g03 on node-0) does not arrive: "),
        "{}",
        incident.signal
    );
    assert!(incident.signal.contains(" of 7 others wait for it since "), "{}", incident.signal);
    assert!(incident.signal.contains(", in the vote of step "), "{}", incident.signal);
    let took = incident.recovered.expect("a step").0 - before.0;
    assert!(took < TIMEOUTS.operation().as_micros() as u64, "{took} us");
    assert_eq!(fences(&world), 1, "no false eviction");
    world.run_until_degrees(&[4, 4]);
}

#[test]
fn a_pause_shorter_than_a_hang_disturbs_nobody() {
    let mut world = running_with(RecoverySpec::default());
    let epoch = world.view().epoch;
    for index in 0..4 {
        world.freeze(&gpu(1, index));
        world.run_ms(TIMEOUTS.hang().as_millis() as u64 * 8 / 10);
        world.thaw(&gpu(1, index));
        let step = world.view().committed_step.0;
        world.run_until_step(step + 5);
    }
    assert_eq!((world.view().epoch, world.incidents().len()), (epoch, 0));
}

#[test]
fn everyone_frozen_at_once_accuses_nobody() {
    let mut world = running_with(RecoverySpec::default());
    for node in 0..2 {
        for index in 0..4 {
            world.freeze(&gpu(node, index));
        }
    }
    world.run_ms(1_000);
    for node in 0..2 {
        for index in 0..4 {
            world.thaw(&gpu(node, index));
        }
    }
    let step = world.view().committed_step.0;
    world.run_until_step(step + 5);
    assert_eq!((fences(&world), world.incidents().len()), (0, 0));
}

#[test]
fn a_hang_is_only_told_where_policy_says_so() {
    let mut world = running_with(RecoverySpec { on_hang: Reaction::Report, ..RecoverySpec::default() });
    let (epoch, step) = (world.view().epoch, world.view().committed_step.0);
    world.freeze(&gpu(1, 0));
    world.run_ms(900);
    let incidents = told(&world, IncidentKind::Frozen);
    assert_eq!(incidents.len(), 1, "told once: {incidents:#?}");
    assert_eq!((incidents[0].gpu.clone(), incidents[0].recovered), (Some(gpu(1, 0)), None));
    world.thaw(&gpu(1, 0));
    world.run_until_step(step + 10);
    let incidents = told(&world, IncidentKind::Frozen);
    assert!(incidents.len() == 1 && incidents[0].recovered.is_some(), "{incidents:#?}");
    assert_eq!((world.view().epoch, fences(&world)), (epoch, 0));
    assert_eq!(world.stored_incident(incidents[0].id).recovered, incidents[0].recovered, "stored as well");
}

#[test]
fn a_straggler_is_named_with_its_factor_and_cleared() {
    let mut world = running_with(RecoverySpec::default());
    world.slow(&gpu(1, 2), 36_000);
    world.run_ms(10_000);
    let incidents = told(&world, IncidentKind::Slow);
    assert_eq!(incidents.len(), 1, "named once: {incidents:#?}");
    assert_eq!(incidents[0].place, Some(Place::new(1, 0, 2)));
    assert!(incidents[0].signal.contains("36.0 ms a step, 1.80 times as long"), "{}", incidents[0].signal);
    assert_eq!(world.degrees(), [4, 4], "only told");
    world.slow(&gpu(1, 2), 21_000);
    world.run_ms(10_000);
    let incidents = told(&world, IncidentKind::Slow);
    assert!(incidents.len() == 1 && incidents[0].recovered.is_some(), "{incidents:#?}");
}

#[test]
fn a_larger_share_of_the_work_is_no_slowness() {
    let mut world = running_with(RecoverySpec::default());
    // 0.0.3 is out: the three others of its replica own 4 units where those of the other replica own 3.
    world.tell(Event::DrainGpu { gpu: gpu(0, 3) });
    world.run_until_degrees(&[3, 4]);
    world.run_ms(10_000);
    assert_eq!(told(&world, IncidentKind::Slow), []);
}

#[test]
fn a_straggler_is_drained_where_policy_says_so_until_it_is_restored() {
    let mut world = running_with(RecoverySpec { on_straggler: Reaction::Act, ..RecoverySpec::default() });
    world.slow(&gpu(0, 1), 60_000);
    world.run_until_degrees(&[3, 4]);
    assert_eq!(told(&world, IncidentKind::Slow).len(), 1);
    let planned = told(&world, IncidentKind::Planned);
    assert!(planned.iter().all(|incident| incident.steps_lost == 0), "at a step boundary: {planned:#?}");
    world.run_ms(5_000);
    assert_eq!(world.degrees(), [3, 4], "it stays out");
    world.tell(Event::RestoreGpu { gpu: gpu(0, 1) });
    world.run_until_degrees(&[4, 4]);
}

#[test]
fn what_was_told_of_a_straggler_ends_under_a_new_daemon_too() {
    let mut world = running_with(RecoverySpec::default());
    world.slow(&gpu(1, 2), 36_000);
    world.run_until("a word", |world| !told(world, IncidentKind::Slow).is_empty());
    world.slow(&gpu(1, 2), 20_000);
    world.restart_daemon();
    world.run_ms(10_000);
    let incidents = told(&world, IncidentKind::Slow);
    assert!(incidents.len() == 1 && incidents[0].recovered.is_some(), "{incidents:#?}");
}
