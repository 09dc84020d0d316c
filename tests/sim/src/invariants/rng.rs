//! RNG: every step of every unit is that of an undisturbed run, whatever the layouts were on the way.

use super::Fact;
use crate::memory::{Memory, REPLICATED};
use crate::world::World;

pub(super) fn see(world: &mut World, fact: &Fact) -> Result<(), String> {
    let Fact::Applied { worker, .. } = fact else { return Ok(()) };
    let Some(found) = world.workers.get(worker) else { return Ok(()) };
    let (memory, seed) = (found.memory.clone(), found.seed);
    match wrong(world, &memory, seed) {
        None => Ok(()),
        Some(place) => {
            Err(format!("value {place} of {worker} at step {} is not an undisturbed run's", memory.step))
        }
    }
}

/// A unit that is held and is not an undisturbed run's.
pub(super) fn wrong(world: &mut World, memory: &Memory, seed: u64) -> Option<usize> {
    let truth = world.truth(seed).at(memory.step);
    (0..REPLICATED).find(|place| memory.values[*place].is_some_and(|held| held != truth[*place]))
}
