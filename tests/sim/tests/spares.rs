//! Free GPUs that take the places of GPUs that are gone.

use reknit_control_sim::*;
use reknit_engine::*;
use reknit_layout::*;

/// TP2 x DP2, with `spares`, on nodes with so many GPUs.
fn running_with(spares: u32, nodes: &[u32]) -> World {
    running_in(Topology::default(), spares, nodes)
}

fn running_in(topology: Topology, spares: u32, nodes: &[u32]) -> World {
    let mut world = World::story(7, nodes, topology);
    world.run_ms(100);
    let mut spec = spec("demo", 2, 1_000);
    spec.recovery.spares = spares;
    world.tell(Event::Submit { spec: Box::new(spec) });
    world.run_until_phase(Phase::Running);
    world.run_until_step(3);
    world
}

/// The GPUs that train, by place.
fn seats(world: &World) -> Vec<String> {
    let layout = world.view().layout.expect("a layout");
    layout.members().map(|(_, member)| member.worker.gpu.0.clone()).collect()
}

#[test]
fn a_spare_of_the_domain_takes_the_place_and_keeps_it() {
    let mut world = running_with(1, &[3, 2]);
    assert_eq!(seats(&world), ["g00", "g01", "g10", "g11"]);
    world.health(&gpu(0, 1), HealthClass::Fatal, "XID 79");
    // It goes on unevenly first.
    world.run_until_degrees(&[1, 2]);
    world.run_until_degrees(&[2, 2]);
    assert_eq!(seats(&world), ["g00", "g02", "g10", "g11"]);
    // The old GPU is a spare now: nothing is started on it, and it serves the next loss.
    world.health(&gpu(0, 1), HealthClass::Healthy, "");
    world.run_ms(5_000);
    assert!(world.on(&gpu(0, 1)).is_none());
    world.health(&gpu(0, 2), HealthClass::Fatal, "XID 48");
    world.run_until_degrees(&[1, 2]);
    world.run_until_degrees(&[2, 2]);
    assert_eq!(seats(&world), ["g00", "g01", "g10", "g11"]);
}

#[test]
fn no_more_spares_are_taken_than_the_job_may_use() {
    let mut world = running_with(1, &[3, 2]);
    world.health(&gpu(0, 0), HealthClass::Fatal, "XID 79");
    world.run_until_degrees(&[1, 2]);
    world.run_until_degrees(&[2, 2]);
    world.health(&gpu(0, 1), HealthClass::Fatal, "XID 79");
    world.run_until_degrees(&[1, 2]);
    world.run_ms(10_000);
    assert_eq!(world.degrees(), [1, 2]);
    let mut world = running_with(0, &[3, 2]);
    world.health(&gpu(0, 1), HealthClass::Fatal, "XID 79");
    world.run_ms(10_000);
    assert_eq!(world.degrees(), [1, 2]);
}

#[test]
fn a_drained_gpu_is_replaced_too() {
    let mut world = running_with(2, &[3, 2]);
    world.tell(Event::DrainGpu { gpu: gpu(0, 0) });
    // The spare may be up before the others have paused for the drain; then one change is enough.
    world.run_until("the spare's step", |world| seats(world) == ["g02", "g01", "g10", "g11"]);
    world.run_ms(2_000);
    assert_eq!(seats(&world), ["g02", "g01", "g10", "g11"]);
    assert!(world.on(&gpu(0, 0)).is_none(), "the drained GPU is free");
}

#[test]
fn a_gpu_that_is_restored_before_its_spare_is_up_keeps_its_place() {
    let mut world = running_with(2, &[3, 2]);
    // The incident of another change is still open: the drained member stays until a step ends it.
    world.tell(Event::Rebalance { job: job_name() });
    world.run_until_phase(Phase::Running);
    world.tell(Event::DrainGpu { gpu: gpu(0, 0) });
    assert_eq!(world.stored().places[&Place::new(0, 0, 0)], gpu(0, 2), "the spare has its place");
    assert_eq!(world.degrees(), [2, 2]);
    world.tell(Event::RestoreGpu { gpu: gpu(0, 0) });
    world.run_ms(10_000);
    assert_eq!(seats(&world), ["g00", "g01", "g10", "g11"]);
    assert!(world.on(&gpu(0, 2)).is_none(), "the spare is free");
    assert!(world.stored().replaced.is_empty());
}

#[test]
fn a_killed_worker_is_started_again_where_it_was() {
    let mut world = running_with(1, &[3, 2]);
    world.kill(&gpu(0, 1));
    world.run_until_degrees(&[1, 2]);
    world.run_until_degrees(&[2, 2]);
    assert_eq!(seats(&world), ["g00", "g01", "g10", "g11"]);
}

#[test]
fn a_group_that_is_wholly_lost_moves_to_a_domain_with_room_for_all_of_it() {
    // One free GPU on the third node is no home for a group of two; the fourth has both.
    let mut world = running_with(2, &[2, 2, 1, 2]);
    for index in 0..2 {
        world.health(&gpu(0, index), HealthClass::Fatal, "gone");
    }
    world.run_until_degrees(&[0, 2]);
    world.run_until_degrees(&[2, 2]);
    assert_eq!(seats(&world), ["g30", "g31", "g10", "g11"]);
}

#[test]
fn a_half_lost_group_does_not_span_domains() {
    let mut world = running_with(2, &[2, 2, 2]);
    world.health(&gpu(0, 0), HealthClass::Fatal, "gone");
    world.run_until_degrees(&[1, 2]);
    world.run_ms(5_000);
    assert_eq!(seats(&world), ["g01", "g10", "g11"]);
}

#[test]
fn a_new_daemon_knows_which_gpus_are_spares() {
    let mut world = running_with(1, &[3, 2]);
    world.health(&gpu(0, 1), HealthClass::Fatal, "XID 79");
    world.run_until_degrees(&[1, 2]);
    world.run_until_degrees(&[2, 2]);
    world.restart_daemon();
    world.run_until_phase(Phase::Running);
    let step = world.view().committed_step.0;
    world.run_until_step(step + 2);
    assert_eq!(seats(&world), ["g00", "g02", "g10", "g11"]);
    // The one spare it may use is in use.
    world.health(&gpu(0, 0), HealthClass::Fatal, "XID 79");
    world.run_until_degrees(&[1, 2]);
    world.run_ms(5_000);
    assert_eq!(world.degrees(), [1, 2]);
}

#[test]
fn described_domains_hold_several_nodes() {
    let described = "[[domain]]\nname = \"rack\"\nnodes = [{ name = \"node-1\", gpus = 1 }, { name = \"node-2\", gpus = 3 }]";
    let topology = Topology::parse(described, "topology").unwrap();
    let mut world = running_in(topology, 1, &[1, 1, 4]);
    // Node 1 gives its one GPU to a group with node 2; node 0, a domain of its own, has no room for a group.
    assert_eq!(seats(&world), ["g10", "g20", "g21", "g22"]);
    world.health(&gpu(1, 0), HealthClass::Fatal, "XID 79");
    world.run_until_degrees(&[1, 2]);
    world.run_until_degrees(&[2, 2]);
    assert_eq!(seats(&world), ["g23", "g20", "g21", "g22"]);
}

#[test]
fn a_worker_whose_place_a_spare_takes_before_it_is_there_leaves() {
    let mut world = World::story(7, &[3, 2], Topology::default());
    world.run_ms(100);
    let mut spec = spec("demo", 2, ENDLESS);
    spec.recovery.spares = 1;
    world.tell(Event::Submit { spec: Box::new(spec) });
    world.run_until("its process", |world| world.on(&gpu(0, 1)).is_some());
    assert_eq!(world.view().phase, Phase::Starting);
    world.tell(Event::DrainGpu { gpu: gpu(0, 1) });
    world.run_until_step(3);
    assert_eq!(seats(&world), ["g00", "g02", "g10", "g11"]);
    world.run_ms(3_000);
    assert_eq!(world.on(&gpu(0, 1)), None);
}
