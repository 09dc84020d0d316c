//! Everything that reaches the loop.

use crate::sessions::{Peer, Session, SessionId};
use reknit_engine::{Event, Incident, JobName, JobView, NodeView, Refusal};
use reknit_layout::{GpuId, JobSpec, NodeName, WorkerKey};
use reknit_proto::v1;
use tokio::sync::oneshot;

#[derive(Debug)]
pub enum Input {
    /// `hello` is what the engine is told of it.
    AgentOpened {
        node: NodeName,
        session: Session<v1::AgentOrder>,
        hello: Event,
    },
    WorkerOpened {
        job: JobName,
        worker: WorkerKey,
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
    /// An event that is acknowledged by number once it is carried out.
    Numbered(u64, Event),
    /// Nothing but a sign of life.
    Alive,
}

pub type Reply<T> = oneshot::Sender<T>;

/// What operators ask: answered by the loop, so that they see one consistent state.
#[derive(Debug)]
pub enum Request {
    Submit(Box<JobSpec>, Reply<Result<Option<JobView>, Refusal>>),
    GetJob(JobName, Reply<Option<JobView>>),
    ListJobs(Reply<Vec<JobView>>),
    StopJob(JobName, Reply<Result<Option<JobView>, Refusal>>),
    ListNodes(Reply<Vec<NodeView>>),
    DrainGpu(GpuId, Reply<Result<(), Refusal>>),
    RestoreGpu(GpuId, Reply<Result<(), Refusal>>),
    /// `None`: no such job.
    ListIncidents(JobName, Reply<Option<Vec<Incident>>>),
}
