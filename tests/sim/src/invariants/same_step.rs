//! SAME-STEP: all members resume an epoch at the same committed step, and take each step together.

use super::{Fact, members};
use crate::world::World;
use reknit_layout::{Epoch, Step};
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(super) struct SameStep(BTreeMap<Epoch, Step>);

impl SameStep {
    pub(super) fn see(&mut self, world: &World, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Resumed { worker, epoch, step, .. } => {
                let first = *self.0.entry(*epoch).or_insert(*step);
                let held = world.workers.get(worker).map(|worker| worker.memory.step);
                if first != *step || held.is_some_and(|held| held != step.0) {
                    return Err(format!(
                        "{worker} resumes {epoch} at {step} with {held:?}, others at {first}"
                    ));
                }
            }
            Fact::Decided { job, epoch, step, plan } => {
                for who in members(job, plan) {
                    let held = world.workers.get(&who).map(|worker| worker.memory.step);
                    if held != Some(step.0 - 1) {
                        return Err(format!("{who} takes step {step} of {epoch} with {held:?}"));
                    }
                }
            }
            Fact::Leads { .. }
            | Fact::Heard { .. }
            | Fact::Ordered { .. }
            | Fact::Stored { .. }
            | Fact::Incident(_)
            | Fact::MadeFresh { .. }
            | Fact::Ready { .. }
            | Fact::Applied { .. } => {}
        }
        Ok(())
    }
}
