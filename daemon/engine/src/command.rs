//! What the engine wants done.

use crate::{Endpoint, Incident, JobName, JobRecord, Phase, StepVote};
use reknit_layout::{Candidate, Epoch, JobSpec, NodeName, Place, Plan, Step, Topology, WorkerKey};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The shell carries these out in order. If a `Persist` fails, nothing after it may happen: the daemon no longer leads.
///
/// What is ordered carries an epoch: the one it is about, or for a process's start and end the job's highest when the
/// order was given (0: the job is not known).
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Store the record durably before the next command.
    Persist(Box<JobRecord>),
    PersistIncident(Box<Incident>),

    Spawn {
        node: NodeName,
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
    },
    /// Kill and confirm; answered by `Event::WorkerExited`.
    Fence {
        node: NodeName,
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
    },

    CloseEpoch {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
        reason: String,
    },
    Pause {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
    },
    /// The shell adds the epoch's ticket: fresh random bytes per epoch, never stored.
    Prepare {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
        plan: Arc<Plan>,
        participants: Arc<Vec<Participant>>,
        resume_step: Step,
        vote: Option<StepVote>,
        /// The folder of the checkpoint that state is taken from, where the plan is fresh.
        checkpoint: Option<Arc<str>>,
    },
    /// Join the groups of an epoch to come in the background, and train on: [`crate::Event::Joined`] answers. The order to
    /// prepare the same epoch follows, with the same ticket, or one about a later epoch.
    Join {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
        plan: Arc<Plan>,
        participants: Arc<Vec<Participant>>,
    },
    Resume {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
    },
    Stop {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
        reason: String,
    },

    /// Run `reknit_layout::plan` on this, off the event loop, and answer with `Event::Planned`.
    Plan {
        job: JobName,
        epoch: Epoch,
        spec: Arc<JobSpec>,
        workers: BTreeMap<WorkerKey, Candidate>,
        topology: Arc<Topology>,
        fresh: bool,
    },

    /// Nothing is known of the node any more: drop what else is kept of it.
    Forget {
        node: NodeName,
    },

    /// For operators who watch.
    Notify {
        job: JobName,
        notice: Notice,
    },
    /// The same, about the cluster: whoever watches any job is told.
    Announce(String),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Participant {
    pub worker: WorkerKey,
    pub endpoint: Endpoint,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Notice {
    /// `complete`: every replica's samples are known.
    Step {
        epoch: Epoch,
        step: Step,
        loss: f64,
        tokens: u64,
        step_ms: u32,
        complete: bool,
        samples_missing: u32,
        samples_repeated: u32,
    },
    Phase {
        phase: Phase,
        explanation: String,
    },
    Layout {
        epoch: Epoch,
        degrees: Vec<u32>,
        batch: Vec<u32>,
        bytes_moved: u64,
        bytes_lower_bound: u64,
        resume_step: Step,
    },
    Incident(Box<Incident>),
    Worker {
        worker: WorkerKey,
        place: Option<Place>,
        node: NodeName,
        pid: u32,
        state: String,
    },
    /// In words, for people.
    Note(String),
}
