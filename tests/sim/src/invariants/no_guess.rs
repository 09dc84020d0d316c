//! NO-GUESS: once a layout was committed, state comes from a live copy and never from the seed. What a plan takes from
//! a source that does not hold it is found when the worker fetches it.

use super::{Fact, rng};
use crate::world::World;
use reknit_engine::Command;
use reknit_layout::Epoch;

/// The epoch of the first step that was committed.
#[derive(Debug, Default)]
pub(super) struct NoGuess(Option<Epoch>);

impl NoGuess {
    pub(super) fn see(&mut self, world: &mut World, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Decided { epoch, .. } => {
                self.0.get_or_insert(*epoch);
            }
            Fact::MadeFresh { worker, epoch } if self.0.is_some_and(|first| *epoch > first) => {
                return Err(format!("{worker} makes its state from the seed in {epoch}"));
            }
            Fact::Ordered { command } => {
                // A checkpoint is a copy of its step.
                if let Command::Prepare { epoch, plan, checkpoint: None, .. } = command.as_ref()
                    && plan.fresh
                    && self.0.is_some_and(|first| *epoch > first)
                {
                    return Err(format!("{epoch} starts from the seed again"));
                }
            }
            Fact::Stored { before: Some(before), record }
                if before.ever_committed && !record.ever_committed && !before.phase.ended() =>
            {
                return Err("the store forgets that the job has begun".to_owned());
            }
            Fact::Resumed { worker, epoch, .. } => {
                let Some(found) = world.workers.get(worker) else { return Ok(()) };
                let (memory, seed) = (found.memory.clone(), found.seed);
                if let Some(place) = rng::wrong(world, &memory, seed) {
                    return Err(format!("{worker} resumes {epoch} with a value {place} that nobody held"));
                }
            }
            Fact::Stored { .. }
            | Fact::MadeFresh { .. }
            | Fact::Leads { .. }
            | Fact::Heard { .. }
            | Fact::Incident(_)
            | Fact::Ready { .. }
            | Fact::Applied { .. } => {}
        }
        Ok(())
    }
}
