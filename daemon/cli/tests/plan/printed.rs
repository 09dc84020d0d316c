//! A plan as `reknit plan --format json` prints it.

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// Family and layer.
pub(crate) type Axis = (String, Option<u32>);
pub(crate) type Place = (u32, u32, u32);
pub(crate) type Intervals = Vec<(u32, u32)>;
/// By GPU and axis.
pub(crate) type Held = BTreeMap<String, BTreeMap<Axis, BTreeSet<u32>>>;

#[derive(Debug, Deserialize)]
pub(crate) struct Plan {
    pub(crate) recoverable: bool,
    pub(crate) unrecoverable_units: Vec<Lost>,
    pub(crate) groups: Vec<Group>,
    pub(crate) batch: Vec<u32>,
    pub(crate) sync: Vec<Sync>,
    pub(crate) transfers: Vec<Transfer>,
    pub(crate) totals: Totals,
    pub(crate) memory: Vec<Figure>,
    pub(crate) power: Vec<Figure>,
    pub(crate) contingency: Contingency,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Lost {
    pub(crate) family: String,
    pub(crate) layers: Option<(u32, u32)>,
    pub(crate) units: Intervals,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Group {
    pub(crate) replica: u32,
    pub(crate) stage: u32,
    pub(crate) degree: u32,
    pub(crate) slots: Vec<Slot>,
    pub(crate) partitions: Vec<Partition>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Slot {
    pub(crate) slot: u32,
    pub(crate) gpu: String,
    pub(crate) active: bool,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Partition {
    pub(crate) family: String,
    pub(crate) layers: Option<(u32, u32)>,
    pub(crate) owned: Vec<Intervals>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Sync {
    pub(crate) stage: u32,
    pub(crate) columns: u32,
    pub(crate) hosts: Vec<Vec<u32>>,
    pub(crate) partitions: Vec<SyncPartition>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct SyncPartition {
    pub(crate) family: String,
    pub(crate) layers: Option<(u32, u32)>,
    pub(crate) columns: Vec<Intervals>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Transfer {
    pub(crate) family: String,
    pub(crate) layers: Option<(u32, u32)>,
    pub(crate) units: Intervals,
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) bytes: u64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Totals {
    pub(crate) bytes_moved: u64,
    pub(crate) bytes_lower_bound: u64,
    pub(crate) max_sent_by_one: u64,
    pub(crate) max_received_by_one: u64,
    pub(crate) step_time_ratio: Option<f64>,
    pub(crate) throughput_ratio: f64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Figure {
    pub(crate) slot: String,
    pub(crate) bytes: Option<u64>,
    pub(crate) ratio: Option<f64>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Contingency {
    pub(crate) k: u32,
    pub(crate) by: BTreeMap<String, Exposure>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Exposure {
    pub(crate) sets: u64,
    pub(crate) unrecoverable: u64,
    pub(crate) examples: Vec<Vec<String>>,
}

/// Every axis that `layers` names.
pub(crate) fn axes(family: &str, layers: Option<(u32, u32)>) -> Vec<Axis> {
    match layers {
        None => vec![(family.to_owned(), None)],
        Some((start, end)) => {
            assert!(start < end, "{family} {layers:?}");
            (start..end).map(|layer| (family.to_owned(), Some(layer))).collect()
        }
    }
}

/// Sorted, disjoint and not touching.
pub(crate) fn set(intervals: &Intervals) -> BTreeSet<u32> {
    assert!(intervals.iter().all(|(start, end)| start < end), "{intervals:?}");
    assert!(intervals.windows(2).all(|pair| pair[0].1 < pair[1].0), "{intervals:?}");
    intervals.iter().flat_map(|&(start, end)| start..end).collect()
}

pub(crate) fn name((replica, stage, slot): Place) -> String {
    format!("{replica}.{stage}.{slot}")
}

impl Plan {
    /// What each active slot owns.
    pub(crate) fn owned(&self) -> BTreeMap<Place, BTreeMap<Axis, BTreeSet<u32>>> {
        let mut owned: BTreeMap<Place, BTreeMap<Axis, _>> = BTreeMap::new();
        for group in &self.groups {
            for partition in &group.partitions {
                for axis in axes(&partition.family, partition.layers) {
                    for (slot, units) in (0..).zip(&partition.owned) {
                        let place = (group.replica, group.stage, slot);
                        let before = owned.entry(place).or_default().insert(axis.clone(), set(units));
                        assert!(before.is_none(), "{axis:?} of {place:?} stands twice");
                    }
                }
            }
        }
        owned
    }

    pub(crate) fn gpus(&self) -> BTreeMap<Place, (&str, bool)> {
        let slots = self.groups.iter().flat_map(|group| {
            group
                .slots
                .iter()
                .map(move |slot| ((group.replica, group.stage, slot.slot), (slot.gpu.as_str(), slot.active)))
        });
        slots.collect()
    }

    /// What every active GPU will hold.
    pub(crate) fn held(&self) -> Held {
        let gpus = self.gpus();
        let owned = self.owned().into_iter().filter(|(place, _)| gpus[place].1);
        owned.map(|(place, units)| (gpus[&place].0.to_owned(), units)).collect()
    }
}
