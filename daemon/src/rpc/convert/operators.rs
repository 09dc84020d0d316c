//! What operators see.

use super::key;
use crate::agents::Agent;
use reknit_engine::{
    DrainedBy, HealthClass, Incident, IncidentKind, JobName, JobView, NodeLink, NodeView, Notice, Phase, Time,
};
use reknit_layout::{NodeName, Place};
use reknit_proto::v1;

pub fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Pending => "Pending",
        Phase::Starting => "Starting",
        Phase::Running => "Running",
        Phase::Quiescing => "Quiescing",
        Phase::Resharding => "Resharding",
        Phase::Waiting => "Waiting",
        Phase::Draining => "Draining",
        Phase::Stopped => "Stopped",
        Phase::Completed => "Completed",
        Phase::Failed => "Failed",
        Phase::Rebuilding => "Rebuilding",
    }
}

fn written(place: Option<Place>) -> String {
    place.map(|place| place.to_string()).unwrap_or_default()
}

pub fn job(view: JobView) -> Result<v1::Job, serde_json::Error> {
    let workers = view.workers.into_iter().map(|worker| v1::JobWorker {
        worker: Some(key(&view.name, &worker.worker)),
        place: written(worker.place),
        node: worker.node.0,
        pid: worker.pid,
        state: worker.state,
    });
    let known = view.live || view.phase.ended();
    Ok(v1::Job {
        workers: workers.collect(),
        live: view.live,
        earlier_incidents: view.earlier_incidents,
        checkpoints: view.checkpoints.iter().map(ToString::to_string).collect(),
        phase: phase(view.phase).to_owned(),
        explanation: view.explanation,
        epoch: view.epoch.0,
        committed_step: known.then_some(view.committed_step.0),
        layout: match &view.layout {
            Some(layout) => serde_json::to_vec(layout)?,
            None => Vec::new(),
        },
        last_loss: view.last_loss.filter(|_| known),
        name: view.name.0,
    })
}

/// `agent`: what was heard of it, if anything was. While it is away what it saw last is no word on what is.
pub fn node(view: NodeView, agent: Option<&Agent>, now: Time) -> v1::Node {
    let (link, since) = match view.link {
        NodeLink::Connected { since } => (v1::NodeLink::Connected, since),
        NodeLink::Silent { since, lease: _ } => (v1::NodeLink::Silent, since),
        NodeLink::Gone { since, forget: _ } => (v1::NodeLink::Gone, since),
    };
    let connected = link == v1::NodeLink::Connected;
    let seen = agent.filter(|_| connected);
    let gpus = view.gpus.into_iter().map(|gpu| {
        let said = agent.and_then(|agent| agent.gpus.get(&gpu.gpu)).cloned().unwrap_or_default();
        let state = agent.and_then(|agent| agent.states.get(&gpu.gpu)).cloned().unwrap_or_default();
        let heard = agent.map_or(now, |agent| agent.heard);
        let since = now.0.saturating_sub(heard.0) / 1_000;
        v1::NodeGpu {
            uuid: gpu.gpu.0,
            index: gpu.index,
            name: gpu.name,
            verdict: Some(v1::HealthVerdict {
                health: health_class(gpu.health).into(),
                cause: gpu.cause,
                ..said.verdict.unwrap_or_default()
            }),
            drained_by: match gpu.drained {
                Some(DrainedBy::Operator) => "operator".to_owned(),
                Some(DrainedBy::Policy) => "policy".to_owned(),
                None => String::new(),
            },
            memory_bytes: said.memory_bytes,
            age_ms: state.age_ms.map(|age| age.saturating_add(since)),
            temperature: state.temperature.filter(|_| connected),
            power_mw: state.power_mw.filter(|_| connected),
            power_limit_mw: state.power_limit_mw.filter(|_| connected),
            risk: said.risk,
            since_us: gpu.changed.0,
        }
    });
    let quiesced_until = seen.and_then(|agent| agent.quiesced_until).filter(|until| *until > now);
    v1::Node {
        name: view.name.0,
        connected,
        gpus: gpus.collect(),
        link: link.into(),
        link_since_us: since.0,
        observability: seen.map_or(v1::Observability::Unspecified, |agent| agent.observability).into(),
        gaps: seen.map(|agent| agent.gaps.clone()).unwrap_or_default(),
        quiesced_until_us: quiesced_until.unwrap_or_default().0,
        agent_version: agent.map(|agent| agent.version.clone()).unwrap_or_default(),
    }
}

fn health_class(class: HealthClass) -> v1::HealthClass {
    match class {
        HealthClass::Healthy => v1::HealthClass::Healthy,
        HealthClass::Fatal => v1::HealthClass::Fatal,
        HealthClass::RankDied => v1::HealthClass::RankDied,
        HealthClass::Drain => v1::HealthClass::Drain,
        HealthClass::Predict => v1::HealthClass::Predict,
        HealthClass::Unknown => v1::HealthClass::Unknown,
    }
}

fn incident_kind(kind: IncidentKind) -> &'static str {
    match kind {
        IncidentKind::WorkerKilled => "worker_killed",
        IncidentKind::WorkerExited => "worker_exited",
        IncidentKind::GpuLost => "gpu_lost",
        IncidentKind::PlaneFailed => "plane_failed",
        IncidentKind::Frozen => "frozen",
        IncidentKind::Slow => "slow",
        IncidentKind::NodeLost => "node_lost",
        IncidentKind::Planned => "planned",
    }
}

pub fn incident(incident: Incident) -> v1::Incident {
    let reached = |time: Option<Time>| time.unwrap_or_default().0;
    v1::Incident {
        id: incident.id,
        job: incident.job.0,
        kind: incident_kind(incident.kind).to_owned(),
        place: written(incident.place),
        gpu: incident.gpu.map(|gpu| gpu.0).unwrap_or_default(),
        node: incident.node.map(|node| node.0).unwrap_or_default(),
        signal: incident.signal,
        first_reporter: incident.first_reporter,
        epoch_before: incident.epoch_before.0,
        epoch_after: incident.epoch_after.unwrap_or_default().0,
        detected_us: incident.detected.0,
        quiesced_us: reached(incident.quiesced),
        fenced_us: reached(incident.fenced),
        planned_us: reached(incident.planned),
        ready_us: reached(incident.ready),
        committed_us: reached(incident.committed),
        recovered_us: reached(incident.recovered),
        steps_lost: incident.steps_lost,
        bytes_moved: incident.bytes_moved,
        bytes_lower_bound: incident.bytes_lower_bound,
        degrees_before: incident.degrees_before,
        degrees_after: incident.degrees_after,
        advice: incident.advice,
        told: incident.told,
        index: incident.index,
    }
}

pub fn job_event(time: Time, job: &JobName, notice: Notice) -> v1::JobEvent {
    use v1::job_event::Event;
    let event = match notice {
        Notice::Step { epoch, step, loss, tokens, step_ms, complete, samples_missing, samples_repeated } => {
            Event::Step(v1::StepCommitted {
                epoch: epoch.0,
                step: step.0,
                loss,
                tokens,
                step_ms,
                complete,
                samples_missing,
                samples_repeated,
            })
        }
        Notice::Phase { phase: new, explanation } => {
            Event::Phase(v1::PhaseChanged { phase: phase(new).to_owned(), explanation })
        }
        Notice::Layout { epoch, degrees, batch, bytes_moved, bytes_lower_bound, resume_step } => {
            Event::Layout(v1::LayoutCommitted {
                epoch: epoch.0,
                degrees,
                batch,
                bytes_moved,
                bytes_lower_bound,
                resume_step: resume_step.0,
            })
        }
        Notice::Incident(record) => Event::Incident(incident(*record)),
        Notice::Worker { worker, place, node, pid, state } => Event::Worker(v1::WorkerChanged {
            worker: Some(key(job, &worker)),
            place: written(place),
            node: node.0,
            pid,
            state,
        }),
        Notice::Note(text) => Event::Note(v1::Note { text }),
    };
    v1::JobEvent { time_us: time.0, job: job.0.clone(), event: Some(event) }
}

fn cluster_event(time: Time, event: v1::job_event::Event) -> v1::JobEvent {
    v1::JobEvent { time_us: time.0, job: String::new(), event: Some(event) }
}

pub fn announcement(time: Time, text: String) -> v1::JobEvent {
    cluster_event(time, v1::job_event::Event::Note(v1::Note { text }))
}

pub fn gpu_health_changed(
    time: Time,
    node: &NodeName,
    index: Option<u32>,
    told: v1::HealthTransition,
) -> v1::JobEvent {
    let changed = v1::GpuHealthChanged {
        node: node.0.clone(),
        gpu: told.gpu,
        verdict: told.verdict,
        at_ms: told.at_ms,
        sequence: told.sequence,
        index,
    };
    cluster_event(time, v1::job_event::Event::Health(changed))
}
