//! Commands in short, for traces and golden texts.

use reknit_engine::{Command, Notice};
use reknit_layout::WorkerKey;

fn short(worker: &WorkerKey) -> String {
    format!("{}#{}", worker.gpu, worker.incarnation)
}

/// `None` for what is only news about steps and workers.
pub fn brief(command: &Command) -> Option<String> {
    Some(match command {
        Command::Persist(record) => format!(
            "persist {:?} layout={} last={}",
            record.phase,
            record.layout.as_ref().map_or(0, |layout| layout.epoch.0),
            record.last_epoch
        ),
        Command::PersistIncident(incident) => {
            format!("persist incident {} {:?}", incident.id, incident.kind)
        }
        Command::Spawn { node, worker, .. } => format!("spawn {node} {}", short(worker)),
        Command::Fence { node, worker, .. } => format!("fence {node} {}", short(worker)),
        Command::CloseEpoch { worker, epoch, .. } => format!("close {epoch} {}", short(worker)),
        Command::Pause { worker, epoch, .. } => format!("pause {epoch} {}", short(worker)),
        Command::Join { worker, epoch, .. } => format!("join {epoch} {}", short(worker)),
        Command::Prepare { worker, epoch, resume_step, checkpoint, .. } => {
            let from = checkpoint.as_ref().map_or(String::new(), |folder| format!(" from {folder}"));
            format!("prepare {epoch} {} at {resume_step}{from}", short(worker))
        }
        Command::Resume { worker, epoch, .. } => format!("resume {epoch} {}", short(worker)),
        Command::Stop { worker, .. } => format!("stop {}", short(worker)),
        Command::Plan { epoch, workers, fresh, .. } => format!(
            "plan {epoch} members={} holders={}{}",
            workers.values().filter(|candidate| candidate.place.is_some()).count(),
            workers.values().filter(|candidate| !candidate.holding.is_empty()).count(),
            if *fresh { " fresh" } else { "" }
        ),
        Command::Forget { node } => format!("forget {node}"),
        Command::Announce(text) => text.clone(),
        Command::Notify { notice, .. } => match notice {
            Notice::Phase { phase, .. } => format!("phase {phase:?}"),
            Notice::Layout { epoch, degrees, .. } => format!("layout {epoch} {degrees:?}"),
            Notice::Incident(incident) => format!(
                "incident {:?} {}",
                incident.kind,
                incident.place.map(|p| p.to_string()).unwrap_or_default()
            ),
            Notice::Note(text) => format!("note {text}"),
            Notice::Step { .. } | Notice::Worker { .. } => return None,
        },
    })
}
