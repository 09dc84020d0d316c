//! What the daemon orders and what the worker reports, without the wire's types.

use reknit_layout::{CheckpointId, Epoch, Holding, JobSpec, Layout, Step, Transfer, WorkerKey};
use reknit_plane::{Endpoint, Ticket};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub enum Order {
    Welcome {
        job: Box<JobSpec>,
        timeouts: Timeouts,
    },
    /// Abort the epoch's collectives, keep the state, report [`Report::Quiesced`].
    CloseEpoch {
        epoch: Epoch,
        reason: String,
    },
    /// Stop together at the next step boundary and report [`Report::Quiesced`].
    Pause {
        epoch: Epoch,
    },
    /// Join the groups of an epoch to come in the background, and train on; `resume_step` and `vote` say nothing yet.
    /// Answered by [`Report::Joined`].
    Join(Arc<Prepare>),
    Prepare(Box<Prepare>),
    Resume {
        epoch: Epoch,
    },
    Stop {
        /// For the log: the job's highest when this was ordered.
        epoch: Epoch,
        reason: String,
    },
}

#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    pub operation: Duration,
    pub join: Duration,
    pub progress: Duration,
    /// An operation that has waited for so long is told of.
    pub stall: Duration,
}

/// Everything a worker needs to get ready for a new epoch.
#[derive(Debug)]
pub struct Prepare {
    pub epoch: Epoch,
    /// The worker's own group with its stage's columns; `None` when it only sends and then leaves.
    pub layout: Option<Layout>,
    /// Every member makes its state from the seed, or takes it out of `checkpoint`.
    pub fresh: bool,
    /// The folder of one of `resume_step`.
    pub checkpoint: Option<PathBuf>,
    /// Those that this worker sends or receives, with their numbers in the plan.
    pub transfers: Vec<(usize, Transfer)>,
    /// Its group's members, those that sum its column, the first members of all groups and those that exchange its
    /// transfers; in the order of ranks, empty where it has no part.
    pub tensor: Vec<Participant>,
    pub column: Vec<Participant>,
    pub speakers: Vec<Participant>,
    pub movers: Vec<Participant>,
    pub ticket: Ticket,
    /// The step that all resume from. Whoever has prepared but not committed it commits it first, with `vote`.
    pub resume_step: Step,
    pub vote: Option<StepVote>,
}

#[derive(Debug, Clone)]
pub struct Participant {
    pub worker: WorkerKey,
    pub endpoint: Endpoint,
}

/// What a step's vote decided: the same bits on every rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepVote {
    pub grad_norm_squared: f64,
    /// Mean over the global batch.
    pub loss: f64,
}

#[derive(Debug)]
pub enum Report {
    PlaneFailed {
        epoch: Epoch,
        reason: String,
        peer: Option<WorkerKey>,
    },
    Quiesced(WorkerState),
    Joined {
        epoch: Epoch,
    },
    Ready {
        epoch: Epoch,
        step: Step,
        replicated_digest: String,
    },
    PrepareFailed {
        epoch: Epoch,
        reason: String,
        peer: Option<WorkerKey>,
    },
    Committed(Committed),
    Completed {
        epoch: Epoch,
        step: Step,
        replicated_digest: String,
    },
    /// The complete ones, the last written first, and when that was, in microseconds since the Unix epoch.
    Checkpoints {
        ids: Vec<CheckpointId>,
        written_us: u64,
    },
    /// This worker's part of it could not be written or read.
    NoCheckpoint {
        step: Step,
        reason: String,
    },
}

/// One step was committed by this worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Committed {
    /// The epoch under which its gradients were computed.
    pub epoch: Epoch,
    pub step: Step,
    pub vote: StepVote,
    pub share: Share,
    pub step_time: Duration,
    pub tokens: u64,
    pub rolled_forward: bool,
}

/// The samples of a step that one replica takes, as numbers in the job's order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    pub first: u64,
    pub count: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Holds nothing and opens its data.
    Opening,
    /// Holds nothing.
    Idle,
    Training,
    /// Stopped, keeps its state.
    Quiesced,
    Preparing,
    /// Has everything for the epoch to come.
    Ready,
    Completed,
}

/// What a worker says of itself.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerState {
    pub phase: Phase,
    /// The epoch it trains or trained under; 0 for none.
    pub epoch: Epoch,
    /// The epoch to come, in `Preparing` and `Ready`; 0 otherwise.
    pub ready_epoch: Epoch,
    /// `holding.step` is the committed step.
    pub holding: Holding,
    /// The highest step whose reduced gradients are all here.
    pub prepared: Step,
    /// The step in work when it stopped; the committed step when none was begun.
    pub attempted: Step,
    /// The vote of the committed step.
    pub vote: Option<StepVote>,
}

/// What of a step the training thread is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepPart {
    Forward = 1,
    Backward,
    /// The sum of gradients over replicas.
    Sums,
    Vote,
    /// The optimizer.
    Apply,
}

impl StepPart {
    /// `None` for a number that no part has.
    pub fn numbered(number: u32) -> Option<Self> {
        let all = [Self::Forward, Self::Backward, Self::Sums, Self::Vote, Self::Apply];
        all.into_iter().find(|part| *part as u32 == number)
    }
}
