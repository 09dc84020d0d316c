//! `reknit events`

use super::incidents;
use super::node::{health_name, would_be};
use crate::admin::{connect, refused};
use crate::failure::Failure;
use crate::output::print_lines;
use crate::{Format, Remote};
use reknit_proto::v1::job_event::Event;
use reknit_proto::v1::{GetJobRequest, JobEvent, WatchEventsRequest};
use serde_json::{Value, json};

pub(crate) async fn watch(job: Option<String>, remote: &Remote) -> Result<(), Failure> {
    let mut admin = connect(&remote.daemon).await?;
    if let Some(name) = &job {
        // One that does not exist would be watched for ever.
        admin.get_job(GetJobRequest { name: name.clone() }).await.map_err(refused)?;
    }
    let request = WatchEventsRequest { job: job.unwrap_or_default() };
    let mut events = admin.watch_events(request).await.map_err(refused)?.into_inner();
    loop {
        let event = tokio::select! {
            event = events.message() => event.map_err(refused)?,
            // Watching has no end of its own: Ctrl-C is how it is meant to stop.
            _ = tokio::signal::ctrl_c() => return Ok(()),
        };
        let Some(event) = event else {
            return Err(Failure::Unreachable(
                "the daemon ended the stream: is reknitd still running?".to_owned(),
            ));
        };
        print_lines(&[match remote.format {
            Format::Table => as_text(&event),
            Format::Json => as_json(&event).to_string(),
        }])?;
    }
}

fn as_text(event: &JobEvent) -> String {
    let what = match &event.event {
        Some(Event::Step(step)) if step.complete => format!(
            "step {} complete, {} samples missing, {} repeated",
            step.step, step.samples_missing, step.samples_repeated
        ),
        Some(Event::Step(step)) => format!("step {} loss {:.4} in {} ms", step.step, step.loss, step.step_ms),
        Some(Event::Phase(phase)) if phase.explanation.is_empty() => phase.phase.clone(),
        Some(Event::Phase(phase)) => format!("{}: {}", phase.phase, phase.explanation),
        Some(Event::Layout(layout)) => format!(
            "layout of epoch {}: degrees {:?}, {} bytes moved, from step {}",
            layout.epoch, layout.degrees, layout.bytes_moved, layout.resume_step
        ),
        Some(Event::Incident(incident)) => {
            format!("incident {}: {} at {}: {}", incident.id, incident.kind, incident.place, incident.signal)
        }
        Some(Event::Worker(worker)) => {
            format!("worker {} on {} (pid {}): {}", worker.place, worker.node, worker.pid, worker.state)
        }
        Some(Event::Note(note)) => note.text.clone(),
        Some(Event::Health(gpu)) => {
            let mut text = format!("GPU {} on {}: {}", gpu.gpu, gpu.node, health_name(gpu.health()));
            for (before, part) in [(": ", &gpu.cause), ("; ", &gpu.rejoin), ("; do: ", &gpu.action)] {
                if !part.is_empty() {
                    text.extend([before, part]);
                }
            }
            text
        }
        None => "an event that this version does not know".to_owned(),
    };
    let seconds = event.time_us as f64 / 1e6;
    let job = if event.job.is_empty() { "cluster" } else { &event.job };
    format!("{seconds:.3} {job} {what}")
}

fn as_json(event: &JobEvent) -> Value {
    let (kind, body) = match &event.event {
        Some(Event::Step(step)) => (
            "step",
            json!({
                "epoch": step.epoch, "step": step.step, "loss": step.loss, "tokens": step.tokens,
                "step_ms": step.step_ms, "complete": step.complete,
                "samples_missing": step.samples_missing, "samples_repeated": step.samples_repeated,
            }),
        ),
        Some(Event::Phase(phase)) => {
            ("phase", json!({ "phase": phase.phase, "explanation": phase.explanation }))
        }
        Some(Event::Layout(layout)) => (
            "layout",
            json!({
                "epoch": layout.epoch, "degrees": layout.degrees, "batch": layout.batch,
                "bytes_moved": layout.bytes_moved, "bytes_lower_bound": layout.bytes_lower_bound,
                "resume_step": layout.resume_step,
            }),
        ),
        Some(Event::Incident(incident)) => ("incident", incidents::as_json(incident)),
        Some(Event::Worker(worker)) => (
            "worker",
            json!({
                "gpu": worker.worker.as_ref().map(|key| key.gpu.as_str()),
                "incarnation": worker.worker.as_ref().map(|key| key.incarnation),
                "place": worker.place, "node": worker.node, "pid": worker.pid, "state": worker.state,
            }),
        ),
        Some(Event::Note(note)) => ("note", json!({ "text": note.text })),
        Some(Event::Health(gpu)) => (
            "health",
            json!({
                "node": gpu.node, "gpu": gpu.gpu, "health": health_name(gpu.health()), "cause": gpu.cause,
                "evidence": gpu.evidence, "shards_readable": gpu.shards_readable, "rejoin": gpu.rejoin,
                "action": gpu.action, "would_be": would_be(gpu.would_be()), "at_ms": gpu.at_ms,
                "sequence": gpu.sequence,
            }),
        ),
        None => ("unknown", Value::Null),
    };
    json!({ "time_us": event.time_us, "job": event.job, kind: body })
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_proto::v1::PhaseChanged;

    #[test]
    fn both_forms() {
        let phase = PhaseChanged { phase: "Waiting".to_owned(), explanation: "too few GPUs".to_owned() };
        let event = JobEvent { time_us: 1_500_000, job: "j".to_owned(), event: Some(Event::Phase(phase)) };
        assert_eq!(as_text(&event), "1.500 j Waiting: too few GPUs");
        assert_eq!(as_json(&event)["phase"]["phase"], "Waiting");
    }
}
