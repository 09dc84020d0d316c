//! What agents and workers are told.

use super::key;
use reknit_engine::{JobName, Participant, StepVote, Timeouts};
use reknit_layout::{Epoch, JobSpec, Step, WorkerKey};
use reknit_proto::{Bytes, Message, v1};
use std::time::Duration;

fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

fn to_agent(order: v1::agent_order::Order) -> v1::AgentOrder {
    v1::AgentOrder { order: Some(order) }
}

pub fn agent_welcome(term: u64, timeouts: &Timeouts) -> v1::AgentOrder {
    to_agent(v1::agent_order::Order::Welcome(v1::AgentWelcome {
        heartbeat_ms: milliseconds(timeouts.heartbeat()),
        term,
    }))
}

pub fn spawn(job: &JobName, worker: &WorkerKey, epoch: Epoch) -> v1::AgentOrder {
    let worker = Some(key(job, worker));
    to_agent(v1::agent_order::Order::Spawn(v1::SpawnWorker { worker, epoch: epoch.0 }))
}

pub fn fence(job: &JobName, worker: &WorkerKey, epoch: Epoch) -> v1::AgentOrder {
    let worker = Some(key(job, worker));
    to_agent(v1::agent_order::Order::Fence(v1::FenceWorker { worker, epoch: epoch.0 }))
}

pub fn health_ack(sequence: u64) -> v1::AgentOrder {
    to_agent(v1::agent_order::Order::HealthAck(v1::HealthAck { sequence }))
}

fn to_worker(order: v1::worker_order::Order) -> v1::WorkerOrder {
    v1::WorkerOrder { order: Some(order) }
}

pub fn worker_welcome(term: u64, spec: &JobSpec, timeouts: &Timeouts) -> v1::WorkerOrder {
    to_worker(v1::worker_order::Order::Welcome(v1::WorkerWelcome {
        term,
        job_toml: spec.to_toml(),
        timeouts: Some(v1::Timeouts {
            operation_ms: timeouts.operation_ms,
            join_ms: milliseconds(timeouts.join()),
            progress_ms: milliseconds(timeouts.progress()),
            stall_ms: milliseconds(timeouts.stall()),
        }),
    }))
}

pub fn close_epoch(epoch: Epoch, reason: String) -> v1::WorkerOrder {
    let epoch = epoch.0;
    to_worker(v1::worker_order::Order::CloseEpoch(v1::CloseEpoch { epoch, reason }))
}

pub fn pause(epoch: Epoch) -> v1::WorkerOrder {
    to_worker(v1::worker_order::Order::Pause(v1::Pause { epoch: epoch.0 }))
}

/// What of a plan concerns one worker, encoded as `Prepare` carries it.
#[derive(Debug, Default)]
pub struct PlanPart {
    pub layout: Bytes,
    pub fresh: bool,
    pub transfers: Bytes,
    pub tensor: Bytes,
    pub column: Bytes,
    pub speakers: Bytes,
    pub movers: Bytes,
}

/// A `Peers`, encoded.
pub fn peers<'a>(job: &JobName, participants: impl Iterator<Item = &'a Participant>) -> Bytes {
    let peers = participants.map(|participant| v1::Participant {
        worker: Some(key(job, &participant.worker)),
        endpoint: Some(v1::Endpoint {
            node: participant.endpoint.node.clone(),
            unix: participant.endpoint.unix.clone(),
            tcp: participant.endpoint.tcp.clone(),
        }),
    });
    v1::Peers { peers: peers.collect() }.encode_to_vec().into()
}

/// When a worker leaves its old epoch for a new one.
#[derive(Debug, Clone, Copy)]
pub enum Entry<'a> {
    /// Later: it joins in the background.
    Ahead,
    /// Now, from this step on, with what is held or from a checkpoint.
    Now { resume_step: Step, vote: Option<StepVote>, checkpoint: Option<&'a str> },
}

pub fn prepare(epoch: Epoch, part: PlanPart, ticket: [u8; 32], entry: Entry<'_>) -> v1::WorkerOrder {
    use v1::worker_order::Order;
    let (order, resume_step, vote, checkpoint): (fn(v1::Prepare) -> Order, _, _, _) = match entry {
        Entry::Ahead => (Order::Join, Step(0), None, None),
        Entry::Now { resume_step, vote, checkpoint } => (Order::Prepare, resume_step, vote, checkpoint),
    };
    let PlanPart { layout, fresh, transfers, tensor, column, speakers, movers } = part;
    to_worker(order(v1::Prepare {
        epoch: epoch.0,
        ticket: ticket.to_vec().into(),
        resume_step: resume_step.0,
        vote: vote.map(|vote| v1::StepVote { grad_norm_squared: vote.grad_norm_squared, loss: vote.loss }),
        layout,
        fresh,
        transfers,
        tensor,
        column,
        speakers,
        movers,
        checkpoint: checkpoint.unwrap_or_default().to_owned(),
    }))
}

pub fn resume(epoch: Epoch) -> v1::WorkerOrder {
    to_worker(v1::worker_order::Order::Resume(v1::Resume { epoch: epoch.0 }))
}

pub fn stop(term: u64, epoch: Epoch, reason: String) -> v1::WorkerOrder {
    to_worker(v1::worker_order::Order::Stop(v1::Stop { reason, epoch: epoch.0, term }))
}
