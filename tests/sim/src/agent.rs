//! Agents: they start and end processes, and say how their GPUs are.

use crate::cluster::{Who, node_name};
use crate::dial::Link;
use crate::net::{MS, Peer};
use crate::worker::Worker;
use crate::world::{What, World};
use reknit_engine::{Command, Event, ExitStatus, GpuReport, HealthClass, Time};
use reknit_layout::GpuId;

#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) up: bool,
    /// Tells its processes apart.
    pub(crate) instance: u64,
    pub(crate) frozen_until: Time,
    pub(crate) gpus: Vec<GpuReport>,
    pub(crate) link: Link,
    /// Seen by this process of the agent: told in every new session.
    pub(crate) ends: Vec<(Who, ExitStatus)>,
}

pub fn killed() -> ExitStatus {
    ExitStatus { how: "killed by signal 9".to_owned(), signal: Some(9), status: None }
}

impl Agent {
    pub(crate) fn new(gpus: Vec<GpuReport>, instance: u64) -> Self {
        Self { up: false, instance, frozen_until: Time(0), gpus, link: Link::default(), ends: Vec::new() }
    }
}

impl World {
    pub(crate) fn agent_boots(&mut self, node: usize) {
        if !std::mem::replace(&mut self.agents[node].up, true) {
            self.at(0, What::Dials(Peer::Agent(node)));
        }
    }

    /// Its workers live on.
    pub(crate) fn agent_dies(&mut self, node: usize, ms: u64) {
        let peer = Peer::Agent(node);
        if let Some(id) = self.agents[node].link.session {
            self.client_leaves(id);
        }
        let gpus = std::mem::take(&mut self.agents[node].gpus);
        self.agents[node] = Agent::new(gpus, self.agents[node].instance + 1);
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
                    workers: here.map(|(who, _)| (who.job.clone(), who.key.clone(), 1)).collect(),
                })
            }
            Peer::Worker(who) => self.worker_hello(who),
        }
    }

    /// What must be heard in a session whatever was said in earlier ones.
    pub(crate) fn agent_repeats(&mut self, node: usize) {
        for (who, exit) in self.agents[node].ends.clone() {
            self.says_exit(node, &who, exit);
        }
    }

    pub(crate) fn agent_obeys(&mut self, node: usize, order: Command) {
        match order {
            Command::Spawn { job, worker, .. } => {
                let wait = 5 * MS + self.random.below(30 * MS);
                self.at(wait, What::ProcessStarts(Who { job, key: worker }, node));
            }
            Command::Fence { job, worker, .. } => {
                let who = Who { job, key: worker };
                if self.workers.contains_key(&who) {
                    self.process_ends(&who, killed());
                } else {
                    self.says_exit(node, &who, killed());
                }
            }
            other => self.breaks(format!("protocol: an agent was sent {other:?}")),
        }
    }

    pub(crate) fn process_starts(&mut self, who: Who, node: usize) {
        // An order in the hand of an agent that died is lost with it.
        if !self.agents[node].up || self.agents[node].ends.iter().any(|(ended, _)| *ended == who) {
            return;
        }
        let Some(record) = self.store.jobs.get(&who.job) else { return };
        let worker = Worker::new(node, &record.spec);
        self.workers.insert(who.clone(), worker);
        let (job, worker) = (who.job.clone(), who.key.clone());
        self.says(&Peer::Agent(node), Event::WorkerSpawned { node: node_name(node), job, worker, pid: 1 });
        let wait = 10 * MS + self.random.below(40 * MS);
        self.at(wait, What::Dials(Peer::Worker(who.clone())));
        // Before or after it has its session.
        let wait = (5 + self.opens_later_ms) * MS + self.random.below(80 * MS);
        self.at(wait, What::Opens(who));
    }

    /// The kernel ends the process whether or not it runs; who watches learns of it.
    pub(crate) fn process_ends(&mut self, who: &Who, exit: ExitStatus) {
        let Some(worker) = self.workers.remove(who) else { return };
        self.log(|| format!("{who} ends: {}", exit.how));
        if let Some(id) = worker.link.session {
            self.client_leaves(id);
        }
        let node = worker.node;
        if self.agents[node].up {
            self.agents[node].ends.push((who.clone(), exit.clone()));
            self.says_exit(node, who, exit);
        }
        let epoch = worker.state.epoch;
        let engaged = self.workers.iter().filter(|(peer, _)| peer.job == who.job);
        let engaged = engaged.filter(|(_, peer)| peer.state.epoch == epoch);
        let peers: Vec<_> = engaged.map(|(peer, _)| peer.clone()).collect();
        for peer in peers {
            let wait = self.some_delay();
            self.at(wait, What::NoticesFailure(peer, epoch, who.clone()));
        }
    }

    fn says_exit(&mut self, node: usize, who: &Who, exit: ExitStatus) {
        let (job, worker) = (who.job.clone(), who.key.clone());
        let event = Event::WorkerExited { node: node_name(node), job, worker, exit };
        self.says(&Peer::Agent(node), event);
    }

    /// What the agent says of a GPU from now on: its node, and the report.
    pub(crate) fn finds(
        &mut self,
        gpu: &GpuId,
        health: HealthClass,
        cause: &str,
        shards_readable: bool,
    ) -> Option<(usize, GpuReport)> {
        self.agents.iter_mut().enumerate().find_map(|(node, agent)| {
            let found = agent.gpus.iter_mut().find(|found| found.gpu == *gpu)?;
            found.health = health;
            cause.clone_into(&mut found.cause);
            found.action = if cause.is_empty() { String::new() } else { format!("do: {cause}") };
            found.shards_readable = shards_readable;
            Some((node, found.clone()))
        })
    }

    /// And says so at once.
    pub(crate) fn diagnoses(&mut self, gpu: &GpuId, health: HealthClass, cause: &str, shards_readable: bool) {
        let Some((node, report)) = self.finds(gpu, health, cause, shards_readable) else { return };
        let event = Event::HealthChanged {
            node: node_name(node),
            gpu: gpu.clone(),
            health,
            cause: report.cause,
            action: report.action,
            shards_readable,
        };
        self.says(&Peer::Agent(node), event);
    }
}

/// As far as a class alone says it.
pub(crate) fn readable(health: HealthClass) -> bool {
    matches!(health, HealthClass::Healthy | HealthClass::Drain | HealthClass::Predict)
}
