//! Everything that reaches the loop.

use crate::agents::Greeting;
use crate::clock::Clock;
use crate::sessions::{Peer, Session, SessionId};
use reknit_engine::{Event, Incident, JobName, JobView, Refusal, Time};
use reknit_layout::{GpuId, JobSpec, NodeName, Step, WorkerKey};
use reknit_proto::v1;
use tokio::sync::{mpsc, oneshot};

/// Inputs not yet taken. When it is full, sessions and calls wait.
const BACKLOG: usize = 4096;

/// The way to the loop. What is told carries the time at which it came: that is what deadlines are held against, however
/// long the loop was kept by the store meanwhile.
#[derive(Debug, Clone)]
pub struct Inputs {
    to_loop: mpsc::Sender<(Time, Input)>,
    clock: Clock,
}

impl Inputs {
    pub fn new(clock: Clock) -> (Self, mpsc::Receiver<(Time, Input)>) {
        let (to_loop, inputs) = mpsc::channel(BACKLOG);
        (Self { to_loop, clock }, inputs)
    }

    /// False when the loop has ended.
    pub async fn tell(&self, input: Input) -> bool {
        self.to_loop.send((self.clock.now(), input)).await.is_ok()
    }
}

#[derive(Debug)]
pub enum Input {
    /// `hello` is what the engine is told of it.
    AgentOpened {
        node: NodeName,
        session: Session<v1::AgentOrder>,
        hello: Event,
        /// What the loop keeps itself.
        greeting: Greeting,
    },
    WorkerOpened {
        job: JobName,
        worker: WorkerKey,
        /// Which of its process's connections it is.
        connection: u64,
        session: Session<v1::WorkerOrder>,
        hello: Event,
    },
    Said {
        peer: Peer,
        session: SessionId,
        said: Said,
    },
    Closed {
        peer: Peer,
        session: SessionId,
    },
    Planned(Event),
    /// The planner panicked: nobody will answer.
    PlannerDied(String),
    Asked(Request),
}

/// One message of an open session.
#[derive(Debug)]
pub enum Said {
    Event(Event),
    /// An agent's hello again: its list of GPUs changed.
    Hello(Event, Box<Greeting>),
    /// A numbered change of a GPU's class, acknowledged once it is carried out, with all that was said of it.
    Transition(Event, Box<v1::HealthTransition>),
    Heartbeat(v1::AgentHeartbeat),
    /// An agent's answer to what an operator asked.
    Done(v1::OrderDone),
}

pub type Reply<T> = oneshot::Sender<T>;

/// What operators ask: answered by the loop, so that they see one consistent state.
#[derive(Debug)]
pub enum Request {
    Submit(Box<JobSpec>, Reply<Result<Option<JobView>, Refusal>>),
    GetJob(JobName, Reply<Option<JobView>>),
    ListJobs(Reply<Vec<JobView>>),
    RebalanceJob(JobName, Reply<Result<Option<JobView>, Refusal>>),
    /// To the checkpoint of this step, or to the last.
    RestoreJob(JobName, Option<Step>, Reply<Result<Option<JobView>, Refusal>>),
    StopJob(JobName, Reply<Result<Option<JobView>, Refusal>>),
    ListNodes(Reply<Vec<v1::Node>>),
    DrainGpu(GpuId, Reply<Result<(), Refusal>>),
    /// Answered when its agent has, with the agent's words.
    RestoreGpu(GpuId, Reply<Result<String, Refusal>>),
    /// Likewise. `force`: although workers run on the node.
    Agent {
        ask: Ask,
        force: bool,
    },
    SetPowerLimit {
        gpu: GpuId,
        limit_mw: u32,
        lease_seconds: u32,
        reply: Reply<Result<String, Refusal>>,
    },
    /// `None`: no such job.
    ListIncidents(JobName, Reply<Option<Vec<Incident>>>),
}

/// What an operator wants of one node's agent.
#[derive(Debug)]
pub struct Ask {
    pub node: NodeName,
    pub wish: Wish,
    pub reply: Reply<Result<String, Refusal>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    Quiesce { seconds: u32 },
    EndQuiesce,
    Probe,
    PowerLimit { gpu: GpuId, limit_mw: u32, lease_seconds: u32 },
    Release { gpu: GpuId },
}
