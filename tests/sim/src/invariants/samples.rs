//! SAMPLES: the samples of committed steps are a prefix of the order, without gap or repeat. A step that the leader
//! was told of is never run again.

use super::Fact;
use crate::memory::BATCH;
use crate::plane::samples;
use crate::world::World;
use reknit_engine::{Command, Event, Phase};
use reknit_layout::{Epoch, Step};

#[derive(Debug, Default)]
pub(super) struct Samples {
    term: u64,
    /// The newest step that the present leader heard of from a member while the job ran, and its epoch.
    told: (Step, Epoch),
    /// Since then the job goes on from a checkpoint: what was told before was given up.
    restored: Epoch,
}

impl Samples {
    pub(super) fn under(term: u64) -> Self {
        Self { term, ..Self::default() }
    }

    pub(super) fn see(&mut self, world: &World, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Leads { term } => {
                *self = Self::under(*term);
                Ok(())
            }
            Fact::Heard { term, event: Event::Committed { job, worker, epoch, step, .. } }
                if *term == self.term =>
            {
                let record = world.store.jobs.get(job);
                let record = record.filter(|record| record.phase == Phase::Running);
                let record = record.filter(|record| step.0 <= record.spec.run.steps);
                let layout = record.and_then(|record| record.layout.as_ref());
                let layout = layout.filter(|layout| layout.epoch == *epoch);
                if layout.is_some_and(|layout| layout.place_of(worker).is_some()) && *step > self.told.0 {
                    self.told = (*step, *epoch);
                }
                Ok(())
            }
            Fact::Ordered { command } => match command.as_ref() {
                Command::Prepare { resume_step, epoch, checkpoint: None, .. }
                    if *epoch > self.told.1 && *resume_step < self.told.0 =>
                {
                    Err(format!("{epoch} resumes at {resume_step}; step {} was committed", self.told.0))
                }
                _ => Ok(()),
            },
            Fact::Stored { record, .. } if record.restored > self.restored => {
                self.restored = record.restored;
                self.told = Default::default();
                Ok(())
            }
            Fact::Decided { epoch, step, plan, job: _ } => {
                let mut next = (step.0 - 1) * BATCH;
                for range in samples(&plan.layout, step.0) {
                    if range.start != next {
                        return Err(format!("step {step} of {epoch} goes from {next} on with {range:?}"));
                    }
                    next = range.end;
                }
                if next != step.0 * BATCH {
                    return Err(format!("step {step} of {epoch} ends with sample {next}"));
                }
                if *epoch > self.told.1 && *step <= self.told.0 {
                    return Err(format!("step {step} is run again in {epoch}"));
                }
                Ok(())
            }
            Fact::Heard { .. }
            | Fact::Stored { .. }
            | Fact::Incident(_)
            | Fact::MadeFresh { .. }
            | Fact::Ready { .. }
            | Fact::Resumed { .. }
            | Fact::Applied { .. } => Ok(()),
        }
    }
}
