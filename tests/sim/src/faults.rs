//! Faults befall the cluster, and end.

use crate::agent::{killed, readable};
use crate::cluster::Who;
use crate::daemon::Interrupt;
use crate::net::{MS, Peer, Site};
use crate::script::NEVER;
use crate::wish::Wish;
use crate::worker::STEP_US;
use crate::world::{What, World};
use crate::{Fault, Way};
use reknit_engine::{HealthClass, Time};
use reknit_layout::GpuId;

impl World {
    /// The newest process on the GPU.
    pub fn on(&self, gpu: &GpuId) -> Option<Who> {
        let here = self.workers.keys().filter(|who| who.key.gpu == *gpu);
        here.max_by_key(|who| who.key.incarnation).cloned()
    }

    fn on_number(&self, gpu: usize) -> Option<Who> {
        self.on(&self.gpus[gpu])
    }

    fn leader(&self) -> Option<usize> {
        let store = self.store.leader.map(|lease| lease.daemon);
        store.filter(|daemon| self.daemons[*daemon].leading.is_some())
    }

    fn cuts_off(&mut self, from: Site, to: Site, way: Way, ms: u64) {
        let until = Time(self.now.0 + ms * MS);
        let ways: &[(Site, Site)] = match way {
            Way::Both => &[(from, to), (to, from)],
            Way::There => &[(from, to)],
            Way::Back => &[(to, from)],
        };
        for way in ways {
            let end = self.cuts.entry(*way).or_default();
            *end = until.max(*end);
        }
    }

    /// Counted only if it had something to befall.
    pub(crate) fn strikes(&mut self, fault: Fault) {
        self.log(|| format!("FAULT {fault:?}"));
        self.harms(&fault);
        if let Some(name) = self.befalls(&fault) {
            self.statistics.happened(name);
        }
    }

    fn befalls(&mut self, fault: &Fault) -> Option<&'static str> {
        let now = self.now;
        match *fault {
            Fault::KillWorker { gpu } => {
                let key = self.on_number(gpu)?;
                self.process_ends(&key, killed());
                Some("worker killed")
            }
            Fault::FreezeWorker { gpu, ms } => {
                let key = self.on_number(gpu)?;
                let frozen = &mut self.workers.get_mut(&key)?.frozen_until;
                *frozen = Time(now.0 + ms * MS).max(*frozen);
                Some(if ms == NEVER { "worker frozen for ever" } else { "worker frozen" })
            }
            Fault::SlowWorker { gpu, step_us } => {
                let key = self.on_number(gpu)?;
                self.workers.get_mut(&key)?.step_us = step_us;
                Some("worker's pace changed")
            }
            Fault::BreakWorkerSession { gpu } => {
                let peer = Peer::Worker(self.on_number(gpu)?);
                self.peer_hangs_up(&peer);
                Some("worker's session broken")
            }
            Fault::RestartAgent { node, ms } => {
                self.gone.remove(&node);
                self.agent_dies(node, ms);
                Some("agent restarted")
            }
            Fault::FreezeAgent { node, ms } => {
                let frozen = &mut self.agents[node].frozen_until;
                *frozen = Time(now.0 + ms * MS).max(*frozen);
                if ms == NEVER {
                    self.gone.insert(node);
                }
                Some(if ms == NEVER { "agent frozen for ever" } else { "agent frozen" })
            }
            Fault::BreakAgentSession { node } => {
                self.peer_hangs_up(&Peer::Agent(node));
                Some("agent's session broken")
            }
            Fault::CrashNode { node, ms } => {
                self.power_fails(node, ms);
                Some(if ms == NEVER { "node lost for ever" } else { "node crashed" })
            }
            Fault::Health { gpu, health } => {
                let cause = if health == HealthClass::Healthy { "" } else { "XID 79" };
                self.diagnoses(&self.gpus[gpu].clone(), health, cause, readable(health));
                Some("GPU's health changed")
            }
            Fault::CrashDaemon { daemon, ms } => {
                self.daemons[daemon].up.then_some(())?;
                self.daemon_dies(daemon, ms);
                Some("daemon crashed")
            }
            // Counted when they happen.
            Fault::CrashLeader { after, ms } => {
                let leader = self.leader()?;
                self.daemons[leader].interrupt = Some(Interrupt::Crash { after, ms });
                None
            }
            Fault::FreezeLeader { after, ms } => {
                let leader = self.leader()?;
                self.daemons[leader].interrupt = Some(Interrupt::Freeze { after, ms });
                None
            }
            Fault::LoseAnswer => {
                self.lose_answer = true;
                None
            }
            Fault::FreezeDaemon { daemon, ms } => {
                self.daemons[daemon].up.then_some(())?;
                self.daemons[daemon].freezes(Time(now.0 + ms * MS));
                let term = self.daemons[daemon].leading.as_ref()?.term;
                self.at(ms * MS, What::Wakes { daemon, term });
                Some("leader frozen")
            }
            Fault::JumpClock { daemon, ms } => {
                self.daemons[daemon].leading.as_ref()?;
                self.daemons[daemon].ahead += ms * MS;
                Some("leader's clock jumped")
            }
            Fault::CutStore { daemon, way, ms } => {
                self.cuts_off(Site::Daemon(daemon), Site::Store, way, ms);
                Some("daemon cut from store")
            }
            Fault::CutAgent { node, daemon, way, ms } => {
                self.cuts_off(Site::Agent(node), Site::Daemon(daemon), way, ms);
                Some("agent cut from daemon")
            }
            Fault::CutWorker { gpu, daemon, way, ms } => {
                self.cuts_off(Site::Gpu(gpu), Site::Daemon(daemon), way, ms);
                Some("worker cut from daemon")
            }
            Fault::CutPeers { gpu, other, way, ms } => {
                (gpu != other).then_some(())?;
                self.cuts_off(Site::Gpu(gpu), Site::Gpu(other), way, ms);
                Some("workers cut from each other")
            }
            Fault::StoreDown { ms } => {
                self.store.goes_down(Time(now.0 + ms * MS));
                Some("store gone")
            }
            Fault::StoreSlow { ms } => {
                self.store.slow_until = Time(now.0 + ms * MS);
                Some("store slow")
            }
            Fault::Drain { gpu } => {
                self.at(0, What::Wished { wish: Wish::Drain(gpu), tries: 0 });
                Some("drain asked for")
            }
            Fault::Restore { gpu } => {
                self.at(0, What::Wished { wish: Wish::Restore(gpu), tries: 0 });
                Some("restore asked for")
            }
            Fault::Rebalance { job } => {
                self.at(0, What::Wished { wish: Wish::Rebalance(job), tries: 0 });
                Some("rebalance asked for")
            }
            Fault::Stop { job } => {
                self.at(0, What::Wished { wish: Wish::Stop(job), tries: 0 });
                Some("stop asked for")
            }
            Fault::Start { job } => {
                let name = self.job_name(job);
                self.store.jobs.get(&name).filter(|record| record.phase.ended())?;
                self.at(0, What::Wished { wish: Wish::Submit(job), tries: 0 });
                Some("job submitted again")
            }
        }
    }

    /// No fault begins any more. Who sleeps wakes up in its time, and what was delayed comes late.
    pub(crate) fn heals(&mut self) {
        self.log(|| "HEALS".to_owned());
        let now = self.now;
        self.healed = true;
        self.cuts.clear();
        self.store.down_until = self.store.down_until.min(now);
        self.store.slow_until = now;
        self.lose_answer = false;
        for daemon in 0..self.daemons.len() {
            self.daemons[daemon].interrupt = None;
            self.daemon_boots(daemon);
        }
        for worker in self.workers.values_mut() {
            worker.step_us = STEP_US;
        }
        for node in 0..self.agents.len() {
            if !self.gone.contains(&node) {
                self.agent_boots(node);
            }
        }
        for gpu in 0..self.gpus.len() {
            self.diagnoses(&self.gpus[gpu].clone(), HealthClass::Healthy, "", true);
            // Once more when whatever a daemon still had in hand is done.
            for wait in [0, 5_000 * MS] {
                self.at(wait, What::Wished { wish: Wish::Restore(gpu), tries: 0 });
            }
        }
    }

    /// Nothing on the node says another word, and no socket of it ends.
    pub(crate) fn power_fails(&mut self, node: usize, ms: u64) {
        let here = self.workers.iter().filter(|(_, worker)| worker.node == node);
        let here: Vec<_> = here.map(|(who, _)| who.clone()).collect();
        let links = here.iter().filter_map(|who| self.workers.remove(who)?.link.session);
        let links: Vec<_> = links.chain(self.agents[node].link.session.take()).collect();
        for id in links {
            if let Some(session) = self.sessions.get_mut(&id) {
                session.client_open = false;
            }
        }
        self.gone.remove(&node);
        if ms == NEVER {
            self.gone.insert(node);
        }
        self.agent_dies(node, ms);
    }
}
