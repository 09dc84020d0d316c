//! ONLY-COPY: nobody gives up what it holds before the commit: everyone is ready, and the layout is stored.

use super::{Fact, members};
use crate::cluster::Who;
use crate::memory::VALUES;
use crate::world::World;
use reknit_layout::Epoch;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
pub(super) struct OnlyCopy {
    ready: BTreeSet<(Epoch, Who)>,
    /// What each held when it was last seen to commit a step or an epoch.
    held: BTreeMap<Who, (u64, [bool; VALUES])>,
}

fn held(world: &World, who: &Who) -> Option<(u64, [bool; VALUES])> {
    let memory = &world.workers.get(who)?.memory;
    Some((memory.step, memory.values.map(|value| value.is_some())))
}

impl OnlyCopy {
    pub(super) fn see(&mut self, world: &World, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Ready { worker, epoch } => {
                self.ready.insert((*epoch, worker.clone()));
                match (self.held.get(worker), held(world, worker)) {
                    (Some(before), Some(now)) if *before != now => Err(format!(
                        "{worker} is ready for {epoch} and does not hold any more what it held at step {}",
                        before.0
                    )),
                    (Some(_) | None, _) => Ok(()),
                }
            }
            Fact::Applied { worker, .. } => {
                self.held.extend(held(world, worker).map(|held| (worker.clone(), held)));
                Ok(())
            }
            Fact::Resumed { worker, epoch, old, plan, .. } => {
                self.held.extend(held(world, worker).map(|held| (worker.clone(), held)));
                let stored = world.store.jobs.get(&worker.job).and_then(|record| record.layout.as_ref());
                if stored.is_none_or(|layout| layout.epoch < *epoch) {
                    return Err(format!("{worker} gave up step {} for {epoch} before its commit", old.step));
                }
                match members(&worker.job, plan).find(|who| !self.ready.contains(&(*epoch, who.clone()))) {
                    Some(late) => {
                        Err(format!("{worker} gave up its copies for {epoch}; {late} was never ready"))
                    }
                    None => Ok(()),
                }
            }
            Fact::Leads { .. }
            | Fact::Heard { .. }
            | Fact::Ordered { .. }
            | Fact::Stored { .. }
            | Fact::Incident(_)
            | Fact::MadeFresh { .. }
            | Fact::Decided { .. } => Ok(()),
        }
    }
}
