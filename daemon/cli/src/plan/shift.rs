//! Who sits elsewhere than before: spares, whole groups that change places within a stage, and single GPUs.

use reknit_layout::{JobSpec, Place, ReplicaId, Seats, Slot, StageId};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
pub(crate) struct Shift {
    /// Places with a GPU that had none.
    pub(crate) spares: Vec<Place>,
    /// The replicas whose groups of the stage changed places with each other.
    pub(crate) exchanges: Vec<(StageId, BTreeSet<ReplicaId>)>,
    /// From where to where single GPUs moved.
    pub(crate) single: Vec<(Place, Place)>,
    /// The replica that the group of an exchange comes from.
    sources: BTreeMap<(StageId, ReplicaId), ReplicaId>,
}

impl Shift {
    pub(crate) fn of(job: &JobSpec, before: &Seats, after: &Seats) -> Self {
        let mut shift = Self::default();
        let mut moved: BTreeMap<(StageId, ReplicaId), Vec<(Place, Place)>> = BTreeMap::new();
        for (place, gpu) in after.iter() {
            match before.place_of(gpu) {
                None => shift.spares.push(place),
                Some(origin) if origin == place => {}
                Some(origin) => moved.entry((place.stage, place.replica)).or_default().push((origin, place)),
            }
        }
        let stays = |place: Place| after.get(place).is_some_and(|gpu| before.place_of(gpu) == Some(place));
        let slots = || (0..job.parallel.tensor).map(Slot);
        for (&(stage, replica), pairs) in &moved {
            let from = pairs[0].0.replica;
            let as_one = pairs.iter().all(|(origin, place)| *origin == Place { replica: from, ..*place });
            let all = slots().all(|slot| !stays(Place { replica, stage, slot }));
            if as_one && all && from != replica {
                shift.sources.insert((stage, replica), from);
            }
        }
        shift.close();
        let whole = |place: &Place| shift.sources.contains_key(&(place.stage, place.replica));
        shift.single = moved.values().flatten().filter(|(_, place)| !whole(place)).copied().collect();
        shift.single.sort_unstable();
        shift
    }

    /// Keeps the sources that form rings, and names these.
    fn close(&mut self) {
        let mut closed = BTreeMap::new();
        for &(stage, start) in self.sources.keys() {
            if closed.contains_key(&(stage, start)) {
                continue;
            }
            let mut ring = BTreeMap::new();
            let mut at = start;
            while let Some(&from) = self.sources.get(&(stage, at)) {
                if ring.insert((stage, at), from).is_some() {
                    break;
                }
                at = from;
            }
            // One that ends elsewhere than it began is none.
            if at == start {
                self.exchanges.push((stage, ring.keys().map(|(_, replica)| *replica).collect()));
                closed.append(&mut ring);
            }
        }
        self.sources = closed;
    }

    /// The replica in which the group's GPUs were before.
    pub(crate) fn source(&self, replica: ReplicaId, stage: StageId) -> ReplicaId {
        self.sources.get(&(stage, replica)).copied().unwrap_or(replica)
    }
}
