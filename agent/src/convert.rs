//! Between the agent's own words and the wire's.

use crate::health::{Transition, Verdict};
use crate::policy::Class;
use crate::probe::protocol::GpuIdentity;
use crate::workers::{Exit, WorkerId};
use reknit_layout::{GpuId, Incarnation, WorkerKey};
use reknit_proto::v1;
use reknit_proto::v1::agent_report::Report;

pub(crate) fn report(report: Report) -> v1::AgentReport {
    v1::AgentReport { report: Some(report) }
}

pub(crate) fn health_class(class: Class) -> v1::HealthClass {
    match class {
        Class::Healthy | Class::Ignore => v1::HealthClass::Healthy,
        Class::Predict => v1::HealthClass::Predict,
        Class::RankDied => v1::HealthClass::RankDied,
        Class::Unknown => v1::HealthClass::Unknown,
        Class::Drain => v1::HealthClass::Drain,
        Class::Fatal => v1::HealthClass::Fatal,
    }
}

pub(crate) fn gpu(gpu: &GpuIdentity, verdict: &Verdict) -> v1::Gpu {
    v1::Gpu {
        uuid: gpu.uuid.0.clone(),
        index: gpu.index,
        pci_bus_id: gpu.pci_bus_id.clone(),
        name: gpu.name.clone(),
        memory_bytes: gpu.memory_bytes,
        health: health_class(verdict.class).into(),
        cause: verdict.cause.clone(),
        evidence: verdict.evidence.clone(),
        shards_readable: verdict.class.shards_readable(),
        rejoin: String::new(),
        action: verdict.action.clone(),
        risk: 0.0,
        would_be: v1::HealthClass::Unspecified.into(),
    }
}

pub(crate) fn transition(sequence: u64, transition: &Transition) -> v1::AgentReport {
    let verdict = &transition.verdict;
    report(Report::Health(v1::HealthTransition {
        sequence,
        gpu: transition.gpu.0.clone(),
        health: health_class(verdict.class).into(),
        cause: verdict.cause.clone(),
        evidence: verdict.evidence.clone(),
        shards_readable: verdict.shards_readable,
        action: verdict.action.clone(),
        rejoin: String::new(),
        at_ms: 0,
        would_be: v1::HealthClass::Unspecified.into(),
    }))
}

pub(crate) fn done(request: u64, answer: Result<String, String>) -> v1::AgentReport {
    let (ok, message) = match answer {
        Ok(message) => (true, message),
        Err(message) => (false, message),
    };
    report(Report::Done(v1::OrderDone { request, ok, message }))
}

pub(crate) fn worker_key(worker: &WorkerId) -> v1::WorkerKey {
    v1::WorkerKey {
        job: worker.job.clone(),
        gpu: worker.key.gpu.0.clone(),
        incarnation: worker.key.incarnation.0,
    }
}

/// `None` for an order that names no worker.
pub(crate) fn worker_id(key: Option<v1::WorkerKey>) -> Option<WorkerId> {
    key.map(|key| WorkerId {
        job: key.job,
        key: WorkerKey { gpu: GpuId(key.gpu), incarnation: Incarnation(key.incarnation) },
    })
}

pub(crate) fn spawned(worker: &WorkerId, pid: u32) -> v1::AgentReport {
    report(Report::Spawned(v1::WorkerSpawned { worker: Some(worker_key(worker)), pid }))
}

pub(crate) fn exited(worker: &WorkerId, exit: &Exit) -> v1::AgentReport {
    let (signal, status) = match exit {
        Exit::Signal(signal) => (*signal, -1),
        Exit::Status { status, .. } => (0, *status),
        Exit::Adopted | Exit::NotStarted(_) | Exit::NotRunning => (0, -1),
    };
    report(Report::Exited(v1::WorkerExited {
        worker: Some(worker_key(worker)),
        how: exit.to_string(),
        signal,
        status,
    }))
}
