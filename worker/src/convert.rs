//! Between the wire's types and ours: the one place that knows both.

use crate::messages::{
    Committed, Order, Participant, Phase, Prepare, Report, StepPart, StepVote, Timeouts, WorkerState,
};
use crate::pace::Activity;
use reknit_layout::{Epoch, GpuId, Incarnation, JobSpec, NodeName, Step, WorkerKey};
use reknit_plane::{Endpoint, Ticket};
use reknit_proto::{Message, unpack, v1};
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    #[error("field {0} is missing")]
    Missing(&'static str),
    #[error("field {field}: {problem}")]
    Bad { field: &'static str, problem: String },
}

pub fn hello(
    job: &str,
    worker: &WorkerKey,
    node: &NodeName,
    endpoint: &Endpoint,
    pid: u32,
    connection: u64,
    state: &WorkerState,
) -> v1::WorkerReport {
    wrap(v1::worker_report::Report::Hello(v1::WorkerHello {
        worker: Some(key(job, worker)),
        node: node.0.clone(),
        endpoint: Some(v1::Endpoint {
            node: endpoint.node.clone(),
            unix: endpoint.unix.clone(),
            tcp: endpoint.tcp.clone(),
        }),
        pid,
        connection,
        state: Some(self::state(state)),
    }))
}

/// `step` is the last committed one, and `computed` the time that all steps so far were computed for.
pub fn progress(
    job: &str,
    epoch: Epoch,
    step: Step,
    computed: Duration,
    activity: &Activity,
) -> v1::WorkerReport {
    wrap(v1::worker_report::Report::Progress(v1::Progress {
        epoch: epoch.0,
        step: step.0,
        ticks: activity.ticks,
        part: part(activity.part).into(),
        micro_batch: activity.micro_batch,
        waiting_for: activity.waiting_for.iter().map(|worker| key(job, worker)).collect(),
        waiting_ms: u32::try_from(activity.waiting.as_millis()).unwrap_or(u32::MAX),
        computed_us: computed.as_micros() as u64,
    }))
}

/// All that one who does not train says between changes.
pub fn alive() -> v1::WorkerReport {
    wrap(v1::worker_report::Report::Alive(v1::Alive {}))
}

fn part(part: Option<StepPart>) -> v1::progress::Part {
    use v1::progress::Part;
    match part {
        None => Part::Unspecified,
        Some(StepPart::Forward) => Part::Forward,
        Some(StepPart::Backward) => Part::Backward,
        Some(StepPart::Sums) => Part::Sums,
        Some(StepPart::Vote) => Part::Vote,
        Some(StepPart::Apply) => Part::Apply,
    }
}

pub fn report(job: &str, report: Report) -> v1::WorkerReport {
    use v1::worker_report::Report as Wire;
    let peer_key = |peer: Option<WorkerKey>| peer.map(|peer| key(job, &peer));
    wrap(match report {
        Report::PlaneFailed { epoch, reason, peer } => {
            Wire::PlaneFailed(v1::PlaneFailed { epoch: epoch.0, reason, peer: peer_key(peer) })
        }
        Report::Quiesced(state) => Wire::Quiesced(v1::Quiesced { state: Some(self::state(&state)) }),
        Report::Joined { epoch } => Wire::Joined(v1::Joined { epoch: epoch.0 }),
        Report::Ready { epoch, step, replicated_digest } => {
            Wire::Ready(v1::Ready { epoch: epoch.0, replicated_digest, step: step.0 })
        }
        Report::PrepareFailed { epoch, reason, peer } => {
            Wire::PrepareFailed(v1::PrepareFailed { epoch: epoch.0, reason, peer: peer_key(peer) })
        }
        Report::Committed(committed) => Wire::Committed(self::committed(&committed)),
        Report::Completed { epoch, step, replicated_digest } => {
            Wire::Completed(v1::Completed { epoch: epoch.0, step: step.0, replicated_digest })
        }
        Report::Checkpoints { ids, written_us } => Wire::Checkpoints(v1::Checkpoints {
            ids: ids.iter().map(ToString::to_string).collect(),
            written_us,
        }),
        Report::NoCheckpoint { step, reason } => {
            Wire::NoCheckpoint(v1::NoCheckpoint { step: step.0, reason })
        }
    })
}

pub fn order(order: v1::WorkerOrder) -> Result<Order, ConvertError> {
    use v1::worker_order::Order as Wire;
    Ok(match order.order.ok_or(ConvertError::Missing("order"))? {
        Wire::Welcome(welcome) => {
            let job = JobSpec::parse(&welcome.job_toml, "job")
                .map_err(|error| ConvertError::Bad { field: "job_toml", problem: error.to_string() })?;
            let timeouts = welcome.timeouts.ok_or(ConvertError::Missing("timeouts"))?;
            Order::Welcome { job: Box::new(job), timeouts: self::timeouts(&timeouts)? }
        }
        Wire::CloseEpoch(close) => Order::CloseEpoch { epoch: Epoch(close.epoch), reason: close.reason },
        Wire::Pause(pause) => Order::Pause { epoch: Epoch(pause.epoch) },
        Wire::Join(join) => Order::Join(Arc::new(prepare(join)?)),
        Wire::Prepare(prepare) => Order::Prepare(Box::new(self::prepare(prepare)?)),
        Wire::Resume(resume) => Order::Resume { epoch: Epoch(resume.epoch) },
        Wire::Stop(stop) => Order::Stop { epoch: Epoch(stop.epoch), reason: stop.reason },
    })
}

/// No wait and no pause between reports is nothing.
fn timeouts(timeouts: &v1::Timeouts) -> Result<Timeouts, ConvertError> {
    let millis = |field, value: u32| match value {
        0 => Err(ConvertError::Missing(field)),
        value => Ok(Duration::from_millis(value.into())),
    };
    Ok(Timeouts {
        operation: millis("timeouts.operation_ms", timeouts.operation_ms)?,
        join: millis("timeouts.join_ms", timeouts.join_ms)?,
        progress: millis("timeouts.progress_ms", timeouts.progress_ms)?,
        stall: millis("timeouts.stall_ms", timeouts.stall_ms)?,
    })
}

fn prepare(prepare: v1::Prepare) -> Result<Prepare, ConvertError> {
    let bad = |field| move |problem: String| ConvertError::Bad { field, problem };
    let ticket: [u8; 32] =
        prepare.ticket.as_ref().try_into().map_err(|_| bad("ticket")("it must be 32 bytes".to_owned()))?;
    Ok(Prepare {
        epoch: Epoch(prepare.epoch),
        layout: json("layout", &unpacked("layout", &prepare.layout)?)?,
        fresh: prepare.fresh,
        checkpoint: (!prepare.checkpoint.is_empty()).then(|| prepare.checkpoint.into()),
        transfers: json("transfers", &prepare.transfers)?.unwrap_or_default(),
        tensor: peers("tensor", &prepare.tensor)?,
        column: peers("column", &prepare.column)?,
        speakers: peers("speakers", &prepare.speakers)?,
        movers: peers("movers", &prepare.movers)?,
        ticket: Ticket(ticket),
        resume_step: Step(prepare.resume_step),
        vote: prepare
            .vote
            .map(|vote| StepVote { grad_norm_squared: vote.grad_norm_squared, loss: vote.loss }),
    })
}

/// `None` when it is empty.
fn json<T: serde::de::DeserializeOwned>(field: &'static str, text: &[u8]) -> Result<Option<T>, ConvertError> {
    let parsed = (!text.is_empty()).then(|| serde_json::from_slice(text)).transpose();
    parsed.map_err(|error| ConvertError::Bad { field, problem: error.to_string() })
}

fn unpacked(field: &'static str, packed: &[u8]) -> Result<Vec<u8>, ConvertError> {
    unpack(packed).map_err(|error| ConvertError::Bad { field, problem: error.to_string() })
}

fn peers(field: &'static str, packed: &[u8]) -> Result<Vec<Participant>, ConvertError> {
    let decoded = v1::Peers::decode(unpacked(field, packed)?.as_slice());
    let decoded = decoded.map_err(|error| ConvertError::Bad { field, problem: error.to_string() })?;
    decoded.peers.into_iter().map(participant).collect()
}

fn participant(participant: v1::Participant) -> Result<Participant, ConvertError> {
    let worker = participant.worker.ok_or(ConvertError::Missing("participant.worker"))?;
    let endpoint = participant.endpoint.ok_or(ConvertError::Missing("participant.endpoint"))?;
    Ok(Participant {
        worker: WorkerKey { gpu: GpuId(worker.gpu), incarnation: Incarnation(worker.incarnation) },
        endpoint: Endpoint { node: endpoint.node, unix: endpoint.unix, tcp: endpoint.tcp },
    })
}

fn key(job: &str, worker: &WorkerKey) -> v1::WorkerKey {
    v1::WorkerKey { job: job.to_owned(), gpu: worker.gpu.0.clone(), incarnation: worker.incarnation.0 }
}

fn vote(vote: StepVote) -> v1::StepVote {
    v1::StepVote { grad_norm_squared: vote.grad_norm_squared, loss: vote.loss }
}

fn committed(committed: &Committed) -> v1::Committed {
    v1::Committed {
        epoch: committed.epoch.0,
        step: committed.step.0,
        vote: Some(vote(committed.vote)),
        first_sample: committed.share.first,
        samples: committed.share.count,
        step_ms: u32::try_from(committed.step_time.as_millis()).unwrap_or(u32::MAX),
        rolled_forward: committed.rolled_forward,
        tokens: committed.tokens,
    }
}

fn state(state: &WorkerState) -> v1::WorkerState {
    let phase = match state.phase {
        Phase::Opening => v1::worker_state::Phase::Opening,
        Phase::Idle => v1::worker_state::Phase::Idle,
        Phase::Training => v1::worker_state::Phase::Training,
        Phase::Quiesced => v1::worker_state::Phase::Quiesced,
        Phase::Preparing => v1::worker_state::Phase::Preparing,
        Phase::Ready => v1::worker_state::Phase::Ready,
        Phase::Completed => v1::worker_state::Phase::Completed,
    };
    v1::WorkerState {
        phase: phase.into(),
        epoch: state.epoch.0,
        ready_epoch: state.ready_epoch.0,
        committed_step: state.holding.step.0,
        // Serialising plain maps with text keys cannot fail.
        holding: serde_json::to_vec(&state.holding).unwrap_or_default(),
        prepared_step: state.prepared.0,
        attempted_step: state.attempted.0,
        vote: state.vote.map(vote),
    }
}

fn wrap(report: v1::worker_report::Report) -> v1::WorkerReport {
    v1::WorkerReport { report: Some(report) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_duration_of_a_welcome_is_nothing() {
        let whole = v1::Timeouts { operation_ms: 4, join_ms: 3, progress_ms: 2, stall_ms: 1 };
        assert_eq!(timeouts(&whole).unwrap().stall.as_millis(), 1);
        for (field, broken) in [
            ("operation", v1::Timeouts { operation_ms: 0, ..whole }),
            ("join", v1::Timeouts { join_ms: 0, ..whole }),
            ("progress", v1::Timeouts { progress_ms: 0, ..whole }),
            ("stall", v1::Timeouts { stall_ms: 0, ..whole }),
        ] {
            let why = timeouts(&broken).unwrap_err().to_string();
            assert_eq!(why, format!("field timeouts.{field}_ms is missing"));
        }
    }
}
