//! What was done to whom: the truth that incidents are held against.

use crate::Fault;
use crate::net::MS;
use crate::world::World;
use reknit_engine::Time;

/// What is done to somebody shows within this, in microseconds: deadlines may have to pass, and a new leader hears of
/// it late.
const SHOWS: u64 = 12_000 * MS;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Harm {
    /// By number; `None`: the control plane or the store.
    gpu: Option<usize>,
    from: Time,
    until: Time,
}

impl World {
    /// Keeps who is harmed by a fault.
    pub(crate) fn harms(&mut self, fault: &Fault) {
        let of_node = |node: usize| (0..self.gpus.len()).filter(|gpu| self.node_of(*gpu) == node).collect();
        let (gpus, ms): (Vec<usize>, u64) = match *fault {
            Fault::KillWorker { gpu }
            | Fault::SlowWorker { gpu, .. }
            | Fault::BreakWorkerSession { gpu }
            | Fault::Health { gpu, .. }
            | Fault::Drain { gpu }
            | Fault::Restore { gpu } => (vec![gpu], 0),
            Fault::FreezeWorker { gpu, ms } | Fault::CutWorker { gpu, ms, .. } => (vec![gpu], ms),
            Fault::CutPeers { gpu, other, ms, .. } => (vec![gpu, other], ms),
            Fault::BreakAgentSession { node } => (of_node(node), 0),
            Fault::RestartAgent { node, ms }
            | Fault::FreezeAgent { node, ms }
            | Fault::CrashNode { node, ms }
            | Fault::CutAgent { node, ms, .. } => (of_node(node), ms),
            Fault::CrashDaemon { ms, .. }
            | Fault::CrashLeader { ms, .. }
            | Fault::FreezeLeader { ms, .. }
            | Fault::FreezeDaemon { ms, .. }
            | Fault::CutStore { ms, .. }
            | Fault::StoreDown { ms }
            | Fault::StoreSlow { ms } => (Vec::new(), ms),
            // Deadlines of everyone pass at once.
            Fault::JumpClock { .. } => ((0..self.gpus.len()).collect(), 0),
            Fault::LoseAnswer | Fault::Rebalance { .. } | Fault::Stop { .. } | Fault::Start { .. } => {
                (Vec::new(), 0)
            }
        };
        let (from, until) = (self.now, Time(self.now.0 + ms * MS));
        let whom: Vec<_> = match gpus.is_empty() {
            true => vec![None],
            false => gpus.into_iter().map(Some).collect(),
        };
        self.harm.extend(whom.into_iter().map(|gpu| Harm { gpu, from, until }));
    }

    /// Whether something was done to the GPU lately, or to anything when none is named.
    pub(crate) fn was_harmed(&self, gpu: Option<usize>) -> bool {
        self.harm.iter().any(|harm| {
            let whom = gpu.is_none() || harm.gpu == gpu;
            whom && harm.from <= self.now && self.now.0 <= harm.until.0 + SHOWS
        })
    }
}
