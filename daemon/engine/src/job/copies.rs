//! Whose loss the job survives.

use super::Job;
use reknit_layout::{Units, WorkerKey};

impl Job {
    /// Whether others hold all that the worker owns, so that the job goes on, now or when the worker is started again, if it
    /// is killed. True of whoever is no member.
    pub(crate) fn can_do_without(&self, worker: &WorkerKey) -> bool {
        let Some((place, layout)) = self.members.get(worker).zip(self.record.layout.as_ref()) else {
            return true;
        };
        let Some(own) = layout.group(place.replica, place.stage).map(|group| group.owned(place.slot)) else {
            return true;
        };
        let holds = |key: &WorkerKey| key != worker && self.workers.is_alive(key);
        let peers: Vec<_> = layout.groups.iter().filter(|group| group.stage == place.stage).collect();
        // Any whole group holds all of the stage.
        let mut others =
            peers.iter().filter(|group| group.replica != place.replica && !group.active().is_empty());
        if others.any(|group| group.members().all(|(_, member)| holds(&member.worker))) {
            return true;
        }
        let members =
            peers.iter().flat_map(|group| group.members().map(move |(place, member)| (group, place, member)));
        let holders = members.filter(|(.., member)| holds(&member.worker));
        let held: Vec<_> = holders.map(|(group, place, _)| group.owned(place.slot)).collect();
        own.iter().all(|(axis, own)| {
            let held = held.iter().filter_map(|held| held.get(axis));
            held.fold(own.clone(), |left: Units, held| left.difference(held)).is_empty()
        })
    }
}
