//! ONE-EPOCH: an epoch is stored before anyone hears of it, means one plan, and only grows; so do incarnations.

use super::Fact;
use crate::world::World;
use reknit_engine::{Command, JobRecord};
use reknit_layout::{Epoch, Incarnation, Plan};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

#[derive(Debug, Default)]
pub(super) struct OneEpoch {
    plans: BTreeMap<Epoch, Arc<Plan>>,
    started: BTreeSet<Incarnation>,
}

impl OneEpoch {
    pub(super) fn see(&mut self, world: &World, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Stored { before: Some(before), record } => grows(before, record),
            Fact::Ordered { command } => self.ordered(world, fact, command),
            Fact::Resumed { worker, before, epoch, .. } if before >= epoch => {
                Err(format!("{worker} goes from {before} to {epoch}"))
            }
            Fact::Stored { .. }
            | Fact::Resumed { .. }
            | Fact::Leads { .. }
            | Fact::Heard { .. }
            | Fact::Incident(_)
            | Fact::MadeFresh { .. }
            | Fact::Ready { .. }
            | Fact::Decided { .. }
            | Fact::Applied { .. } => Ok(()),
        }
    }

    fn ordered(&mut self, world: &World, fact: &Fact, command: &Command) -> Result<(), String> {
        let stored = fact.job().and_then(|job| world.store.jobs.get(job));
        let last_epoch = stored.map(|record| record.last_epoch).unwrap_or_default();
        let last_incarnation = stored.map(|record| record.last_incarnation).unwrap_or_default();
        match command {
            Command::Join { epoch, plan, .. } | Command::Prepare { epoch, plan, .. } => {
                if last_epoch < *epoch {
                    return Err(format!("{epoch} is prepared and not stored"));
                }
                let known = self.plans.entry(*epoch).or_insert_with(|| plan.clone());
                if known != plan {
                    return Err(format!("{epoch} has two plans"));
                }
                Ok(())
            }
            Command::Resume { epoch, .. } => {
                let layout = stored.and_then(|record| record.layout.as_ref());
                match layout {
                    Some(layout) if layout.epoch >= *epoch => Ok(()),
                    Some(_) | None => Err(format!("{epoch} is resumed and not stored")),
                }
            }
            Command::CloseEpoch { epoch, .. } if last_epoch < *epoch => {
                Err(format!("{epoch} is closed and not stored"))
            }
            Command::Spawn { worker, .. } => {
                if last_incarnation < worker.incarnation {
                    return Err(format!("{worker} is started and its number not stored"));
                }
                if !self.started.insert(worker.incarnation) {
                    return Err(format!("{worker} is started a second time"));
                }
                Ok(())
            }
            Command::CloseEpoch { .. }
            | Command::Persist(_)
            | Command::PersistIncident(_)
            | Command::Fence { .. }
            | Command::Pause { .. }
            | Command::Stop { .. }
            | Command::Plan { .. }
            | Command::Notify { .. }
            | Command::Forget { .. }
            | Command::Announce(_) => Ok(()),
        }
    }
}

fn grows(before: &JobRecord, now: &JobRecord) -> Result<(), String> {
    let epoch = |record: &JobRecord| record.layout.as_ref().map(|layout| layout.epoch);
    let all = now.last_epoch >= before.last_epoch
        // A job that begins anew has no layout yet.
        && (epoch(now) >= epoch(before) || before.phase.ended() && now.layout.is_none())
        && now.last_incarnation >= before.last_incarnation;
    if all { Ok(()) } else { Err(format!("the stored epoch or incarnation falls: {before:?} to {now:?}")) }
}
