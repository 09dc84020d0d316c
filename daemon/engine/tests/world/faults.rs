//! What can be done to the model cluster.

use super::worker::killed;
use super::{Happening, Link, World};
use reknit_engine::*;
use reknit_layout::*;

impl World {
    pub fn kill(&mut self, gpu: &GpuId) {
        let key = self.on(gpu).expect("a process to kill");
        self.process_ends(&key, killed());
    }

    pub fn freeze(&mut self, gpu: &GpuId) {
        let key = self.on(gpu).expect("a process to freeze");
        self.processes.get_mut(&key).expect("it").frozen = true;
    }

    /// It goes on where it was.
    pub fn thaw(&mut self, gpu: &GpuId) {
        let key = self.on(gpu).expect("a process to thaw");
        let process = self.processes.get_mut(&key).expect("it");
        process.frozen = false;
        let (epoch, step) = (process.state.epoch, process.state.attempted);
        self.at(0, Happening::Prepared(key, epoch, step));
    }

    /// From now on it computes for so long in each step.
    pub fn slow(&mut self, gpu: &GpuId, step_us: u64) {
        let key = self.on(gpu).expect("a process to slow down");
        self.processes.get_mut(&key).expect("it").step_us = step_us;
    }

    /// The agent sees a GPU's class change.
    pub fn health(&mut self, gpu: &GpuId, health: HealthClass, cause: &str) {
        self.health_with(gpu, health, cause, health == HealthClass::Drain);
    }

    pub fn health_with(&mut self, gpu: &GpuId, health: HealthClass, cause: &str, shards_readable: bool) {
        let Some((node, report)) = self.diagnose(gpu, health, cause, shards_readable) else { return };
        let event = Event::HealthChanged {
            node: node.clone(),
            gpu: gpu.clone(),
            health,
            cause: cause.to_owned(),
            action: report.action,
            shards_readable,
        };
        self.report(Link::Agent(node), event);
    }

    /// The agent's list of GPUs changes, and a class with it.
    pub fn list_with(&mut self, gpu: &GpuId, health: HealthClass, cause: &str) {
        let Some((node, _)) = self.diagnose(gpu, health, cause, true) else { return };
        let event = Event::GpusListed { node: node.clone(), gpus: self.agents[&node].clone() };
        self.report(Link::Agent(node), event);
    }

    /// What the agent says from now on of the GPU, if some node has it.
    fn diagnose(
        &mut self,
        gpu: &GpuId,
        health: HealthClass,
        cause: &str,
        shards_readable: bool,
    ) -> Option<(NodeName, GpuReport)> {
        self.agents.iter_mut().find_map(|(node, gpus)| {
            let found = gpus.iter_mut().find(|found| found.gpu == *gpu)?;
            found.health = health;
            found.cause = cause.to_owned();
            found.action = if cause.is_empty() { String::new() } else { format!("do: {cause}") };
            found.shards_readable = shards_readable;
            Some((node.clone(), found.clone()))
        })
    }

    /// A worker's session ends and comes back after `ms`.
    pub fn flap_worker(&mut self, key: &WorkerKey, ms: u64) {
        self.cut_worker(key);
        self.at(ms * super::MS, Happening::WorkerConnects(key.clone()));
    }

    pub fn flap_agent(&mut self, node: &NodeName, ms: u64) {
        if self.sessions.remove(&Link::Agent(node.clone())).is_some() {
            self.tell(Event::AgentDisconnected { node: node.clone() });
        }
        self.at(ms * super::MS, Happening::AgentConnects(node.clone()));
    }

    /// The daemon's process is replaced: it knows what it stored, and everyone connects again.
    pub fn restart_daemon(&mut self) {
        self.restart_daemon_unheard_for(0);
    }

    /// Nobody reaches the new one for `ms`.
    pub fn restart_daemon_unheard_for(&mut self, ms: u64) {
        self.state = State::new(self.timeouts).with_topology(self.topology.clone());
        self.checks.daemon_restarted();
        self.sessions.clear();
        self.queue.retain(|_, what| !matches!(what, Happening::Planned(_)));
        self.tell(Event::Started {
            jobs: self.store.values().cloned().collect(),
            incidents: self.incidents.values().cloned().collect(),
        });
        let nodes: Vec<_> = self.agents.keys().cloned().collect();
        for node in nodes {
            let wait = ms * super::MS + self.random.below(300 * super::MS);
            self.at(wait, Happening::AgentConnects(node));
        }
        let workers: Vec<_> = self.processes.keys().cloned().collect();
        for worker in workers {
            let wait = ms * super::MS + self.random.below(300 * super::MS);
            self.at(wait, Happening::WorkerConnects(worker));
        }
    }
}
