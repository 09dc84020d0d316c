//! The invariants of the design, each in a file of its own. They look at what workers truly hold and what the store
//! truly took, not at what an engine believes.

mod attributed;
mod cover;
mod no_guess;
mod one_epoch;
mod only_copy;
mod replicated;
mod rng;
mod same_step;
mod samples;

use crate::cluster::Who;
use crate::memory::Memory;
use crate::world::World;
use reknit_engine::{Command, Event, Incident, JobName, JobRecord, Phase};
use reknit_layout::{Epoch, Plan, Step};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Something that happened and that an invariant is about.
#[derive(Debug, Clone)]
pub enum Fact {
    Leads {
        term: u64,
    },
    Heard {
        term: u64,
        event: Event,
    },
    Ordered {
        command: Box<Command>,
    },
    Stored {
        before: Option<Box<JobRecord>>,
        record: Box<JobRecord>,
    },
    Incident(Box<Incident>),
    /// A worker made its state from the job's seed.
    MadeFresh {
        worker: Who,
        epoch: Epoch,
    },
    Ready {
        worker: Who,
        epoch: Epoch,
    },
    /// A worker gave up `old` for what it got ready.
    Resumed {
        worker: Who,
        before: Epoch,
        epoch: Epoch,
        step: Step,
        old: Box<Memory>,
        plan: Arc<Plan>,
    },
    /// A vote of all members succeeded.
    Decided {
        job: JobName,
        epoch: Epoch,
        step: Step,
        plan: Arc<Plan>,
    },
    Applied {
        worker: Who,
        step: Step,
    },
}

/// What is remembered of each job.
#[derive(Debug, Default)]
pub(crate) struct Invariants {
    jobs: BTreeMap<JobName, OfJob>,
    /// Of the leader of all.
    term: u64,
    attributed: attributed::Attributed,
}

#[derive(Debug, Default)]
struct OfJob {
    one_epoch: one_epoch::OneEpoch,
    only_copy: only_copy::OnlyCopy,
    same_step: same_step::SameStep,
    samples: samples::Samples,
    no_guess: no_guess::NoGuess,
}

impl Fact {
    /// `None`: it is about all.
    fn job(&self) -> Option<&JobName> {
        match self {
            Self::Leads { .. } => None,
            Self::Heard { event, .. } => match event {
                Event::Committed { job, .. } => Some(job),
                _ => None,
            },
            Self::Ordered { command } => match command.as_ref() {
                Command::Persist(record) => Some(&record.name),
                Command::PersistIncident(incident) => Some(&incident.job),
                Command::Spawn { job, .. }
                | Command::Fence { job, .. }
                | Command::CloseEpoch { job, .. }
                | Command::Pause { job, .. }
                | Command::Join { job, .. }
                | Command::Prepare { job, .. }
                | Command::Resume { job, .. }
                | Command::Stop { job, .. }
                | Command::Plan { job, .. }
                | Command::Notify { job, .. } => Some(job),
                Command::Forget { .. } | Command::Announce(_) => None,
            },
            Self::Stored { record, .. } => Some(&record.name),
            Self::Incident(incident) => Some(&incident.job),
            Self::Decided { job, .. } => Some(job),
            Self::MadeFresh { worker, .. }
            | Self::Ready { worker, .. }
            | Self::Resumed { worker, .. }
            | Self::Applied { worker, .. } => Some(&worker.job),
        }
    }

    /// The job begins anew under its name: only its epochs and its workers' numbers go on.
    fn begins_anew(&self) -> bool {
        match self {
            Self::Stored { before: Some(before), record } => {
                before.phase.ended() && record.phase == Phase::Pending
            }
            _ => false,
        }
    }
}

impl Invariants {
    /// # Errors
    /// Names the invariant that is broken, and how.
    pub(crate) fn see(&mut self, world: &mut World, fact: &Fact) -> Result<(), String> {
        let Some(job) = fact.job() else {
            if let Fact::Leads { term } = fact {
                self.term = *term;
            }
            return self.jobs.values_mut().try_for_each(|of_job| of_job.see(world, fact));
        };
        let new =
            |one_epoch| OfJob { one_epoch, samples: samples::Samples::under(self.term), ..OfJob::default() };
        let of_job = self.jobs.entry(job.clone()).or_insert_with(|| new(one_epoch::OneEpoch::default()));
        if fact.begins_anew() {
            *of_job = new(std::mem::take(&mut of_job.one_epoch));
        }
        of_job.see(world, fact)?;
        self.attributed.see(world, fact).map_err(|how| format!("ATTRIBUTED: {how}"))
    }
}

impl OfJob {
    fn see(&mut self, world: &mut World, fact: &Fact) -> Result<(), String> {
        let named = |name: &str, result: Result<(), String>| result.map_err(|how| format!("{name}: {how}"));
        named("ONE-EPOCH", self.one_epoch.see(world, fact))?;
        named("ONLY-COPY", self.only_copy.see(world, fact))?;
        named("SAME-STEP", self.same_step.see(world, fact))?;
        named("NO-GUESS", self.no_guess.see(world, fact))?;
        named("SAMPLES", self.samples.see(world, fact))?;
        named("COVER", cover::see(world, fact))?;
        named("REPLICATED", replicated::see(world, fact))?;
        named("RNG", rng::see(world, fact))
    }
}

/// The members of a plan's layout.
fn members(job: &JobName, plan: &Plan) -> impl Iterator<Item = Who> {
    plan.layout.members().map(|(_, member)| Who::new(job, &member.worker))
}
