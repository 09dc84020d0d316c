//! What agents and workers say.

use super::limits::{MOST_GPUS, MOST_WORKERS, at_most, cut, gaps, known_gpu, named, short, verdict};
use crate::agents::Greeting;
use crate::input::Said;
use reknit_engine::{
    Activity, Endpoint, Event, ExitStatus, GpuReport, HealthClass, JobName, StepPart, StepVote, Time,
    WorkerPhase, WorkerState,
};
use reknit_layout::{Epoch, GpuId, Holding, Incarnation, NodeName, Step, WorkerKey};
use reknit_proto::v1;
use std::time::Duration;
use tonic::Status;

/// Of the workers that one waits for.
const WAITING_NAMED: usize = 8;

/// A message that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadMessage {
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("{field}: {problem}")]
    Bad { field: &'static str, problem: String },
}

impl From<BadMessage> for Status {
    fn from(bad: BadMessage) -> Self {
        Self::invalid_argument(bad.to_string())
    }
}

pub(super) fn bad(field: &'static str, problem: impl ToString) -> BadMessage {
    BadMessage::Bad { field, problem: problem.to_string() }
}

fn worker_key(key: Option<v1::WorkerKey>) -> Result<(JobName, WorkerKey), BadMessage> {
    let key = key.ok_or(BadMessage::Missing("worker"))?;
    let worker =
        WorkerKey { gpu: GpuId(named("worker.gpu", key.gpu)?), incarnation: Incarnation(key.incarnation) };
    Ok((JobName(named("worker.job", key.job)?), worker))
}

/// A worker of the same job, if one is named.
fn peer(key: Option<v1::WorkerKey>) -> Result<Option<WorkerKey>, BadMessage> {
    match key {
        Some(key) => Ok(Some(worker_key(Some(key))?.1)),
        None => Ok(None),
    }
}

fn health(field: &'static str, class: i32) -> Result<HealthClass, BadMessage> {
    let class = v1::HealthClass::try_from(class).map_err(|error| bad(field, error))?;
    match class {
        v1::HealthClass::Unspecified => Err(BadMessage::Missing(field)),
        v1::HealthClass::Healthy => Ok(HealthClass::Healthy),
        v1::HealthClass::Fatal => Ok(HealthClass::Fatal),
        v1::HealthClass::RankDied => Ok(HealthClass::RankDied),
        v1::HealthClass::Drain => Ok(HealthClass::Drain),
        v1::HealthClass::Predict => Ok(HealthClass::Predict),
        v1::HealthClass::Unknown => Ok(HealthClass::Unknown),
    }
}

/// The first message of an agent's stream.
pub fn agent_hello(report: v1::AgentReport) -> Result<(NodeName, Event, Greeting), BadMessage> {
    let Some(v1::agent_report::Report::Hello(mut hello)) = report.report else {
        return Err(BadMessage::Missing("Hello, which comes first,"));
    };
    at_most("workers", hello.workers.len(), MOST_WORKERS)?;
    let workers = std::mem::take(&mut hello.workers).into_iter().map(|process| {
        let (job, worker) = worker_key(process.worker)?;
        Ok((job, worker, process.pid))
    });
    let workers = workers.collect::<Result<_, _>>()?;
    let (node, gpus, greeting) = greeting(hello)?;
    Ok((node.clone(), Event::AgentConnected { node, gpus, workers }, greeting))
}

fn greeting(hello: v1::AgentHello) -> Result<(NodeName, Vec<GpuReport>, Greeting), BadMessage> {
    let observability = hello.observability();
    let node = NodeName(named("node", hello.node)?);
    at_most("gpus", hello.gpus.len(), MOST_GPUS)?;
    let known: Vec<v1::Gpu> = hello.gpus.into_iter().map(known_gpu).collect::<Result<_, _>>()?;
    let gpus = known.iter().map(|gpu| {
        let verdict = gpu.verdict();
        Ok(GpuReport {
            gpu: GpuId(gpu.uuid.clone()),
            index: gpu.index,
            name: gpu.name.clone(),
            health: health("gpus.health", verdict.health)?,
            cause: verdict.cause.clone(),
            action: verdict.action.clone(),
            shards_readable: verdict.shards_readable,
        })
    });
    let gpus = gpus.collect::<Result<_, _>>()?;
    let greeting = Greeting {
        instance: short("instance", hello.instance)?,
        connection: hello.connection,
        version: cut(hello.version),
        observability,
        gaps: gaps(hello.gaps),
        quiesce_left: Duration::from_millis(hello.quiesce_left_ms),
        next_sequence: hello.next_sequence,
        gpus: known,
    };
    Ok((node, gpus, greeting))
}

pub fn agent_report(node: &NodeName, report: v1::AgentReport) -> Result<Said, BadMessage> {
    use v1::agent_report::Report;
    let node = node.clone();
    match report.report.ok_or(BadMessage::Missing("report"))? {
        Report::Hello(hello) => {
            let (named, gpus, greeting) = greeting(hello)?;
            if named != node {
                return Err(bad("node", format!("this session is that of {node}")));
            }
            Ok(Said::Hello(Event::GpusListed { node, gpus }, Box::new(greeting)))
        }
        Report::Health(mut transition) => {
            transition.verdict = transition.verdict.map(verdict);
            let verdict = transition.verdict();
            let event = Event::HealthChanged {
                node,
                gpu: GpuId(named("gpu", transition.gpu.clone())?),
                health: health("health", verdict.health)?,
                cause: verdict.cause.clone(),
                action: verdict.action.clone(),
                shards_readable: verdict.shards_readable,
            };
            Ok(Said::Transition(event, Box::new(transition)))
        }
        Report::Spawned(spawned) => {
            let (job, worker) = worker_key(spawned.worker)?;
            Ok(Said::Event(Event::WorkerSpawned { node, job, worker, pid: spawned.pid }))
        }
        Report::Exited(exited) => {
            let (job, worker) = worker_key(exited.worker)?;
            Ok(Said::Event(Event::WorkerExited {
                node,
                job,
                worker,
                exit: ExitStatus {
                    how: cut(exited.how),
                    signal: (exited.signal != 0).then_some(exited.signal),
                    status: (exited.status != -1).then_some(exited.status),
                },
            }))
        }
        Report::Heartbeat(beat) => {
            at_most("gpus", beat.gpus.len(), MOST_GPUS)?;
            Ok(Said::Heartbeat(v1::AgentHeartbeat { gaps: gaps(beat.gaps), ..beat }))
        }
        Report::Done(done) => Ok(Said::Done(v1::OrderDone { message: cut(done.message), ..done })),
    }
}

/// Of one report that are taken: more than a job keeps.
const MOST_CHECKPOINTS: usize = 1024;

/// The first message of a worker's stream.
pub fn worker_hello(report: v1::WorkerReport) -> Result<(JobName, WorkerKey, u64, Event), BadMessage> {
    let Some(v1::worker_report::Report::Hello(hello)) = report.report else {
        return Err(BadMessage::Missing("Hello, which comes first,"));
    };
    let (job, worker) = worker_key(hello.worker)?;
    let connection = hello.connection;
    let endpoint = hello.endpoint.ok_or(BadMessage::Missing("endpoint"))?;
    let event = Event::WorkerConnected {
        job: job.clone(),
        worker: worker.clone(),
        node: NodeName(named("node", hello.node)?),
        endpoint: Endpoint {
            node: short("endpoint.node", endpoint.node)?,
            unix: short("endpoint.unix", endpoint.unix)?,
            tcp: short("endpoint.tcp", endpoint.tcp)?,
        },
        pid: hello.pid,
        state: worker_state(hello.state)?,
    };
    Ok((job, worker, connection, event))
}

fn worker_state(state: Option<v1::WorkerState>) -> Result<WorkerState, BadMessage> {
    use v1::worker_state::Phase;
    let state = state.ok_or(BadMessage::Missing("state"))?;
    let phase = Phase::try_from(state.phase).map_err(|error| bad("state.phase", error))?;
    let committed = Step(state.committed_step);
    let holding = if state.holding.is_empty() {
        Holding { step: committed, ..Holding::default() }
    } else {
        serde_json::from_slice(&state.holding).map_err(|error| bad("state.holding", error))?
    };
    if holding.step != committed {
        let problem = format!("it stands at step {}, but committed_step is {committed}", holding.step);
        return Err(bad("state.holding", problem));
    }
    Ok(WorkerState {
        phase: match phase {
            Phase::Unspecified => return Err(BadMessage::Missing("state.phase")),
            Phase::Opening => WorkerPhase::Opening,
            Phase::Idle => WorkerPhase::Idle,
            Phase::Training => WorkerPhase::Training,
            Phase::Quiesced => WorkerPhase::Quiesced,
            Phase::Ready => WorkerPhase::Ready,
            Phase::Preparing => WorkerPhase::Preparing,
            Phase::Completed => WorkerPhase::Completed,
        },
        epoch: Epoch(state.epoch),
        ready_epoch: Epoch(state.ready_epoch),
        holding,
        // Only set while stopped; nothing is prepared or begun below what is committed.
        prepared: Step(state.prepared_step).max(committed),
        attempted: Step(state.attempted_step).max(committed),
        vote: state.vote.map(step_vote),
    })
}

fn step_vote(vote: v1::StepVote) -> StepVote {
    StepVote { grad_norm_squared: vote.grad_norm_squared, loss: vote.loss }
}

pub fn worker_report(
    job: &JobName,
    worker: &WorkerKey,
    report: v1::WorkerReport,
) -> Result<Said, BadMessage> {
    use v1::worker_report::Report;
    let (job, worker) = (job.clone(), worker.clone());
    let event = match report.report.ok_or(BadMessage::Missing("report"))? {
        Report::Hello(_) => return Err(bad("report", "Hello comes once, at the start")),
        Report::PlaneFailed(failed) => Event::PlaneFailed {
            job,
            worker,
            epoch: Epoch(failed.epoch),
            peer: peer(failed.peer)?,
            reason: cut(failed.reason),
        },
        Report::Quiesced(quiesced) => Event::Quiesced { job, worker, state: worker_state(quiesced.state)? },
        Report::Joined(joined) => Event::Joined { job, worker, epoch: Epoch(joined.epoch) },
        Report::Ready(ready) => Event::Ready {
            job,
            worker,
            epoch: Epoch(ready.epoch),
            step: Step(ready.step),
            replicated_digest: short("replicated_digest", ready.replicated_digest)?,
        },
        Report::PrepareFailed(failed) => Event::PrepareFailed {
            job,
            worker,
            epoch: Epoch(failed.epoch),
            peer: peer(failed.peer)?,
            reason: cut(failed.reason),
        },
        Report::Committed(committed) => Event::Committed {
            job,
            worker,
            epoch: Epoch(committed.epoch),
            step: Step(committed.step),
            vote: step_vote(committed.vote.ok_or(BadMessage::Missing("vote"))?),
            first_sample: committed.first_sample,
            samples: committed.samples,
            step_ms: committed.step_ms,
            tokens: committed.tokens,
            rolled_forward: committed.rolled_forward,
        },
        Report::Progress(progress) => Event::Progress {
            job,
            worker,
            epoch: Epoch(progress.epoch),
            step: Step(progress.step),
            ticks: progress.ticks,
            activity: activity(progress)?,
        },
        Report::Alive(v1::Alive {}) => Event::Alive { job, worker },
        Report::Checkpoints(checkpoints) => {
            let ids = checkpoints.ids.iter().take(MOST_CHECKPOINTS).map(|id| id.parse());
            let ids = ids.collect::<Result<_, _>>().map_err(|error| bad("checkpoints.ids", error))?;
            Event::Checkpoints { job, worker, ids, written: Time(checkpoints.written_us) }
        }
        Report::NoCheckpoint(none) => {
            Event::NoCheckpoint { job, worker, step: Step(none.step), reason: cut(none.reason) }
        }
        Report::Completed(completed) => Event::Completed {
            job,
            worker,
            epoch: Epoch(completed.epoch),
            step: Step(completed.step),
            replicated_digest: short("replicated_digest", completed.replicated_digest)?,
        },
    };
    Ok(Said::Event(event))
}

fn activity(progress: v1::Progress) -> Result<Activity, BadMessage> {
    use v1::progress::Part;
    let part = match progress.part() {
        Part::Unspecified => None,
        Part::Forward => Some(StepPart::Forward),
        Part::Backward => Some(StepPart::Backward),
        Part::Sums => Some(StepPart::Sums),
        Part::Vote => Some(StepPart::Vote),
        Part::Apply => Some(StepPart::Apply),
    };
    let named = progress.waiting_for.into_iter().take(WAITING_NAMED);
    let waiting_for = named.map(|key| Ok(worker_key(Some(key))?.1)).collect::<Result<_, BadMessage>>()?;
    let (micro_batch, waiting_ms) = (progress.micro_batch, progress.waiting_ms);
    Ok(Activity { part, micro_batch, waiting_for, waiting_ms, computed_us: progress.computed_us })
}
