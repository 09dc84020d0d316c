//! Faults befall the cluster, and end.

use crate::agent::killed;
use crate::cluster::{DAEMONS, NODES, gpu_name};
use crate::daemon::{Interrupt, Wish};
use crate::net::{MS, Peer, Site};
use crate::world::{What, World};
use crate::{Fault, Way};
use reknit_engine::{HealthClass, Time};
use reknit_layout::WorkerKey;

impl World {
    /// The newest process on the GPU.
    fn on(&self, gpu: usize) -> Option<WorkerKey> {
        let gpu = gpu_name(gpu, self.tensor);
        self.workers.keys().rfind(|key| key.gpu == gpu).cloned()
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
        let name = self.befalls(&fault);
        if let Some(name) = name {
            self.statistics.happened(name);
        }
    }

    fn befalls(&mut self, fault: &Fault) -> Option<&'static str> {
        let now = self.now;
        match *fault {
            Fault::KillWorker { gpu } => {
                let key = self.on(gpu)?;
                self.process_ends(&key, killed());
                Some("worker killed")
            }
            Fault::FreezeWorker { gpu, ms } => {
                let key = self.on(gpu)?;
                self.workers.get_mut(&key)?.frozen_until = Time(now.0 + ms * MS);
                Some("worker frozen")
            }
            Fault::BreakWorkerSession { gpu } => {
                let peer = Peer::Worker(self.on(gpu)?);
                self.peer_hangs_up(&peer);
                Some("worker's session broken")
            }
            Fault::RestartAgent { node, ms } => {
                self.agent_dies(node, ms);
                Some("agent restarted")
            }
            Fault::FreezeAgent { node, ms } => {
                self.agents[node].frozen_until = Time(now.0 + ms * MS);
                Some("agent frozen")
            }
            Fault::BreakAgentSession { node } => {
                self.peer_hangs_up(&Peer::Agent(node));
                Some("agent's session broken")
            }
            Fault::CrashNode { node, ms } => {
                self.agent_dies(node, ms);
                let here = self.workers.iter().filter(|(_, worker)| worker.node == node);
                let here: Vec<_> = here.map(|(key, _)| key.clone()).collect();
                for key in here {
                    self.process_ends(&key, killed());
                }
                Some("node crashed")
            }
            Fault::Health { gpu, health } => {
                let cause = if health == HealthClass::Healthy { "" } else { "XID 79" };
                self.diagnose(&gpu_name(gpu, self.tensor), health, cause);
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
                self.daemons[daemon].frozen_until = Time(now.0 + ms * MS);
                let term = self.daemons[daemon].leading.as_ref()?.term;
                self.at(ms * MS, What::Wakes { daemon, term });
                Some("leader frozen")
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
            Fault::Rebalance => {
                self.at(0, What::Wished { wish: Wish::Rebalance, tries: 0 });
                Some("rebalance asked for")
            }
            Fault::Stop => {
                self.at(0, What::Wished { wish: Wish::Stop, tries: 0 });
                Some("stop asked for")
            }
        }
    }

    /// No fault lasts any longer.
    pub(crate) fn heals(&mut self) {
        self.log(|| "HEALS".to_owned());
        let now = self.now;
        self.healed = true;
        self.cuts.clear();
        self.store.down_until = self.store.down_until.min(now);
        self.store.slow_until = now;
        self.lose_answer = false;
        for daemon in 0..DAEMONS {
            self.daemons[daemon].interrupt = None;
            self.daemons[daemon].frozen_until = now;
            self.daemon_boots(daemon);
            if let Some(leading) = &self.daemons[daemon].leading {
                let term = leading.term;
                self.at(0, What::Wakes { daemon, term });
            }
        }
        for worker in self.workers.values_mut() {
            worker.frozen_until = now;
        }
        for node in 0..NODES {
            self.agents[node].frozen_until = now;
            self.agent_boots(node);
        }
        for gpu in 0..NODES * self.tensor as usize {
            self.diagnose(&gpu_name(gpu, self.tensor), HealthClass::Healthy, "");
            // Once more when whatever a daemon still had in hand is done.
            for wait in [0, 5_000 * MS] {
                self.at(wait, What::Wished { wish: Wish::Restore(gpu), tries: 0 });
            }
        }
    }
}
