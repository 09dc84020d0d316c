//! `reknit events`

use super::incidents;
use super::node::{add_verdict, class_text};
use crate::admin::{connect, refused};
use crate::failure::Failure;
use crate::output::{print_lines, time_text};
use crate::{Format, Remote, tell};
use reknit_proto::v1::job_event::Event;
use reknit_proto::v1::{GetJobRequest, JobEvent, WatchEventsRequest};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::{Instant, sleep};
use tonic::Streaming;

/// For so long a daemon is looked for after one is gone.
const PATIENCE: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    /// A committed step. Its samples are all known a little later: JSON has a second event then, a table only when
    /// some are missing or repeated.
    Step,
    Phase,
    Layout,
    Incident,
    Worker,
    /// In words: nodes that are silent or back, events that were missed.
    Note,
    /// A GPU's class changed.
    Health,
}

/// `kinds`: all when empty. Goes on with another daemon when one is gone.
pub(crate) async fn watch(job: Option<String>, kinds: &[Kind], remote: &Remote) -> Result<(), Failure> {
    let mut events = open(job.as_deref(), remote).await?;
    loop {
        let event = tokio::select! {
            event = events.message() => event,
            // Watching has no end of its own: Ctrl-C is how it is meant to stop.
            _ = tokio::signal::ctrl_c() => return Ok(()),
        };
        let event = match event {
            Ok(Some(event)) => event,
            Ok(None) | Err(_) => {
                tell("the daemon ended the stream; events until it is followed again are missed");
                let opened = tokio::select! {
                    opened = open_again(job.as_deref(), remote) => opened?,
                    _ = tokio::signal::ctrl_c() => return Ok(()),
                };
                tell("following again");
                events = opened;
                continue;
            }
        };
        let wanted = kinds.is_empty() || kind(&event).is_some_and(|kind| kinds.contains(&kind));
        if !wanted {
            continue;
        }
        let line = match remote.format {
            Format::Table => as_text(&event),
            Format::Json => Some(as_json(&event).to_string()),
        };
        if let Some(line) = line {
            print_lines(&[line])?;
        }
    }
}

async fn open(job: Option<&str>, remote: &Remote) -> Result<Streaming<JobEvent>, Failure> {
    let mut admin = connect(&remote.daemon).await?;
    if let Some(name) = job {
        // One that does not exist would be watched for ever.
        admin.get_job(GetJobRequest { name: name.to_owned() }).await.map_err(refused)?;
    }
    let request = WatchEventsRequest { job: job.unwrap_or_default().to_owned() };
    Ok(admin.watch_events(request).await.map_err(refused)?.into_inner())
}

/// Until somebody leads again.
async fn open_again(job: Option<&str>, remote: &Remote) -> Result<Streaming<JobEvent>, Failure> {
    let patience = Instant::now() + PATIENCE;
    loop {
        match open(job, remote).await {
            Err(Failure::Unreachable(_)) if Instant::now() < patience => sleep(RETRY).await,
            opened => return opened,
        }
    }
}

/// `None`: of a newer daemon.
fn kind(event: &JobEvent) -> Option<Kind> {
    Some(match event.event.as_ref()? {
        Event::Step(_) => Kind::Step,
        Event::Phase(_) => Kind::Phase,
        Event::Layout(_) => Kind::Layout,
        Event::Incident(_) => Kind::Incident,
        Event::Worker(_) => Kind::Worker,
        Event::Note(_) => Kind::Note,
        Event::Health(_) => Kind::Health,
    })
}

/// `None`: a step told before, of which nothing is amiss.
fn as_text(event: &JobEvent) -> Option<String> {
    let what = match &event.event {
        Some(Event::Step(step)) if step.complete => match (step.samples_missing, step.samples_repeated) {
            (0, 0) => return None,
            (missing, repeated) => {
                format!("step {}: {missing} samples missing, {repeated} repeated", step.step)
            }
        },
        Some(Event::Step(step)) => format!("step {} loss {:.4} in {} ms", step.step, step.loss, step.step_ms),
        Some(Event::Phase(phase)) if phase.explanation.is_empty() => phase.phase.clone(),
        Some(Event::Phase(phase)) => format!("{}: {}", phase.phase, phase.explanation),
        Some(Event::Layout(layout)) => format!(
            "layout of epoch {}: degrees {:?}, {} bytes moved, from step {}",
            layout.epoch, layout.degrees, layout.bytes_moved, layout.resume_step
        ),
        Some(Event::Incident(incident)) => incidents::headline(incident),
        Some(Event::Worker(worker)) => {
            format!("worker {} on {} (pid {}): {}", worker.place, worker.node, worker.pid, worker.state)
        }
        Some(Event::Note(note)) => note.text.clone(),
        Some(Event::Health(gpu)) => {
            let verdict = gpu.verdict();
            let class = class_text(verdict);
            let mut text = match gpu.index {
                Some(index) => format!("GPU {}/{index} ({}): {class}", gpu.node, gpu.gpu),
                None => format!("GPU {} on {}: {class}", gpu.gpu, gpu.node),
            };
            for (before, part) in
                [(": ", &verdict.cause), ("; ", &verdict.rejoin), ("; do: ", &verdict.action)]
            {
                if !part.is_empty() {
                    text.extend([before, part]);
                }
            }
            text
        }
        None => "an event that this version does not know".to_owned(),
    };
    let job = if event.job.is_empty() { "cluster" } else { &event.job };
    Some(format!("{} {job} {what}", time_text(event.time_us)))
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
        Some(Event::Health(gpu)) => {
            let mut json = json!({
                "node": gpu.node, "gpu": gpu.gpu, "index": gpu.index, "at_ms": gpu.at_ms,
                "sequence": gpu.sequence,
            });
            add_verdict(&mut json, gpu.verdict());
            ("health", json)
        }
        None => ("unknown", Value::Null),
    };
    json!({ "time_us": event.time_us, "job": event.job, kind: body })
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_proto::v1::{GpuHealthChanged, HealthClass, HealthVerdict, PhaseChanged, StepCommitted};

    #[test]
    fn both_forms() {
        let phase = PhaseChanged { phase: "Waiting".to_owned(), explanation: "too few GPUs".to_owned() };
        let event = JobEvent { time_us: 1_500_000, job: "j".to_owned(), event: Some(Event::Phase(phase)) };
        let text = as_text(&event);
        assert_eq!(text.as_deref(), Some("1970-01-01T00:00:01.500Z j Waiting: too few GPUs"));
        let json = as_json(&event);
        assert_eq!((&json["phase"]["phase"], &json["time_us"]), (&json!("Waiting"), &json!(1_500_000)));
    }

    #[test]
    fn a_step_is_one_line_unless_its_samples_are_amiss() {
        let line = |complete, samples_missing| {
            let step = StepCommitted { step: 7, complete, samples_missing, ..StepCommitted::default() };
            as_text(&JobEvent { event: Some(Event::Step(step)), ..JobEvent::default() })
        };
        assert!(line(false, 0).unwrap().ends_with("step 7 loss 0.0000 in 0 ms"));
        assert_eq!(line(true, 0), None);
        assert!(line(true, 3).unwrap().ends_with("step 7: 3 samples missing, 0 repeated"));
    }

    #[test]
    fn a_class_that_is_not_enforced_is_told_as_such() {
        let changed = GpuHealthChanged {
            gpu: "GPU-1".to_owned(),
            node: "n".to_owned(),
            verdict: Some(HealthVerdict {
                health: HealthClass::Healthy.into(),
                would_be: HealthClass::Fatal.into(),
                cause: "XID 79".to_owned(),
                action: "reset it".to_owned(),
                ..HealthVerdict::default()
            }),
            ..GpuHealthChanged::default()
        };
        let event = |changed| JobEvent { event: Some(Event::Health(changed)), ..JobEvent::default() };
        let text = as_text(&event(changed.clone())).unwrap();
        assert!(text.ends_with("GPU GPU-1 on n: healthy (would be fatal): XID 79; do: reset it"), "{text}");
        let event = event(GpuHealthChanged { index: Some(3), ..changed });
        let text = as_text(&event).unwrap();
        assert!(text.contains("GPU n/3 (GPU-1): healthy (would be fatal)"), "{text}");
        assert_eq!(kind(&event), Some(Kind::Health));
    }
}
