//! The holdings file of `reknit plan`: what every GPU of a job holds.
//!
//! It is a JSON object in one of two forms. Either its keys are places, and a place that is not named holds nothing:
//! `{"0.0.0": {"step": 7, "units": {"attn/0": [[0, 3]], "ffn/0": [[0, 12]], "vocab": [[0, 4]]}}}`. Or it is what
//! `reknit plan --format json` printed: then every active slot holds what that plan gave it, on the GPU it named.
//!
//! Everything is checked while it is read, so that errors can tell the line and nothing impossible is kept.

use crate::{Axis, Family, GpuId, Holding, JobSpec, Place, ReplicaId, Slot, StageId, Step, Units};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

/// What a holdings file says.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HoldingsFile {
    /// By nominal place. Places that hold nothing are absent.
    pub holdings: BTreeMap<Place, Holding>,
    /// The GPU of every nominal place, if the file was a plan.
    pub seats: Option<BTreeMap<Place, GpuId>>,
}

impl HoldingsFile {
    /// Reads a holdings file of `job`.
    ///
    /// # Errors
    /// Of the deserializer, which adds where it stopped: with the key, and what is allowed.
    pub fn read<'de, D: Deserializer<'de>>(job: &JobSpec, from: D) -> Result<Self, D::Error> {
        from.deserialize_map(FileVisitor(job))
    }
}

impl JobSpec {
    fn expect_axis(&self, stage: StageId, axis: Axis) -> Result<(), String> {
        let layers = self.stage_layers(stage);
        let has = match axis.layer {
            Some(layer) => layers.contains(&layer),
            None => stage.0 == 0 || stage.0 + 1 == self.parallel.pipeline,
        };
        if has {
            return Ok(());
        }
        let (first, last) = (layers.start, layers.end - 1);
        Err(match axis.layer {
            Some(_) => {
                format!("{axis} is not an axis of stage {stage}: allowed are layers {first} to {last}")
            }
            None => {
                format!("stage {stage} has no vocab: allowed are attn and ffn of layers {first} to {last}")
            }
        })
    }

    fn expect_units(&self, family: Family, intervals: &[(u32, u32)]) -> Result<Units, String> {
        let units = self.model.units(family);
        let mut before = 0;
        for &(start, end) in intervals {
            if start >= end || end > units {
                return Err(format!(
                    "[{start}, {end}] is not an interval: allowed are [start, end] with start < end up to {units}"
                ));
            }
            if start < before {
                return Err(format!(
                    "[{start}, {end}] begins before {before}: intervals ascend and do not overlap"
                ));
            }
            before = end;
        }
        Ok(intervals.iter().copied().collect())
    }
}

/// Workers that hold the same share it.
#[derive(Default)]
struct Shared(HashMap<BTreeMap<Axis, Units>, Arc<BTreeMap<Axis, Units>>>);

impl Shared {
    fn share(&mut self, units: BTreeMap<Axis, Units>) -> Arc<BTreeMap<Axis, Units>> {
        if let Some(known) = self.0.get(&units) {
            return Arc::clone(known);
        }
        let shared = Arc::new(units.clone());
        self.0.insert(units, Arc::clone(&shared));
        shared
    }
}

const PLAN_KEYS: [&str; 12] = [
    "version",
    "mode",
    "recoverable",
    "unrecoverable_units",
    "groups",
    "batch",
    "sync",
    "transfers",
    "totals",
    "memory",
    "power",
    "contingency",
];

struct FileVisitor<'a>(&'a JobSpec);

impl<'de> Visitor<'de> for FileVisitor<'_> {
    type Value = HoldingsFile;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of places, or a plan that `reknit plan --format json` printed")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HoldingsFile, A::Error> {
        let job = self.0;
        let mut shared = Shared::default();
        let mut holdings = BTreeMap::new();
        let mut named = BTreeSet::new();
        let mut plan_keys = BTreeSet::new();
        let mut seats = None;
        while let Some(key) = map.next_key::<String>()? {
            if let Some(known) = PLAN_KEYS.iter().find(|known| **known == key) {
                if !plan_keys.insert(*known) {
                    return Err(A::Error::custom(format!("{key} stands twice")));
                }
                match *known {
                    "version" => {
                        let version: u64 = map.next_value()?;
                        if version != 1 {
                            return Err(A::Error::custom(format!("version = {version}: allowed is 1")));
                        }
                    }
                    "recoverable" => {
                        if !map.next_value::<bool>()? {
                            return Err(A::Error::custom(
                                "recoverable = false: a plan that cannot be carried out tells not what is held",
                            ));
                        }
                    }
                    "groups" => {
                        seats = Some(map.next_value_seed(Groups {
                            job,
                            shared: &mut shared,
                            holdings: &mut holdings,
                        })?)
                    }
                    _ => {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
            } else {
                let place: Place = key.parse().map_err(A::Error::custom)?;
                job.expect_place(place).map_err(A::Error::custom)?;
                if !named.insert(place) {
                    return Err(A::Error::custom(format!("{place} stands twice")));
                }
                let (step, units) = map.next_value_seed(OfPlace { job, place })?;
                let holding = Holding { step, units: shared.share(units) };
                if !holding.is_empty() {
                    holdings.insert(place, holding);
                }
            }
        }
        if plan_keys.is_empty() {
            return Ok(HoldingsFile { holdings, seats: None });
        }
        let both =
            named.first().map(|place| format!("{place} stands beside the keys of a plan: write one form"));
        let missing = ["version", "recoverable", "groups"].into_iter().find(|key| !plan_keys.contains(key));
        let missing = missing.map(|key| format!("missing key `{key}` of a plan"));
        match both.or(missing) {
            Some(problem) => Err(A::Error::custom(problem)),
            None => Ok(HoldingsFile { holdings, seats }),
        }
    }
}

/// `{"step": 7, "units": {...}}`
struct OfPlace<'a> {
    job: &'a JobSpec,
    place: Place,
}

impl<'de> DeserializeSeed<'de> for OfPlace<'_> {
    type Value = (Step, BTreeMap<Axis, Units>);

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for OfPlace<'_> {
    type Value = (Step, BTreeMap<Axis, Units>);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with `step` and `units` at {}", self.place)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let place = self.place;
        let wrong = |problem: String| A::Error::custom(format!("{place}: {problem}"));
        let (mut step, mut units) = (None, None);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "step" if step.is_none() => step = Some(map.next_value()?),
                "units" if units.is_none() => {
                    units = Some(map.next_value_seed(OfAxes { job: self.job, place })?);
                }
                "step" | "units" => return Err(wrong(format!("{key} stands twice"))),
                _ => return Err(wrong(format!("unknown key `{key}`, allowed are `step`, `units`"))),
            }
        }
        let step = step.ok_or_else(|| wrong("missing key `step`".into()))?;
        Ok((step, units.ok_or_else(|| wrong("missing key `units`".into()))?))
    }
}

/// `{"attn/0": [[0, 3]], ...}`
struct OfAxes<'a> {
    job: &'a JobSpec,
    place: Place,
}

impl<'de> DeserializeSeed<'de> for OfAxes<'_> {
    type Value = BTreeMap<Axis, Units>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for OfAxes<'_> {
    type Value = BTreeMap<Axis, Units>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object of axes at {}.units", self.place)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let wrong = |problem: String| A::Error::custom(format!("{}.units: {problem}", self.place));
        let mut held = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let axis: Axis = key.parse().map_err(|bad| wrong(format!("{bad}")))?;
            self.job.expect_axis(self.place.stage, axis).map_err(wrong)?;
            let intervals: Vec<(u32, u32)> =
                map.next_value().map_err(|error| wrong(format!("{axis}: {error}")))?;
            let units = self.job.expect_units(axis.family, &intervals);
            let units = units.map_err(|problem| wrong(format!("{axis}: {problem}")))?;
            if held.insert(axis, units).is_some() {
                return Err(wrong(format!("{axis} stands twice")));
            }
        }
        held.retain(|_, units| !units.is_empty());
        Ok(held)
    }
}

/// The `groups` of a plan: fills `holdings` and gives the seats.
struct Groups<'a> {
    job: &'a JobSpec,
    shared: &'a mut Shared,
    holdings: &'a mut BTreeMap<Place, Holding>,
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
        let parallel = &self.job.parallel;
        let mut seats = BTreeMap::new();
        let mut gpus = BTreeSet::new();
        while let Some(group) = seq.next_element::<PlannedGroup>()? {
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
        let places = u64::from(parallel.data) * u64::from(parallel.pipeline) * u64::from(parallel.tensor);
        if seats.len() as u64 != places {
            let (stages, data) = (parallel.pipeline, parallel.data);
            return Err(A::Error::custom(format!(
                "groups are missing: the job has {data} replicas of {stages} stages, each needs its group"
            )));
        }
        Ok(seats)
    }
}

#[derive(Deserialize)]
struct PlannedGroup {
    replica: ReplicaId,
    stage: StageId,
    slots: Vec<PlannedSlot>,
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
