//! ONLY-COPY: nobody gives up what it holds before the commit: everyone is ready, and the layout is stored.

use super::{Fact, members};
use crate::cluster::job_name;
use crate::world::World;
use reknit_layout::{Epoch, WorkerKey};
use std::collections::BTreeSet;

/// Who was ready for which epoch, with which leadership's ticket.
#[derive(Debug, Default)]
pub(super) struct OnlyCopy(BTreeSet<(Epoch, WorkerKey)>);

impl OnlyCopy {
    pub(super) fn see(&mut self, world: &World, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Ready { worker, epoch, ticket: _ } => {
                self.0.insert((*epoch, worker.clone()));
                Ok(())
            }
            Fact::Resumed { worker, epoch, old, plan, .. } => {
                let stored = world.store.jobs.get(&job_name()).and_then(|record| record.layout.as_ref());
                if stored.is_none_or(|layout| layout.epoch < *epoch) {
                    return Err(format!("{worker} gave up step {} for {epoch} before its commit", old.step));
                }
                match members(plan).find(|key| !self.0.contains(&(*epoch, (*key).clone()))) {
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
            | Fact::Decided { .. }
            | Fact::Applied { .. } => Ok(()),
        }
    }
}
