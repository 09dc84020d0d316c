//! Agents: they start and end processes, and say how their GPUs are.

use crate::cluster::{job_name, node_name};
use crate::dial::Link;
use crate::net::{MS, Peer};
use crate::worker::Worker;
use crate::world::{What, World};
use reknit_engine::{Command, Event, ExitStatus, GpuReport, HealthClass, Time};
use reknit_layout::{GpuId, WorkerKey};

#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) up: bool,
    pub(crate) frozen_until: Time,
    pub(crate) gpus: Vec<GpuReport>,
    pub(crate) link: Link,
    /// Seen by this process of the agent: told in every new session.
    pub(crate) ends: Vec<(WorkerKey, ExitStatus)>,
}

pub(crate) fn killed() -> ExitStatus {
    ExitStatus { how: "killed by signal 9".to_owned(), signal: Some(9), status: None }
}

impl Agent {
    pub(crate) fn new(gpus: Vec<GpuReport>) -> Self {
        Self { up: false, frozen_until: Time(0), gpus, link: Link::default(), ends: Vec::new() }
    }
}

impl World {
    pub(crate) fn agent_boots(&mut self, node: usize) {
        if std::mem::replace(&mut self.agents[node].up, true) {
            return;
        }
        self.at(0, What::Dials(Peer::Agent(node)));
    }

    /// Its workers live on.
    pub(crate) fn agent_dies(&mut self, node: usize, ms: u64) {
        let peer = Peer::Agent(node);
        if let Some(id) = self.agents[node].link.session {
            self.client_leaves(id);
        }
        let gpus = std::mem::take(&mut self.agents[node].gpus);
        self.agents[node] = Agent::new(gpus);
        self.log(|| format!("{peer:?} dies"));
        self.at(ms * MS, What::AgentBoots(node));
    }

    pub(crate) fn hello_of(&self, peer: &Peer) -> Option<Event> {
        match peer {
            Peer::Agent(node) => {
                let here = self.workers.iter().filter(|(_, worker)| worker.node == *node);
                Some(Event::AgentConnected {
                    node: node_name(*node),
                    gpus: self.agents[*node].gpus.clone(),
                    workers: here.map(|(key, _)| (job_name(), key.clone(), 1)).collect(),
                })
            }
            Peer::Worker(key) => self.worker_hello(key),
        }
    }

    /// What must be heard in a session whatever was said in earlier ones.
    pub(crate) fn agent_repeats(&mut self, node: usize) {
        for (key, exit) in self.agents[node].ends.clone() {
            self.says_exit(node, &key, exit);
        }
    }

    pub(crate) fn agent_obeys(&mut self, node: usize, order: Command) {
        match order {
            Command::Spawn { worker, .. } => {
                let wait = 5 * MS + self.random.below(30 * MS);
                self.at(wait, What::ProcessStarts(worker, node));
            }
            Command::Fence { worker, .. } => {
                if self.workers.contains_key(&worker) {
                    self.process_ends(&worker, killed());
                } else {
                    self.says_exit(node, &worker, killed());
                }
            }
            other => self.breaks(format!("protocol: an agent was sent {other:?}")),
        }
    }

    pub(crate) fn process_starts(&mut self, key: WorkerKey, node: usize) {
        // An order in the hand of an agent that died is lost with it.
        if !self.agents[node].up || self.agents[node].ends.iter().any(|(ended, _)| *ended == key) {
            return;
        }
        self.workers.insert(key.clone(), Worker::new(node));
        let spawned =
            Event::WorkerSpawned { node: node_name(node), job: job_name(), worker: key.clone(), pid: 1 };
        self.says(&Peer::Agent(node), spawned);
        let wait = 10 * MS + self.random.below(40 * MS);
        self.at(wait, What::Dials(Peer::Worker(key)));
    }

    /// The kernel ends the process whether or not it runs; who watches learns of it.
    pub(crate) fn process_ends(&mut self, key: &WorkerKey, exit: ExitStatus) {
        let Some(worker) = self.workers.remove(key) else { return };
        self.log(|| format!("{key} ends: {}", exit.how));
        if let Some(id) = worker.link.session {
            self.client_leaves(id);
        }
        let node = worker.node;
        if self.agents[node].up {
            self.agents[node].ends.push((key.clone(), exit.clone()));
            self.says_exit(node, key, exit);
        }
        let epoch = worker.state.epoch;
        let engaged = |peer: &Worker| peer.state.epoch == epoch;
        let peers: Vec<_> =
            self.workers.iter().filter(|(_, peer)| engaged(peer)).map(|(key, _)| key.clone()).collect();
        for peer in peers {
            let wait = self.some_delay();
            self.at(wait, What::NoticesFailure(peer, epoch, key.clone()));
        }
    }

    fn says_exit(&mut self, node: usize, key: &WorkerKey, exit: ExitStatus) {
        let worker = key.clone();
        let event = Event::WorkerExited { node: node_name(node), job: job_name(), worker, exit };
        self.says(&Peer::Agent(node), event);
    }

    pub(crate) fn diagnose(&mut self, gpu: &GpuId, health: HealthClass, cause: &str) {
        let shards_readable =
            matches!(health, HealthClass::Healthy | HealthClass::Drain | HealthClass::Predict);
        for node in 0..self.agents.len() {
            let Some(found) = self.agents[node].gpus.iter_mut().find(|found| found.gpu == *gpu) else {
                continue;
            };
            found.health = health;
            cause.clone_into(&mut found.cause);
            found.action = if cause.is_empty() { String::new() } else { format!("look at {gpu}: {cause}") };
            found.shards_readable = shards_readable;
            let event = Event::HealthChanged {
                node: node_name(node),
                gpu: gpu.clone(),
                health,
                cause: cause.to_owned(),
                action: found.action.clone(),
                shards_readable,
            };
            self.says(&Peer::Agent(node), event);
        }
    }
}
