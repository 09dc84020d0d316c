//! What the engine is told.

use crate::{Incident, JobName, JobRecord, Time};
use reknit_layout::{
    CheckpointId, Epoch, GpuId, Holding, JobSpec, NodeName, Plan, PlanError, Step, WorkerKey,
};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// First of all, once: what the store holds.
    Started {
        jobs: Vec<JobRecord>,
        incidents: Vec<Incident>,
    },

    /// An agent opened its session. `workers` run on its node now, with their pids.
    AgentConnected {
        node: NodeName,
        gpus: Vec<GpuReport>,
        workers: Vec<(JobName, WorkerKey, u32)>,
    },
    AgentDisconnected {
        node: NodeName,
    },
    /// In an open session: the node's GPUs are these now. Says nothing of workers: one may be about to start.
    GpusListed {
        node: NodeName,
        gpus: Vec<GpuReport>,
    },
    HealthChanged {
        node: NodeName,
        gpu: GpuId,
        health: HealthClass,
        cause: String,
        /// What the agent suggests to do.
        action: String,
        shards_readable: bool,
    },
    WorkerSpawned {
        node: NodeName,
        job: JobName,
        worker: WorkerKey,
        pid: u32,
    },
    /// The process is confirmed gone (or never came to be).
    WorkerExited {
        node: NodeName,
        job: JobName,
        worker: WorkerKey,
        exit: ExitStatus,
    },

    /// A worker opened its session, for the first time or again.
    WorkerConnected {
        job: JobName,
        worker: WorkerKey,
        node: NodeName,
        endpoint: Endpoint,
        pid: u32,
        state: WorkerState,
    },
    /// The session ended. Says nothing about the process.
    WorkerDisconnected {
        job: JobName,
        worker: WorkerKey,
    },
    PlaneFailed {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
        peer: Option<WorkerKey>,
        reason: String,
    },
    Quiesced {
        job: JobName,
        worker: WorkerKey,
        state: WorkerState,
    },
    /// All groups of an epoch to come are joined, in the background.
    Joined {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
    },
    Ready {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
        step: Step,
        replicated_digest: String,
    },
    PrepareFailed {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
        peer: Option<WorkerKey>,
        reason: String,
    },
    Committed {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
        step: Step,
        vote: StepVote,
        first_sample: u64,
        samples: u32,
        step_ms: u32,
        tokens: u64,
        rolled_forward: bool,
    },
    Progress {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
        /// The last committed one.
        step: Step,
        /// Grows with every operation: training has moved only if it has grown.
        ticks: u64,
        activity: Activity,
    },
    /// What a worker that does not train says instead.
    Alive {
        job: JobName,
        worker: WorkerKey,
    },
    Completed {
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
        step: Step,
        replicated_digest: String,
    },

    /// A worker has looked for the job's checkpoints: the complete ones, the last written first, and when that was.
    Checkpoints {
        job: JobName,
        worker: WorkerKey,
        ids: Vec<CheckpointId>,
        written: Time,
    },
    /// A worker could not write its part of this checkpoint, or not load its own out of it.
    NoCheckpoint {
        job: JobName,
        worker: WorkerKey,
        step: Step,
        reason: String,
    },

    /// The answer to [`crate::Command::Plan`].
    Planned {
        job: JobName,
        epoch: Epoch,
        result: Result<Plan, PlanError>,
    },

    /// An operator's wish. The shell asks `State::refuse_submit` and its like first; here it is only carried out.
    Submit {
        spec: Box<JobSpec>,
    },
    StopJob {
        job: JobName,
    },
    /// Makes a new layout of the members that are there, at a step boundary.
    Rebalance {
        job: JobName,
    },
    /// Goes back to the checkpoint of this step, or to the one that was written last.
    RestoreJob {
        job: JobName,
        step: Option<Step>,
    },
    DrainGpu {
        gpu: GpuId,
    },
    RestoreGpu {
        gpu: GpuId,
    },

    /// Time has passed: sent when `State::next_deadline` is reached.
    Tick,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuReport {
    pub gpu: GpuId,
    pub index: u32,
    pub name: String,
    pub health: HealthClass,
    pub cause: String,
    pub action: String,
    pub shards_readable: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthClass {
    Healthy,
    /// Drop now; shards unreadable.
    Fatal,
    /// Its process died; the GPU may rejoin at once.
    RankDied,
    /// Take out at a step boundary, as a source.
    Drain,
    Predict,
    /// The driver does not answer.
    Unknown,
}

impl HealthClass {
    /// Its worker cannot be a source any more: the GPU is dropped at once. A drain of a GPU whose shards cannot be
    /// read has nothing to wait for.
    pub fn is_loss(self, shards_readable: bool) -> bool {
        match self {
            Self::Fatal => true,
            Self::Drain => !shards_readable,
            Self::Healthy | Self::RankDied | Self::Predict | Self::Unknown => false,
        }
    }
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExitStatus {
    /// In words.
    pub how: String,
    pub signal: Option<i32>,
    /// `None` when a signal ended it or it never started.
    pub status: Option<i32>,
}

/// Where a worker's data plane listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    pub node: String,
    pub unix: String,
    pub tcp: String,
}

/// What a worker says of itself.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerState {
    pub phase: WorkerPhase,
    /// The epoch it trains or trained under; 0 for none.
    pub epoch: Epoch,
    /// The epoch to come, in `Ready` and `Preparing`; 0 otherwise.
    pub ready_epoch: Epoch,
    /// `holding.step` is the committed step.
    pub holding: Holding,
    /// The highest step whose reduced gradients are all here: `holding.step` or one more.
    pub prepared: Step,
    /// The step in work when it stopped; `holding.step` when none was begun.
    pub attempted: Step,
    /// The vote of the committed step; `None` before the first.
    pub vote: Option<StepVote>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerPhase {
    /// It holds nothing and opens its data; it says [`Event::Quiesced`] when it has.
    Opening,
    Idle,
    Training,
    Quiesced,
    Preparing,
    Ready,
    Completed,
}

/// What a training worker does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Activity {
    pub part: Option<StepPart>,
    /// In the forward and the backward pass: counted from 0.
    pub micro_batch: u32,
    /// Whose contributions the operation in hand misses, at most 8 of them; empty when it does not wait.
    pub waiting_for: Vec<WorkerKey>,
    pub waiting_ms: u32,
    /// In all steps committed by this process, without the waiting for others.
    pub computed_us: u64,
}

impl Activity {
    pub fn waiting(&self) -> std::time::Duration {
        std::time::Duration::from_millis(self.waiting_ms.into())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepPart {
    Forward,
    Backward,
    /// The sum of gradients over replicas.
    Sums,
    Vote,
    /// The optimizer.
    Apply,
}

/// What a step's vote decided: the same bits on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepVote {
    pub grad_norm_squared: f64,
    pub loss: f64,
}
