//! REPLICATED: replicated parameters are bit-equal on all ranks of all replicas, and those of an undisturbed run.

use super::{Fact, members};
use crate::memory::REPLICATED;
use crate::world::World;
use std::collections::BTreeSet;

pub(super) fn see(world: &mut World, fact: &Fact) -> Result<(), String> {
    let Fact::Decided { job, epoch, step, plan } = fact else { return Ok(()) };
    let workers: Vec<_> = members(job, plan).filter_map(|who| world.workers.get(&who)).collect();
    let values: BTreeSet<_> = workers.iter().map(|worker| worker.memory.values[REPLICATED]).collect();
    let Some(seed) = workers.first().map(|worker| worker.seed) else { return Ok(()) };
    let truth = world.truth(seed).at(step.0 - 1)[REPLICATED];
    match values.len() {
        1 if values.contains(&Some(truth)) => Ok(()),
        1 => Err(format!("before step {step} of {epoch} all have another value than an undisturbed run")),
        found => Err(format!("{found} different values before step {step} of {epoch}")),
    }
}
