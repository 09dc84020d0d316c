//! The holdings file of `reknit plan`: what every GPU of a job holds.
//!
//! It is a JSON object in one of two forms. Either its keys are places, and a place that is not named holds nothing:
//! `{"0.0.0": {"step": 7, "units": {"attn/0": [[0, 3]], "ffn/0": [[0, 12]], "vocab": [[0, 4]]}}}`. Or it is what
//! `reknit plan --format json` printed: then every active slot holds what that plan gave it, on the GPU it named.
//!
//! Everything is checked while it is read, so that errors can tell the line and nothing impossible is kept.

mod planned;

use crate::{Axis, Family, GpuId, Holding, JobSpec, Place, StageId, Step, Units};
use planned::Groups;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
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
            None => self.is_first(stage) || self.is_last(stage),
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
                                "recoverable = false: a plan that cannot be carried out does not tell what is held",
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
