//! Which places do not train when some have lost their GPU.

use super::Mode;
use crate::{JobSpec, Place, ReplicaId, Slot, StageId};
use std::collections::{BTreeMap, BTreeSet};

/// The lost places and those that the mode adds. Where healthy slots are given up they are the highest ones.
pub(super) fn inactive(job: &JobSpec, lost: &BTreeSet<Place>, mode: Mode) -> BTreeSet<Place> {
    let tensor = job.parallel.tensor;
    let replicas: BTreeSet<ReplicaId> = lost.iter().map(|place| place.replica).collect();
    let whole = |replica| job.stages().map(move |stage| (replica, stage));
    let mut degrees = BTreeMap::new();
    match mode {
        Mode::Ntp => {}
        Mode::UniformReduction => {
            let most = by_group(lost).into_values().max().unwrap_or(0);
            degrees.extend(replicas.into_iter().flat_map(whole).map(|group| (group, tensor - most)));
        }
        Mode::DropReplica => degrees.extend(replicas.into_iter().flat_map(whole).map(|group| (group, 0))),
        Mode::PowerOfTwo => {
            let power = |left: u32| left.checked_ilog2().map_or(0, |exponent| 1 << exponent);
            let groups = by_group(lost).into_iter();
            degrees.extend(groups.map(|(group, lost)| (group, power(tensor - lost))));
        }
    }
    let mut inactive = lost.clone();
    for ((replica, stage), degree) in degrees {
        let slots = (0..tensor).map(|slot| Place { replica, stage, slot: Slot(slot) });
        let left: Vec<Place> = slots.filter(|place| !lost.contains(place)).collect();
        inactive.extend(&left[degree as usize..]);
    }
    inactive
}

/// How many of the places are of each group, for groups with any.
pub(super) fn by_group(places: &BTreeSet<Place>) -> BTreeMap<(ReplicaId, StageId), u32> {
    let mut groups = BTreeMap::new();
    for place in places {
        *groups.entry((place.replica, place.stage)).or_default() += 1;
    }
    groups
}
