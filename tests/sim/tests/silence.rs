//! Stories of workers that freeze while a change is under way.

use reknit_control_sim::*;
use reknit_engine::*;
use reknit_layout::job::{Reaction, RecoverySpec};
use reknit_layout::*;

fn ms_since(world: &World, before: Time) -> u128 {
    u128::from(world.now().0 - before.0) / 1_000
}

/// It is dropped before anybody would have given it up for not stopping.
fn dropped_soon(world: &mut World, place: Place) {
    let before = world.now();
    world.run_until("its end", |world| world.on(&gpu(place.replica.0, place.slot.0)).is_none());
    let took = ms_since(world, before);
    let mute = TIMEOUTS.mute().as_millis();
    assert!(took < mute + 200 && mute + 200 < TIMEOUTS.quiesce().as_millis(), "{took} ms");
    let incidents = world.incidents();
    let incident = incidents.iter().find(|incident| incident.place == Some(place)).expect("an incident");
    assert_eq!(incident.kind, IncidentKind::Frozen, "{incidents:#?}");
    assert!(incident.signal.contains("has said nothing for"), "{}", incident.signal);
}

#[test]
fn one_that_freezes_while_the_others_stop_is_dropped_soon() {
    let mut world = running(4);
    world.kill(&gpu(0, 1));
    world.freeze(&gpu(1, 2));
    world.run_until_phase(Phase::Quiescing);
    dropped_soon(&mut world, Place::new(1, 0, 2));
    world.run_until_degrees(&[3, 3]);
    world.run_until_degrees(&[4, 4]);
}

#[test]
fn one_that_freezes_while_it_gets_ready_is_dropped_soon() {
    let mut world = running(4);
    world.kill(&gpu(0, 1));
    world.run_until("a preparation", |world| world.told.iter().any(|line| line.starts_with("prepare")));
    world.freeze(&gpu(1, 2));
    dropped_soon(&mut world, Place::new(1, 0, 2));
    world.run_until_degrees(&[3, 3]);
    world.run_until_degrees(&[4, 4]);
}

#[test]
fn one_that_freezes_before_a_pause_is_dropped_soon() {
    let mut world = running(4);
    world.tell(Event::DrainGpu { gpu: gpu(0, 0) });
    world.run_until_phase(Phase::Quiescing);
    world.freeze(&gpu(1, 2));
    dropped_soon(&mut world, Place::new(1, 0, 2));
    world.run_until_degrees(&[3, 3]);
}

#[test]
fn a_machine_that_sleeps_amid_a_change_loses_nobody() {
    let mut world = running(4);
    world.kill(&gpu(0, 1));
    let all = (0..2).flat_map(|node| (0..4).map(move |index| gpu(node, index)));
    let left: Vec<_> = all.filter(|found| *found != gpu(0, 1)).collect();
    left.iter().for_each(|gpu| world.freeze(gpu));
    world.run_ms(TIMEOUTS.mute().as_millis() as u64 * 3 / 2);
    left.iter().for_each(|gpu| world.thaw(gpu));
    world.run_until_degrees(&[3, 4]);
    assert_eq!(fault(&world).place, Some(Place::new(0, 0, 1)));
}

#[test]
fn where_hangs_are_only_told_it_has_its_time_to_stop() {
    let recovery = RecoverySpec { on_hang: Reaction::Report, ..RecoverySpec::default() };
    let mut world = World::with_spec(7, JobSpec { recovery, ..spec("demo", 4, 100_000) });
    world.run_until_step(12);
    world.kill(&gpu(0, 1));
    world.freeze(&gpu(1, 2));
    world.run_ms(TIMEOUTS.mute().as_millis() as u64 * 3 / 2);
    assert!(world.on(&gpu(1, 2)).is_some());
    world.run_until_degrees(&[3, 3]);
}
