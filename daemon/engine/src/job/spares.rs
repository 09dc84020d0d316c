//! Free GPUs take the places of GPUs that are gone.
//!
//! The job goes on unevenly first, with those that are left; a spare's worker then starts in the background and is knitted
//! in like a GPU that returned. Where it fills the place a group lives on inside its domain, so a group moves to another
//! domain only when none of its GPUs is left.

use super::Job;
use crate::cluster::Cluster;
use crate::state::Ctx;
use crate::{Command, NodeLink};
use reknit_layout::{GpuId, Place, Topology, WorkerKey};
use std::collections::{BTreeMap, BTreeSet};

impl Job {
    /// Seats free GPUs at the places whose GPU is gone, as many as `recovery.spares` allows. `taken`: whether another job has the GPU.
    pub(crate) fn take_spares(&mut self, ctx: &mut Ctx<'_>, taken: &dyn Fn(&GpuId) -> bool) {
        if !self.takes_newcomers() {
            return;
        }
        self.spares_due = false;
        if self.spec.recovery.spares == 0 {
            return;
        }
        self.keep_members(ctx);
        let vacant = self.workers.vacant().map(|(place, gpu)| (*place, gpu));
        let unfit = ctx.cluster.unfit().filter_map(|gpu| Some((self.workers.seat_of(gpu)?, gpu)));
        let gone = vacant.chain(unfit).filter(|(_, gpu)| self.is_gone(ctx.cluster, gpu));
        let gone: BTreeSet<Place> = gone.map(|(place, _)| place).collect();
        if gone.is_empty() {
            return;
        }
        let free = |gpu: &GpuId| {
            ctx.cluster.may_start(gpu).is_some() && !taken(gpu) && self.workers.seat_of(gpu).is_none()
        };
        let offer = self.offer(&ctx.cluster.topology(), &gone, free);
        if offer.is_empty() {
            return;
        }
        for (place, spare) in offer {
            let Some(before) = self.reseat(ctx, place, spare.clone(), "a spare has its place") else {
                continue;
            };
            ctx.later.push(Command::Announce(format!(
                "job {}: spare GPU {spare} takes place {place}, where GPU {before} is gone",
                self.record.name
            )));
        }
        self.workers.seat(&self.record.places);
        self.persist(ctx);
    }

    /// A member whose place was given to a spare, and that may train again before the spare does, keeps it.
    fn keep_members(&mut self, ctx: &mut Ctx<'_>) {
        if self.record.replaced.is_empty() {
            return;
        }
        let unseated = |(key, place): &(&WorkerKey, &Place)| self.record.places.get(place) != Some(&key.gpu);
        let stays =
            |(key, _): &(&WorkerKey, &Place)| ctx.cluster.may_train(&key.gpu) && self.workers.is_alive(key);
        let stay = self.members.iter().filter(unseated).filter(stays);
        let stay: Vec<(Place, GpuId)> = stay.map(|(key, place)| (*place, key.gpu.clone())).collect();
        for (place, gpu) in &stay {
            self.reseat(ctx, *place, gpu.clone(), "the GPU that it would replace trains on");
        }
        if !stay.is_empty() {
            self.workers.seat(&self.record.places);
            self.persist(ctx);
        }
    }

    /// Seats the GPU and returns the one before, whose worker is stopped unless it is a member: those leave at a step
    /// boundary.
    fn reseat(&mut self, ctx: &mut Ctx<'_>, place: Place, gpu: GpuId, reason: &str) -> Option<GpuId> {
        let before = self.record.places.insert(place, gpu.clone())?;
        let newcomer = self.worker_on(&before).map(|(key, _)| key.clone());
        if let Some(key) = newcomer.filter(|key| !self.is_member(key)) {
            self.stop_worker(ctx, &key, reason);
        }
        let nominal = self.record.replaced.entry(place).or_insert(before.clone());
        if *nominal == gpu {
            self.record.replaced.remove(&place);
        }
        Some(before)
    }

    /// Nothing is to be expected of the GPU for long: out of order, taken out, or on a node whose lease has ended. One
    /// that only lost its worker is not gone.
    fn is_gone(&self, cluster: &Cluster, gpu: &GpuId) -> bool {
        let lost_with_node = match cluster.gpu(gpu).map(|(_, node, _)| node.link) {
            Some(NodeLink::Gone { .. }) => self.worker_on(gpu).is_none(),
            Some(NodeLink::Connected { .. } | NodeLink::Silent { .. }) | None => false,
        };
        lost_with_node || !cluster.may_train(gpu)
    }

    fn offer(
        &self,
        topology: &Topology,
        gone: &BTreeSet<Place>,
        free: impl Fn(&GpuId) -> bool,
    ) -> BTreeMap<Place, GpuId> {
        let most = self.spec.recovery.spares as usize;
        let mut offer = BTreeMap::new();
        // A place whose spare is gone itself is replaced without a further one.
        let mut left = most.saturating_sub(self.record.replaced.len());
        let mut groups: BTreeMap<_, Vec<Place>> = BTreeMap::new();
        for place in gone {
            groups.entry((place.replica, place.stage)).or_default().push(*place);
        }
        let mut used = BTreeSet::new();
        for ((replica, stage), lost) in groups {
            let [first, last] = [0, u32::MAX].map(|slot| Place::new(replica.0, stage.0, slot));
            let members = self.record.places.range(first..=last);
            let whole = lost.len() == members.clone().count();
            let mut living = members.filter(|(place, _)| whole || !gone.contains(*place));
            let home = living.find_map(|(_, gpu)| topology.domain_of(gpu));
            let others = (0..topology.domains().len()).filter(|domain| whole && Some(*domain) != home);
            // At home every place that is filled is a gain; a whole group moves as one.
            let least = home.into_iter().map(|home| (home, 1)).chain(others.map(|other| (other, lost.len())));
            for (domain, least) in least {
                let gpus = topology.domains()[domain].gpus();
                let free: Vec<&GpuId> = gpus.filter(|gpu| free(gpu) && !used.contains(*gpu)).collect();
                let seats = self.fill(&lost, &free, left);
                if seats.len() >= least {
                    left -= seats.keys().filter(|place| self.costs_a_spare(**place)).count();
                    used.extend(seats.values().cloned());
                    offer.extend(seats);
                    break;
                }
            }
        }
        offer
    }

    /// The nominal GPU first, then any free one.
    fn fill(&self, lost: &[Place], free: &[&GpuId], mut left: usize) -> BTreeMap<Place, GpuId> {
        let mut seats = BTreeMap::new();
        let mut free: BTreeSet<&GpuId> = free.iter().copied().collect();
        for place in lost {
            let nominal = self.record.replaced.get(place).filter(|gpu| free.contains(gpu));
            let Some(gpu) = nominal.or_else(|| free.first().copied()).cloned() else { continue };
            if self.costs_a_spare(*place) {
                let Some(fewer) = left.checked_sub(1) else { continue };
                left = fewer;
            }
            free.remove(&gpu);
            seats.insert(*place, gpu);
        }
        seats
    }

    /// A place at which a spare sits already costs no further one.
    fn costs_a_spare(&self, place: Place) -> bool {
        !self.record.replaced.contains_key(&place)
    }
}
