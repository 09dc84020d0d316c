//! RNG: every value is that of an undisturbed run, whatever the layouts were on the way.

use super::Fact;
use crate::world::World;

pub(super) fn see(world: &mut World, fact: &Fact) -> Result<(), String> {
    let worker = match fact {
        Fact::Applied { worker, .. } | Fact::Resumed { worker, .. } => worker,
        Fact::Leads { .. }
        | Fact::Heard { .. }
        | Fact::Ordered { .. }
        | Fact::Stored { .. }
        | Fact::Incident(_)
        | Fact::MadeFresh { .. }
        | Fact::Ready { .. }
        | Fact::Decided { .. } => return Ok(()),
    };
    let Some(found) = world.workers.get(worker) else { return Ok(()) };
    let truth = world.truth.at(found.memory.step);
    let held = found.memory.values.iter().zip(truth).enumerate();
    let wrong = held.filter_map(|(place, (held, truth))| held.map(|held| (place, held == *truth)));
    match wrong.into_iter().find(|(_, right)| !right) {
        None => Ok(()),
        Some((place, _)) => Err(format!(
            "value {place} of {worker} at step {} is not the undisturbed run's",
            found.memory.step
        )),
    }
}
