//! Carries out the engine's commands, as the daemon's shell does.

use crate::Sabotage;
use crate::cluster::job_name;
use crate::invariants::Fact;
use crate::memory::{UNITS, axes};
use crate::net::{Order, Peer};
use crate::store::Write;
use crate::world::{What, World};
use reknit_engine::{Command, Event};
use reknit_layout::{Candidate, Epoch, PlanRequest, Topology, Units, WorkerKey, plan};
use std::collections::BTreeMap;

impl World {
    pub(crate) fn carry_out(&mut self, daemon: usize, command: Command) {
        let Some(leading) = &self.daemons[daemon].leading else { return };
        let term = leading.term;
        let peer = match &command {
            Command::Persist(record) => {
                let mut record = record.clone();
                match self.sabotage {
                    Sabotage::SkipPersist if record.ever_committed => return,
                    Sabotage::ForgetCommits => record.ever_committed = false,
                    Sabotage::SkipPersist
                    | Sabotage::None
                    | Sabotage::NoFencing
                    | Sabotage::ResumeEarly
                    | Sabotage::StaleHoldings => {}
                }
                self.write(daemon, Write::Job(record));
                return;
            }
            Command::PersistIncident(incident) => {
                self.write(daemon, Write::Incident(incident.clone()));
                return;
            }
            Command::Plan { job, epoch, spec, workers, topology, fresh } => {
                let (job, epoch, fresh) = (job.clone(), *epoch, *fresh);
                let mut workers = workers.clone();
                if self.sabotage == Sabotage::StaleHoldings && !fresh {
                    believe_too_much(&mut workers);
                }
                let event = self.planned_as(job, epoch, spec, topology, &workers, fresh);
                let wait = self.some_delay();
                self.at(wait, What::Planned { daemon, term, event });
                return;
            }
            Command::Notify { .. } | Command::Announce(_) => return,
            Command::Spawn { node, .. } | Command::Fence { node, .. } => {
                let number = node.0.trim_start_matches("node-").parse();
                Peer::Agent(number.unwrap_or_default())
            }
            Command::CloseEpoch { worker, .. }
            | Command::Pause { worker, .. }
            | Command::Prepare { worker, .. }
            | Command::Resume { worker, .. }
            | Command::Stop { worker, .. } => Peer::Worker(worker.clone()),
        };
        let session = leading.sessions.get(&peer).copied();
        self.log(|| format!("d{daemon}    <- {}", brief(&command)));
        self.facts.push(Fact::Ordered { command: Box::new(command.clone()) });
        if let Some(id) = session {
            self.send_down(id, Order::Command(Box::new(command)));
        }
    }

    fn planned_as(
        &self,
        job: reknit_engine::JobName,
        epoch: Epoch,
        spec: &reknit_layout::JobSpec,
        topology: &Topology,
        workers: &BTreeMap<WorkerKey, Candidate>,
        fresh: bool,
    ) -> Event {
        let result = plan(&PlanRequest { job: spec, topology, epoch, workers, fresh });
        Event::Planned { job, epoch, result }
    }
}

/// As if the first candidate still held everything.
fn believe_too_much(workers: &mut BTreeMap<WorkerKey, Candidate>) {
    let newest = workers.values().map(|candidate| candidate.holding.step).max().unwrap_or_default();
    if let Some(candidate) = workers.values_mut().find(|candidate| candidate.place.is_some()) {
        candidate.holding.step = newest;
        let all = axes().into_iter().map(|axis| (axis, Units::range(0, UNITS)));
        candidate.holding.units = std::sync::Arc::new(all.collect());
    }
}

fn brief(command: &Command) -> String {
    match command {
        Command::Spawn { worker, .. } => format!("spawn {worker}"),
        Command::Fence { worker, .. } => format!("fence {worker}"),
        Command::CloseEpoch { worker, epoch, reason, .. } => format!("close {epoch} {worker}: {reason}"),
        Command::Pause { worker, epoch, .. } => format!("pause {epoch} {worker}"),
        Command::Prepare { worker, epoch, resume_step, .. } => {
            format!("prepare {epoch} {worker} at {resume_step}")
        }
        Command::Resume { worker, epoch, .. } => format!("resume {epoch} {worker}"),
        Command::Stop { worker, reason, .. } => format!("stop {worker}: {reason}"),
        Command::Persist(_)
        | Command::PersistIncident(_)
        | Command::Plan { .. }
        | Command::Notify { .. }
        | Command::Announce(_) => job_name().0,
    }
}
