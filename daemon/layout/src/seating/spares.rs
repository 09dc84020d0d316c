//! Free GPUs take the places of GPUs that are gone.
//!
//! A group whose lost GPUs can all be replaced in its own domain is made whole there. Else, if the job may use that many
//! spares, the whole group moves to a domain that has room for it, and its GPUs that are left become free. When no
//! group can be made whole any more, the others take what their domain has.

use super::Seats;
use crate::{GpuId, JobSpec, Place, ReplicaId, StageId, Topology};
use std::collections::{BTreeSet, HashMap};

pub(super) fn replace(job: &JobSpec, topology: &Topology, seats: &mut Seats, gone: &BTreeSet<GpuId>) {
    let most = job.recovery.spares as usize;
    let lost = gone.iter().filter_map(|gpu| seats.place_of(gpu));
    let mut hit: BTreeSet<GroupId> = lost.map(|place| (place.replica, place.stage)).collect();
    if hit.is_empty() || most == 0 {
        return;
    }
    let left = most.saturating_sub(seats.spares().count());
    let mut spares = Spares { topology, gone, left, seats, free: HashMap::new(), full_for: None, taken: 0 };
    let may_relocate = job.parallel.tensor as usize <= most;
    // What one group takes may leave something for another: a group that moves leaves GPUs, and a lost spare is left again.
    loop {
        let before = spares.taken;
        hit.retain(|group| !spares.fill(*group, Fill::Whole));
        hit.retain(|group| !(may_relocate && spares.relocate(*group)));
        if spares.taken == before {
            hit.retain(|group| !spares.fill(*group, Fill::Some));
        }
        if spares.taken == before {
            break;
        }
    }
}

type GroupId = (ReplicaId, StageId);

#[derive(Clone, Copy, PartialEq)]
enum Fill {
    Whole,
    Some,
}

struct Spares<'a> {
    topology: &'a Topology,
    gone: &'a BTreeSet<GpuId>,
    /// How many more GPUs without a nominal place may take one.
    left: usize,
    seats: &'a mut Seats,
    /// The free GPUs of the domains that were looked at.
    free: HashMap<usize, Vec<&'a GpuId>>,
    /// No domain has room for a group that may use so many spares or fewer.
    full_for: Option<usize>,
    /// How many seats were taken.
    taken: usize,
}

impl<'a> Spares<'a> {
    /// Replaces the lost GPUs of the group from its own domain: every one or none, or as many as can be. Whether all are.
    fn fill(&mut self, group: GroupId, fill: Fill) -> bool {
        let Some(domain) = self.domain_of(group) else { return false };
        let lost = self.seats.group(group).filter(|(_, gpu)| self.gone.contains(*gpu));
        let lost: Vec<Place> = lost.map(|(place, _)| place).collect();
        let offer = self.offer(domain, &lost);
        let whole = offer.len() == lost.len();
        if whole || fill == Fill::Some {
            self.accept(offer);
        }
        whole
    }

    /// Moves the whole group to the first domain that has room for it.
    fn relocate(&mut self, group: GroupId) -> bool {
        let places: Vec<Place> = self.seats.group(group).map(|(place, _)| place).collect();
        let usable = self.left + places.iter().filter(|place| self.seats_spare(**place)).count();
        if self.full_for.is_some_and(|spares| usable <= spares) {
            return false;
        }
        for domain in 0..self.topology.domains().len() {
            if self.free(domain).len() >= places.len() {
                let offer = self.offer(domain, &places);
                if offer.len() == places.len() {
                    self.accept(offer);
                    return true;
                }
            }
        }
        self.full_for = Some(usable);
        false
    }

    fn domain_of(&self, group: GroupId) -> Option<usize> {
        self.seats.group(group).find_map(|(_, gpu)| self.topology.domain_of(gpu))
    }

    /// GPUs of the domain that are well and hold no place.
    fn free(&mut self, domain: usize) -> &[&'a GpuId] {
        self.free.entry(domain).or_insert_with(|| {
            let gpus = self.topology.domains()[domain].gpus();
            gpus.filter(|gpu| !self.gone.contains(*gpu) && self.seats.place_of(gpu).is_none()).collect()
        })
    }

    /// Free GPUs of the domain for as many of the places as it has and as spares are left. GPUs that have a place nominally
    /// are no spares and come first; a spare that is replaced is left again.
    fn offer(&mut self, domain: usize, places: &[Place]) -> Vec<(Place, GpuId)> {
        let free = self.free(domain).to_vec();
        let (nominal, spare): (Vec<_>, Vec<_>) = free.into_iter().partition(|gpu| self.seats.is_nominal(gpu));
        let (replaced, others): (Vec<_>, Vec<_>) = places.iter().partition(|place| self.seats_spare(**place));
        let usable = spare.into_iter().take(self.left + replaced.len());
        let gpus = nominal.into_iter().chain(usable).cloned();
        replaced.into_iter().chain(others).copied().zip(gpus).collect()
    }

    fn accept(&mut self, offer: Vec<(Place, GpuId)>) {
        if offer.is_empty() {
            return;
        }
        let replaced = offer.iter().filter(|(place, _)| self.seats_spare(*place)).count();
        let used = offer.iter().filter(|(_, gpu)| !self.seats.is_nominal(gpu)).count();
        self.left = self.left + replaced - used;
        self.taken += offer.len();
        self.full_for = None;
        // Whose free GPUs are others now is looked at again.
        for (place, gpu) in &offer {
            let domains = [Some(gpu), self.seats.get(*place)].map(|gpu| self.topology.domain_of(gpu?));
            for domain in domains.into_iter().flatten() {
                self.free.remove(&domain);
            }
        }
        self.seats.take(offer);
    }

    /// Whether a spare sits at the place.
    fn seats_spare(&self, place: Place) -> bool {
        self.seats.get(place).is_some_and(|gpu| !self.seats.is_nominal(gpu))
    }
}
