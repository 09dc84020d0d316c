//! COVER: in every replica each unit has exactly one owner, in the memory of those who train.

use super::Fact;
use crate::cluster::Who;
use crate::memory::{REPLICATED, VALUES};
use crate::world::World;
use std::collections::BTreeMap;

pub(super) fn see(world: &World, fact: &Fact) -> Result<(), String> {
    let Fact::Decided { job, epoch, plan, .. } = fact else { return Ok(()) };
    let mut owners: BTreeMap<_, [u32; VALUES]> = BTreeMap::new();
    for (place, member) in plan.layout.members() {
        let Some(worker) = world.workers.get(&Who::new(job, &member.worker)) else {
            return Err(format!("{} voted in {epoch} and is not there", member.worker));
        };
        let owned = owners.entry(place.replica).or_insert([0; VALUES]);
        for (count, value) in owned.iter_mut().zip(&worker.memory.values) {
            *count += u32::from(value.is_some());
        }
    }
    for (replica, owned) in owners {
        if let Some(unit) = owned[..REPLICATED].iter().position(|count| *count != 1) {
            return Err(format!("unit {unit} has {} owners in replica {replica}, {epoch}", owned[unit]));
        }
    }
    Ok(())
}
