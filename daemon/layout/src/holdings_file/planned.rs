//! The groups of a plan that was printed, as a source of holdings.

use super::Shared;
use crate::grid::Grid;
use crate::table::{Table, tables};
use crate::{Axis, Family, GpuId, Holding, JobSpec, Place, ReplicaId, Slot, StageId, Step, Units};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The `groups` of a plan: fills `holdings` and gives the seats.
pub(super) struct Groups<'a> {
    pub(super) job: &'a JobSpec,
    pub(super) shared: &'a mut Shared,
    pub(super) holdings: &'a mut BTreeMap<Place, Holding>,
}

impl<'de> DeserializeSeed<'de> for Groups<'_> {
    type Value = BTreeMap<Place, GpuId>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Groups<'_> {
    type Value = BTreeMap<Place, GpuId>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of groups")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut seats = BTreeMap::new();
        let mut gpus = BTreeSet::new();
        while let Some(Table(group)) = seq.next_element::<Table<PlannedGroup>>()? {
            let owned = group.owned(self.job).map_err(A::Error::custom)?;
            for (slot, (planned, units)) in (0..).zip(group.slots.into_iter().zip(owned)) {
                let place = Place { replica: group.replica, stage: group.stage, slot: Slot(slot) };
                if !gpus.insert(planned.gpu.clone()) {
                    let gpu = planned.gpu;
                    return Err(A::Error::custom(format!("{place}: GPU {gpu} sits at another place too")));
                }
                if seats.insert(place, planned.gpu).is_some() {
                    let (replica, stage) = (place.replica, place.stage);
                    return Err(A::Error::custom(format!("group {replica}.{stage} stands twice")));
                }
                if !units.is_empty() {
                    let units = self.shared.share(units);
                    self.holdings.insert(place, Holding { step: Step::default(), units });
                }
            }
        }
        if seats.len() != Grid::new(self.job).places() {
            let (stages, data) = (self.job.parallel.pipeline, self.job.parallel.data);
            return Err(A::Error::custom(format!(
                "groups are missing: the job has {data} replicas of {stages} stages, each needs its group"
            )));
        }
        if self.holdings.is_empty() {
            return Err(A::Error::custom(
                "nobody trains in this plan, so it says of nobody what it holds: give the plan before it",
            ));
        }
        Ok(seats)
    }
}

#[derive(Deserialize)]
struct PlannedGroup {
    replica: ReplicaId,
    stage: StageId,
    #[serde(deserialize_with = "tables")]
    slots: Vec<PlannedSlot>,
    #[serde(deserialize_with = "tables")]
    partitions: Vec<PlannedPartition>,
}

#[derive(Deserialize)]
struct PlannedSlot {
    slot: Slot,
    gpu: GpuId,
    active: bool,
}

#[derive(Deserialize)]
struct PlannedPartition {
    family: Family,
    layers: Option<(u32, u32)>,
    owned: Vec<Vec<(u32, u32)>>,
}

impl PlannedGroup {
    /// What each slot owns, slot by slot.
    fn owned(&self, job: &JobSpec) -> Result<Vec<BTreeMap<Axis, Units>>, String> {
        let tensor = job.parallel.tensor as usize;
        let name = format!("group {}.{}", self.replica, self.stage);
        let wrong = |problem: String| format!("{name}: {problem}");
        let place = Place { replica: self.replica, stage: self.stage, slot: Slot(0) };
        job.expect_place(place).map_err(|none| wrong(none.to_string()))?;
        if self.slots.len() != tensor || self.slots.iter().zip(0..).any(|(slot, at)| slot.slot != Slot(at)) {
            return Err(wrong(format!(
                "slots are not those of the job: allowed are 0 to {} in order",
                tensor - 1
            )));
        }
        let mut owned = vec![BTreeMap::new(); tensor];
        let mut seen = BTreeSet::new();
        for partition in &self.partitions {
            if partition.owned.len() != tensor {
                let lists = partition.owned.len();
                return Err(wrong(format!(
                    "{} has {lists} lists: allowed is one a slot, {tensor}",
                    partition.family
                )));
            }
            for axis in partition.axes(job, self.stage).map_err(wrong)? {
                if !seen.insert(axis) {
                    return Err(wrong(format!("{axis} stands twice")));
                }
                for ((intervals, slot), owned) in partition.owned.iter().zip(&self.slots).zip(&mut owned) {
                    let at = slot.slot;
                    let units = job.expect_units(axis.family, intervals);
                    let units = units.map_err(|problem| wrong(format!("{axis} of slot {at}: {problem}")))?;
                    if !units.is_empty() && !slot.active {
                        return Err(wrong(format!("{axis}: slot {at} is not active but owns units {units}")));
                    }
                    if !units.is_empty() {
                        owned.insert(axis, units);
                    }
                }
            }
        }
        Ok(owned)
    }
}

impl PlannedPartition {
    fn axes(&self, job: &JobSpec, stage: StageId) -> Result<Vec<Axis>, String> {
        let axis = |layer| Axis { family: self.family, layer };
        let (start, end) = match (self.family, self.layers) {
            (Family::Vocab, None) => {
                job.expect_axis(stage, axis(None))?;
                return Ok(vec![axis(None)]);
            }
            (Family::Vocab, Some(_)) => return Err("vocab has no layers: allowed is null".into()),
            (Family::Attn | Family::Ffn, None) => {
                return Err(format!("{} has layers: allowed is [start, end]", self.family));
            }
            (Family::Attn | Family::Ffn, Some(layers)) => layers,
        };
        if start >= end {
            return Err(format!(
                "{} layers [{start}, {end}]: allowed are [start, end] with start < end",
                self.family
            ));
        }
        // The first that is not of the stage ends the check, however long the range is.
        (start..end)
            .map(|layer| job.expect_axis(stage, axis(Some(layer))).map(|()| axis(Some(layer))))
            .collect()
    }
}
