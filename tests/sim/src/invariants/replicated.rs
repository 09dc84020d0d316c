//! REPLICATED: replicated parameters are bit-equal on all ranks of all replicas.

use super::{Fact, members};
use crate::memory::REPLICATED;
use crate::world::World;
use std::collections::BTreeSet;

pub(super) fn see(world: &World, fact: &Fact) -> Result<(), String> {
    let Fact::Decided { epoch, step, plan } = fact else { return Ok(()) };
    let workers = members(plan).filter_map(|key| world.workers.get(key));
    let values: BTreeSet<_> = workers.map(|worker| worker.memory.values[REPLICATED]).collect();
    match values.len() {
        1 => Ok(()),
        found => Err(format!("{found} different values before step {step} of {epoch}")),
    }
}
