//! Carries out the engine's commands, as the daemon's shell does.

use crate::Sabotage;
use crate::brief::brief;
use crate::cluster::{Who, node_number};
use crate::invariants::Fact;
use crate::memory::{UNITS, axes};
use crate::net::{Order, Peer};
use crate::store::Write;
use crate::world::{What, World};
use reknit_engine::{Command, Event, Incident, JobRecord};
use reknit_layout::{Candidate, PlanRequest, Step, Topology, Units, WorkerKey, plan};
use std::collections::BTreeMap;

impl World {
    pub(crate) fn carry_out(&mut self, daemon: usize, mut command: Command) {
        let Some(leading) = &self.daemons[daemon].leading else { return };
        let term = leading.term;
        let text = brief(&command);
        if let Some(text) = &text {
            self.log(|| format!("d{daemon}    <- {text}"));
        }
        if self.quiet {
            self.told.extend(text);
        }
        let peer = match &mut command {
            Command::Persist(record) => {
                let record = record.clone();
                return self.persist(daemon, record);
            }
            Command::PersistIncident(incident) => {
                let incident = incident.clone();
                return self.persist_incident(daemon, incident);
            }
            Command::Plan { job, epoch, spec, workers, topology, fresh } => {
                if self.sabotage == Sabotage::StaleHoldings && !*fresh {
                    believe_too_much(workers);
                }
                let mut topology = Topology::clone(topology);
                topology.gpu_memory = self.gpu_memory.or(topology.gpu_memory);
                let (topology, epoch, fresh) = (&topology, *epoch, *fresh);
                let result = plan(&PlanRequest { job: spec, topology, epoch, workers, fresh });
                let event = Event::Planned { job: job.clone(), epoch, result };
                let wait = self.some_delay();
                self.at(wait, What::Planned { daemon, term, event });
                return;
            }
            Command::Notify { .. } | Command::Announce(_) | Command::Forget { .. } => return,
            Command::Spawn { node, .. } | Command::Fence { node, .. } => Peer::Agent(node_number(node)),
            Command::Prepare { job, worker, resume_step, .. } => {
                if self.sabotage == Sabotage::StepsBack {
                    *resume_step = Step(resume_step.0.saturating_sub(3));
                }
                Peer::Worker(Who::new(job, worker))
            }
            Command::CloseEpoch { job, worker, .. }
            | Command::Pause { job, worker, .. }
            | Command::Join { job, worker, .. }
            | Command::Resume { job, worker, .. }
            | Command::Stop { job, worker, .. } => Peer::Worker(Who::new(job, worker)),
        };
        let session = leading.sessions.get(&peer).copied();
        self.facts.push(Fact::Ordered { command: Box::new(command.clone()) });
        if let Some(id) = session {
            self.send_down(id, Order::Command(Box::new(command)));
        }
    }

    fn persist(&mut self, daemon: usize, mut record: Box<JobRecord>) {
        if self.sabotage == Sabotage::SkipPersist && record.ever_committed {
            return;
        }
        if self.sabotage == Sabotage::ForgetCommits {
            record.ever_committed = false;
        }
        self.write(daemon, Write::Job(record));
    }

    fn persist_incident(&mut self, daemon: usize, mut incident: Box<Incident>) {
        if self.sabotage == Sabotage::BlameAnother
            && let Some(gpu) = &mut incident.gpu
        {
            let next = (self.gpu_number(gpu) + 1) % self.cluster.gpus();
            *gpu = self.gpus[next].clone();
        }
        self.write(daemon, Write::Incident(incident));
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
