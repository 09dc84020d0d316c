//! NO-GUESS: once a layout was committed, state comes from a live copy and never from the seed. What a plan takes from
//! a source that does not hold it is found when the worker fetches it.

use super::Fact;
use crate::world::World;
use reknit_engine::Command;

/// Whether a step was ever committed.
#[derive(Debug, Default)]
pub(super) struct NoGuess(bool);

impl NoGuess {
    pub(super) fn see(&mut self, _: &World, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Decided { .. } => self.0 = true,
            Fact::MadeFresh { worker, epoch } if self.0 => {
                return Err(format!("{worker} makes its state from the seed in {epoch}"));
            }
            Fact::Ordered { command } => {
                if let Command::Prepare { epoch, plan, .. } = command.as_ref()
                    && plan.fresh
                    && self.0
                {
                    return Err(format!("{epoch} starts from the seed again"));
                }
            }
            Fact::Stored { before: Some(before), record }
                if before.ever_committed && !record.ever_committed =>
            {
                return Err("the store forgets that the job has begun".to_owned());
            }
            Fact::Stored { .. }
            | Fact::MadeFresh { .. }
            | Fact::Leads { .. }
            | Fact::Heard { .. }
            | Fact::Incident(_)
            | Fact::Ready { .. }
            | Fact::Resumed { .. }
            | Fact::Applied { .. } => {}
        }
        Ok(())
    }
}
