//! Between the agent's own words and the wire's.

use crate::clock::Millis;
use crate::health::{Transition, Verdict};
use crate::policy::Class;
use crate::probe::protocol::GpuIdentity;
use crate::sight::{LastRead, Observability};
use crate::workers::{Exit, WorkerId};
use reknit_layout::{GpuId, Incarnation, WorkerKey};
use reknit_proto::v1;
use reknit_proto::v1::agent_report::Report;

pub(crate) fn report(report: Report) -> v1::AgentReport {
    v1::AgentReport { report: Some(report) }
}

fn health_class(class: Class) -> v1::HealthClass {
    match class {
        Class::Healthy | Class::Ignore => v1::HealthClass::Healthy,
        Class::Predict => v1::HealthClass::Predict,
        Class::RankDied => v1::HealthClass::RankDied,
        Class::Unknown => v1::HealthClass::Unknown,
        Class::Drain => v1::HealthClass::Drain,
        Class::Fatal => v1::HealthClass::Fatal,
    }
}

/// The class that counts, and what it would be under a policy that is not enforced.
fn classes(class: Class, enforced: bool) -> (v1::HealthClass, v1::HealthClass) {
    match health_class(class) {
        class if enforced => (class, v1::HealthClass::Unspecified),
        v1::HealthClass::Healthy => (v1::HealthClass::Healthy, v1::HealthClass::Unspecified),
        class => (v1::HealthClass::Healthy, class),
    }
}

fn verdict(verdict: &Verdict, enforced: bool) -> v1::HealthVerdict {
    let (health, would_be) = classes(verdict.class, enforced);
    v1::HealthVerdict {
        health: health.into(),
        cause: verdict.cause.clone(),
        evidence: verdict.evidence.clone(),
        shards_readable: verdict.shards_readable,
        rejoin: verdict.rejoin.clone(),
        action: verdict.action.clone(),
        would_be: would_be.into(),
    }
}

pub(crate) fn gpu(gpu: &GpuIdentity, verdict: &Verdict, enforced: bool, risk: f64) -> v1::Gpu {
    v1::Gpu {
        uuid: gpu.uuid.0.clone(),
        index: gpu.index,
        pci_bus_id: gpu.pci_bus_id.clone(),
        name: gpu.name.clone(),
        memory_bytes: gpu.memory_bytes,
        verdict: Some(self::verdict(verdict, enforced)),
        risk,
    }
}

/// `last`: what was last read of it, if anything was.
pub(crate) fn gpu_state(
    now: Millis,
    gpu: &GpuId,
    class: Class,
    enforced: bool,
    last: Option<&LastRead>,
    risk: f64,
) -> v1::GpuState {
    let age = last.and_then(|last| last.at).map(|at| now.since(at).as_millis());
    v1::GpuState {
        uuid: gpu.0.clone(),
        health: classes(class, enforced).0.into(),
        age_ms: age.map(|age| u64::try_from(age).unwrap_or(u64::MAX)),
        temperature: last.and_then(|last| last.temperature),
        power_mw: last.and_then(|last| last.power_mw),
        power_limit_mw: last.and_then(|last| last.power_limit_mw),
        risk,
    }
}

pub(crate) fn observability(observability: Observability) -> v1::Observability {
    match observability {
        Observability::Full => v1::Observability::Full,
        Observability::Degraded => v1::Observability::Degraded,
        Observability::Blind => v1::Observability::Blind,
        Observability::Quiesced => v1::Observability::Quiesced,
    }
}

pub(crate) fn transition(sequence: u64, transition: &Transition) -> v1::AgentReport {
    report(Report::Health(v1::HealthTransition {
        sequence,
        gpu: transition.gpu.0.clone(),
        verdict: Some(verdict(&transition.verdict, transition.enforced)),
        at_ms: transition.at.0,
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
