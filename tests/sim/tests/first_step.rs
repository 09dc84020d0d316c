//! The next change gets ready during the first step after a recovery, and comes at its end.

use reknit_control_sim::*;
use reknit_engine::*;
use reknit_layout::*;

fn line(world: &World, start: &str) -> usize {
    let found = world.told.iter().position(|line| line.starts_with(start));
    found.unwrap_or_else(|| panic!("no `{start}` in {:#?}", world.told))
}

/// A worker of each replica is lost: the successor of the first has come up when the layout without both is committed.
/// The order to pause for it has just gone out.
fn up_in_time() -> World {
    let found = (0..100).find_map(|seed| {
        let mut world = running_from(seed, 2);
        world.kill(&gpu(0, 1));
        let up = |world: &World| {
            world.on(&gpu(0, 1)).is_some_and(|who| world.workers[&who].state.phase == WorkerPhase::Idle)
        };
        world.run_until("a successor", |world| world.on(&gpu(0, 1)).is_some());
        world.kill(&gpu(1, 1));
        world.run_until("the layout without both", |world| world.degrees() == [1, 1]);
        up(&world).then_some(world)
    });
    let mut world = found.expect("a seed for which it is in time");
    world.told.clear();
    world.run_until("a pause", |world| world.told.iter().any(|line| line.starts_with("pause 3")));
    world
}

/// Of the layout of this epoch.
fn resumed(world: &World, epoch: u64) -> u64 {
    let start = format!("prepare {epoch} ");
    let order = &world.told[line(world, &start)];
    order.rsplit(' ').next().and_then(|step| step.parse().ok()).expect("a step")
}

#[test]
fn a_worker_that_came_up_during_a_recovery_is_knitted_in_after_its_first_step() {
    let mut world = up_in_time();
    let resumed_at = world.view().committed_step;
    let training = world.workers.values().filter(|who| who.state.phase == WorkerPhase::Training);
    let at: Vec<_> = training.map(|who| (who.state.epoch, who.state.holding.step)).collect();
    assert_eq!(at, [(Epoch(3), resumed_at); 2], "the first step is over");
    world.run_until("the whole replica", |world| world.degrees() == [2, 1]);
    assert_eq!(resumed(&world, 4), resumed_at.0 + 1, "{:#?}", world.told);
    world.run_until_degrees(&[2, 2]);
    let all = world.incidents();
    let told: Vec<_> = all.iter().map(|found| (found.kind, found.epoch_after)).collect();
    let killed = IncidentKind::WorkerKilled;
    let planned = IncidentKind::Planned;
    assert_eq!(told[..3], [(killed, Some(Epoch(2))), (killed, Some(Epoch(3))), (planned, Some(Epoch(4)))]);
    // Each was over with the first step of its own epoch.
    let recovered: Vec<_> = all.iter().map(|found| found.recovered.expect("an end")).collect();
    assert!(recovered[1] < all[2].committed.expect("a commit"), "{all:#?}");
    assert_eq!((all[1].steps_lost, all[2].steps_lost), (1, 0));
}

#[test]
fn a_loss_during_the_first_step_gives_up_what_got_ready() {
    let mut world = up_in_time();
    // It is away when the others stop for good.
    world.kill(&gpu(0, 1));
    world.run_until_degrees(&[2, 2]);
    let faults = world.incidents().into_iter().filter(|found| found.kind != IncidentKind::Planned);
    assert_eq!(faults.count(), 2, "a newcomer's end is no fault: {:#?}", world.incidents());
    assert!(world.incidents().iter().all(|found| found.recovered.is_some() && found.steps_lost <= 1));
}
