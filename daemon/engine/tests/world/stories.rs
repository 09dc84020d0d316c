//! What stories have in common.

use super::*;

/// A job that has trained a few steps.
pub fn running(tensor: u32) -> World {
    let mut world = World::new(7, tensor, 1_000);
    world.run_until_phase(Phase::Running);
    world.run_until_step(3);
    world.trace.clear();
    world
}

/// The one finished incident that is a fault.
pub fn fault(world: &World) -> Incident {
    let all = world.state.incidents(&job_name());
    let mut faults = all.iter().filter(|i| i.kind != IncidentKind::Planned);
    let first = faults.next().expect("an incident").clone();
    assert!(faults.next().is_none(), "{all:#?}");
    first
}

pub fn degrees(world: &World) -> Vec<u32> {
    world.view().layout.map(|l| l.degrees()).unwrap_or_default()
}

pub fn run_until_degrees(world: &mut World, wanted: &[u32]) {
    world.run_until(&format!("{wanted:?}"), |world| {
        world.view().phase == Phase::Running && degrees(world) == wanted
    });
    let step = world.view().committed_step.0;
    world.run_until_step(step + 2);
}

/// Every step the workers committed, without a gap.
pub fn assert_no_gap(world: &World) {
    let steps: Vec<u64> = world.checks.commits.keys().map(|step| step.0).collect();
    let expected: Vec<u64> = (1..=steps.len() as u64).collect();
    assert_eq!(steps, expected, "SAMPLES");
}
