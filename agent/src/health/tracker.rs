//! Every GPU's health.

use super::gpu::{Durable, GpuHealth};
use super::signals::Seen;
use super::{Transition, Verdict, XidSeen};
use crate::clock::Millis;
use crate::policy::{Policies, Signal};
use crate::probe::protocol::{Busy, GpuIdentity, Reading};
use reknit_layout::GpuId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Fewer say nothing of what is usual on a node.
const SIBLINGS: usize = 3;

/// What must outlive the agent: `health.json`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Memory {
    /// The boot that it was written in.
    boot: String,
    gpus: BTreeMap<GpuId, Durable>,
}

/// When the node was booted, and the name of that boot.
#[derive(Debug, Clone)]
pub(crate) struct Boot {
    pub(crate) id: String,
    pub(crate) at: Millis,
}

#[derive(Debug)]
pub(crate) struct Tracker {
    policies: Policies,
    boot: Boot,
    gpus: BTreeMap<GpuId, Tracked>,
    /// Of GPUs that are not watched yet.
    remembered: BTreeMap<GpuId, Durable>,
}

#[derive(Debug)]
struct Tracked {
    name: String,
    architecture: String,
    health: GpuHealth,
}

impl Tracker {
    pub(crate) fn new(policies: Policies, boot: Boot, memory: Memory) -> Self {
        let mut remembered = memory.gpus;
        if memory.boot != boot.id {
            remembered.values_mut().for_each(Durable::was_booted);
        }
        Self { policies, boot, gpus: BTreeMap::new(), remembered }
    }

    pub(crate) fn memory(&self) -> Memory {
        let watched = self.gpus.iter().map(|(gpu, tracked)| (gpu, &tracked.health.durable));
        let gpus = self.remembered.iter().chain(watched);
        Memory {
            boot: self.boot.id.clone(),
            gpus: gpus.map(|(gpu, durable)| (gpu.clone(), durable.clone())).collect(),
        }
    }

    /// What is believed already stays; from now on the new rows judge.
    pub(crate) fn set_policies(&mut self, policies: Policies) {
        for tracked in self.gpus.values_mut() {
            tracked.health.set_policy(policies.for_architecture(&tracked.architecture).clone());
        }
        self.policies = policies;
    }

    /// From now on watches a GPU, if it is not watched yet. One that answered when it was enumerated starts
    /// healthy, or as it was remembered.
    pub(crate) fn watch(&mut self, gpu: &GpuIdentity, answered: bool) {
        if self.gpus.contains_key(&gpu.uuid) {
            return;
        }
        let policy = self.policies.for_architecture(&gpu.architecture).clone();
        let durable = self.remembered.remove(&gpu.uuid).unwrap_or_default();
        let health = GpuHealth::new(policy, durable, answered);
        let (name, architecture) = (gpu.name.clone(), gpu.architecture.clone());
        self.gpus.insert(gpu.uuid.clone(), Tracked { name, architecture, health });
    }

    /// The GPU is not this node's any more. Its past is kept, should it return.
    pub(crate) fn forget(&mut self, gpu: &GpuId) {
        if let Some(tracked) = self.gpus.remove(gpu) {
            self.remembered.insert(gpu.clone(), tracked.health.durable);
        }
    }

    pub(crate) fn verdict(&self, gpu: &GpuId) -> Option<&Verdict> {
        self.gpus.get(gpu).map(|tracked| tracked.health.reported())
    }

    /// The last thing that was seen of the GPU and says nothing about it.
    pub(crate) fn ignored(&self, gpu: &GpuId) -> Option<&Verdict> {
        self.gpus.get(gpu).and_then(|tracked| tracked.health.ignored.as_ref())
    }

    pub(crate) fn enforced(&self, gpu: &GpuId) -> bool {
        self.gpus.get(gpu).is_none_or(|tracked| tracked.health.policy.enforce)
    }

    /// In points: `risk.drain_at` of them take the GPU out.
    pub(crate) fn risk(&self, now: Millis, gpu: &GpuId) -> f64 {
        self.gpus.get(gpu).map_or(0.0, |tracked| tracked.health.risk(now))
    }

    pub(crate) fn reading(&mut self, now: Millis, gpu: &GpuId, reading: &Reading) -> Option<Transition> {
        let siblings = self.links_of_siblings(gpu);
        let booted_at = self.boot.at;
        let health = self.health(gpu)?;
        health.reading(now, booted_at, reading, siblings);
        health.settle(now, gpu)
    }

    pub(crate) fn xid(&mut self, now: Millis, gpu: &GpuId, seen: &XidSeen<'_>) -> Option<Transition> {
        let health = self.health(gpu)?;
        health.xid(now, seen);
        health.settle(now, gpu)
    }

    /// Calls that have not returned. True when no GPU answers: then the node is blind and none is blamed.
    pub(crate) fn hung(&mut self, now: Millis, busy: &[Busy]) -> (Vec<Transition>, bool) {
        let blind_after = self.policies.general().watchdog.blind().as_millis();
        // A GPU that is gone answers, whatever the driver does for the others.
        let there = |gpu: &GpuId| self.gpus.get(gpu).is_some_and(|tracked| !tracked.health.away);
        let stuck = busy.iter().filter(|busy| u128::from(busy.ms) >= blind_after && there(&busy.gpu)).count();
        if stuck > 0 && stuck == self.gpus.keys().filter(|gpu| there(gpu)).count() {
            return (Vec::new(), true);
        }
        let booted_at = self.boot.at;
        let mut transitions = Vec::new();
        for Busy { gpu, call, ms } in busy {
            let Some(health) = self.health(gpu) else {
                continue;
            };
            let seconds = *ms as f64 / 1000.0;
            let evidence = format!("{call} has not returned for {seconds:.0} s");
            health.keeps_silent(&evidence);
            health.judge(now, booted_at, &[Seen::new(Signal::Hung, seconds, evidence)]);
            transitions.extend(health.settle(now, gpu));
        }
        (transitions, false)
    }

    /// The probe is gone: nothing is known of GPUs, except of those that were bad.
    pub(crate) fn blind(&mut self, now: Millis, cause: &str) -> Vec<Transition> {
        let gpus = self.gpus.iter_mut();
        let told = gpus.filter_map(|(gpu, tracked)| {
            tracked.health.unseen = Some(Verdict::unknown(cause));
            tracked.health.settle(now, gpu)
        });
        told.collect()
    }

    /// An operator says that the GPU is well. What still holds is seen again at once.
    pub(crate) fn release(&mut self, now: Millis, gpu: &GpuId) -> Option<Transition> {
        let health = self.health(gpu)?;
        health.release();
        health.settle(now, gpu)
    }

    fn health(&mut self, gpu: &GpuId) -> Option<&mut GpuHealth> {
        self.gpus.get_mut(gpu).map(|tracked| &mut tracked.health)
    }

    /// The links that every other GPU of this one's kind has had active. A GPU whose link was down from the
    /// first has no better baseline than theirs.
    fn links_of_siblings(&self, gpu: &GpuId) -> u32 {
        let Some(own) = self.gpus.get(gpu) else {
            return 0;
        };
        let siblings = self.gpus.iter().filter(|(other, tracked)| *other != gpu && tracked.name == own.name);
        let links: Vec<u32> = siblings.map(|(_, tracked)| tracked.health.durable.links).collect();
        if links.len() < SIBLINGS { 0 } else { links.into_iter().fold(u32::MAX, |all, links| all & links) }
    }
}
