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

use crate::memory::Memory;
use crate::world::World;
use reknit_engine::{Command, Event, Incident, JobRecord};
use reknit_layout::{Epoch, Plan, Step, WorkerKey};
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
        worker: WorkerKey,
        epoch: Epoch,
    },
    Ready {
        worker: WorkerKey,
        epoch: Epoch,
        ticket: u64,
    },
    /// A worker gave up `old` for what it got ready.
    Resumed {
        worker: WorkerKey,
        before: Epoch,
        epoch: Epoch,
        step: Step,
        old: Box<Memory>,
        plan: Arc<Plan>,
    },
    /// A vote of all members succeeded.
    Decided {
        epoch: Epoch,
        step: Step,
        plan: Arc<Plan>,
    },
    Applied {
        worker: WorkerKey,
        step: Step,
    },
}

/// What each invariant remembers.
#[derive(Debug, Default)]
pub(crate) struct Invariants {
    one_epoch: one_epoch::OneEpoch,
    only_copy: only_copy::OnlyCopy,
    same_step: same_step::SameStep,
    samples: samples::Samples,
    no_guess: no_guess::NoGuess,
}

impl Invariants {
    /// # Errors
    /// Names the invariant that is broken, and how.
    pub(crate) fn see(&mut self, world: &mut World, fact: &Fact) -> Result<(), String> {
        let named = |name: &str, result: Result<(), String>| result.map_err(|how| format!("{name}: {how}"));
        named("ONE-EPOCH", self.one_epoch.see(world, fact))?;
        named("ONLY-COPY", self.only_copy.see(world, fact))?;
        named("SAME-STEP", self.same_step.see(world, fact))?;
        named("SAMPLES", self.samples.see(world, fact))?;
        named("NO-GUESS", self.no_guess.see(world, fact))?;
        named("COVER", cover::see(world, fact))?;
        named("REPLICATED", replicated::see(world, fact))?;
        named("RNG", rng::see(world, fact))?;
        named("ATTRIBUTED", attributed::see(fact))
    }
}

/// The members of a plan's layout.
fn members(plan: &Plan) -> impl Iterator<Item = &WorkerKey> {
    plan.layout.members().map(|(_, member)| &member.worker)
}
