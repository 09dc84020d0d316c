//! What a layout will cost: the time of a step and the throughput, against the nominal layout.
//!
//! A sample at a stage takes as long as its slots wait for each other: attention and FFN of every layer, and the
//! vocabulary, each wait for the slot that owns most of them. So it is the sum over axes of the largest number of
//! units of a slot times the parameters of a unit, over the performance of the slots' power. The slowest stage sets
//! the pace of a replica, and the slowest replica that of the step ([`crate::batch`]).

use crate::batch::Apportionment;
use crate::job::{BatchPolicy, ModelSpec};
use crate::power::{self, Target};
use crate::{Family, Group, JobSpec, Partitions, Place, StageId, Topology, Units};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// How fast a layout will train, relative to the nominal layout of the same job (every slot active, nominal power).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    pub step_time_ratio: f64,
    /// Samples per second.
    pub throughput_ratio: f64,
    /// The power of each GPU that shall draw more than its nominal power, relative to that.
    pub power: BTreeMap<Place, f64>,
}

impl ModelSpec {
    /// The work of a sample that a group of `degree` balanced slots waits for, in parameters. `degree` is not 0.
    pub fn slowest_work(&self, degree: u32) -> u64 {
        let axes = self.axes().into_iter().map(|axis| axis.family);
        work(axes.map(|family| (family, self.units(family).div_ceil(degree))), |family| {
            self.unit_params(family)
        })
    }
}

/// The work that slots wait for, in parameters: `most` is the largest number of units that a slot owns of an axis.
fn work(axes: impl Iterator<Item = (Family, u32)>, unit_params: impl Fn(Family) -> u64) -> u64 {
    axes.map(|(family, most)| u64::from(most) * unit_params(family)).sum()
}

/// The work of a sample at a stage of the nominal layout.
fn nominal_work(job: &JobSpec, stage: StageId) -> u64 {
    let axes = job.stage_axes(stage).into_iter().map(|axis| axis.family);
    let most = |family| job.model.units(family).div_ceil(job.parallel.tensor);
    work(axes.map(|family| (family, most(family))), |family| job.unit_params(stage, family))
}

/// The work of a sample in each group; 0 where it does not train. Counted once for groups that are split alike.
fn group_works(job: &JobSpec, groups: &[Group]) -> Vec<u64> {
    let mut known: HashMap<(*const Partitions, StageId), u64> = HashMap::new();
    let of = |group: &Group| {
        let most = |sets: &Vec<Units>| sets.iter().map(Units::len).max().unwrap_or(0);
        let axes = group.partitions.iter().map(|(axis, sets)| (axis.family, most(sets)));
        work(axes, |family| job.unit_params(group.stage, family))
    };
    let key = |group: &Group| (Arc::as_ptr(&group.partitions), group.stage);
    groups.iter().map(|group| *known.entry(key(group)).or_insert_with(|| of(group))).collect()
}

/// The batch of each replica, and how fast the groups will train with it. The groups are those of a whole layout,
/// in its order.
pub(crate) fn predict(job: &JobSpec, topology: &Topology, groups: &[Group]) -> (Vec<u32>, Predicted) {
    let stages = job.parallel.pipeline as usize;
    let nominal = job.stages().map(|stage| nominal_work(job, stage)).max().unwrap_or(0) as f64;
    let times: Vec<f64> = group_works(job, groups).into_iter().map(|work| work as f64).collect();
    let targets = if job.recovery.power_boost {
        power::targets(topology, groups, stages, &times, nominal)
    } else {
        times.into_iter().map(Target::nominal).collect()
    };
    let pace = |targets: &[Target]| targets.iter().map(|target| target.time).fold(0.0, f64::max);
    let paces: Vec<f64> = targets.chunks(stages).map(pace).collect();

    let rule = Apportionment::new(job);
    let full = vec![nominal; paces.len()];
    let full_batch = rule.all_samples(&full);
    let batch = match job.batch.policy {
        BatchPolicy::KeepGlobal => rule.all_samples(&paces),
        BatchPolicy::Shrink => rule.in_nominal_time(&paces, nominal),
    };
    let step_time_ratio = rule.step_time(&batch, &paces) / rule.step_time(&full_batch, &full);
    let samples = |batch: &[u32]| batch.iter().map(|share| u64::from(*share)).sum::<u64>() as f64;
    let throughput_ratio = samples(&batch) / samples(&full_batch) / step_time_ratio;
    (batch, Predicted { step_time_ratio, throughput_ratio, power: boosted(groups, &targets) })
}

/// The places that draw more than their nominal power.
fn boosted(groups: &[Group], targets: &[Target]) -> BTreeMap<Place, f64> {
    let boosted = groups.iter().zip(targets).filter(|(_, target)| target.power > 1.0);
    let places = boosted.flat_map(|(group, target)| group.members().map(|(place, _)| (place, target.power)));
    places.collect()
}
