//! More power for the GPUs of reduced groups, within what their domains may draw.
//!
//! **Model** (arXiv 2504.06095): performance per watt falls by 2.8% at 1.1 times the nominal power and by 6.5% at 1.2 times, in straight
//! lines from 1.0 through these points and on. Performance is power times that: 1.069 and 1.122 there.
//!
//! **Targets.** All slots of a group get the same power: the least that brings its time of a sample to that of the slowest nominal stage,
//! or, where another group holds its replica back, to that group's. Where a domain cannot feed all its groups they end at the same
//! relative time, the lowest that it can. Only slots that train draw on the budget, the nominal power each: what lost and idle GPUs leave is for
//! the others.

use crate::topology::Domain;
use crate::{Group, Topology};
use std::collections::BTreeMap;

/// The first of the published points: relative power, and performance per watt there.
const NEAR: (f64, f64) = (1.1, 1.0 - 0.028);
const FAR: (f64, f64) = (1.2, 1.0 - 0.065);
/// How fast performance per watt falls up to the first point, and from there.
const FALL: f64 = (1.0 - NEAR.1) / (NEAR.0 - 1.0);
const STEEP_FALL: f64 = (NEAR.1 - FAR.1) / (FAR.0 - NEAR.0);

/// Less than this, in nominal GPU powers, is not worth an order.
const LEAST: f64 = 1e-3;

/// Relative performance at a power of 1.0 or more.
pub fn performance(power: f64) -> f64 {
    let (from, at, fall) = if power <= NEAR.0 { (1.0, 1.0, FALL) } else { (NEAR.0, NEAR.1, STEEP_FALL) };
    power * (at - fall * (power - from))
}

/// The least power with this performance, from 1.0; that with the most performance where there is none.
pub fn power_for(performance: f64) -> f64 {
    if performance <= 1.0 {
        return 1.0;
    }
    let near = performance <= NEAR.0 * NEAR.1;
    let (from, at, fall) = if near { (1.0, 1.0, FALL) } else { (NEAR.0, NEAR.1, STEEP_FALL) };
    // The smaller root of fall * power^2 - slope * power + performance = 0; without one, the top of the curve.
    let slope = at + fall * from;
    (slope - (slope * slope - 4.0 * fall * performance).max(0.0).sqrt()) / (2.0 * fall)
}

/// What a group runs at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Target {
    /// Of each of its slots, relative to the nominal power.
    pub(crate) power: f64,
    /// Of a sample, at that power.
    pub(crate) time: f64,
}

impl Target {
    /// A group at the nominal power.
    pub(crate) fn nominal(time: f64) -> Self {
        Self { power: 1.0, time }
    }
}

/// What groups draw from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    /// The domain at this index of the topology.
    Domain(usize),
    /// A domain of its own: it is not known where the group is.
    Own(usize),
}

/// Targets of all groups. `times` are those of a sample at the nominal power, 0 for a group that does not train; `nominal` is that
/// of the slowest stage where nothing is lost; groups stand `stages` to a replica.
pub(crate) fn targets(
    topology: &Topology,
    groups: &[Group],
    stages: usize,
    times: &[f64],
    nominal: f64,
) -> Vec<Target> {
    let mut targets: Vec<Target> = times.iter().copied().map(Target::nominal).collect();
    let limit = topology.power_limit;
    let within_limit = performance(limit);
    // What each replica can reach at best.
    let goals: Vec<f64> = times
        .chunks(stages)
        .map(|times| times.iter().map(|time| time / within_limit).fold(nominal, f64::max))
        .collect();
    let slow: Vec<usize> = (0..groups.len()).filter(|&group| times[group] > goals[group / stages]).collect();
    if slow.is_empty() {
        return targets;
    }
    let drawn = drawn(topology, groups);
    let mut fed: BTreeMap<Source, Vec<usize>> = BTreeMap::new();
    for &group in &slow {
        if let Some(source) = source(topology, groups, group) {
            fed.entry(source).or_default().push(group);
        }
    }
    for (source, fed) in fed {
        let left = match source {
            Source::Domain(domain) => budget(&topology.domains()[domain]) - f64::from(drawn[domain]),
            Source::Own(group) => f64::from(groups[group].slots.len() as u32 - groups[group].degree()),
        };
        if left < LEAST {
            continue;
        }
        let need = |group: usize, level: f64| power_for(times[group] / (goals[group / stages] * level));
        let more = |level: f64| {
            let of = |&group: &usize| f64::from(groups[group].degree()) * (need(group, level) - 1.0);
            fed.iter().map(of).sum::<f64>()
        };
        let level = lowest(
            1.0,
            fed.iter().map(|&group| times[group] / goals[group / stages]).fold(1.0, f64::max),
            |level| more(level) <= left,
        );
        for &group in &fed {
            let time = times[group].min(goals[group / stages] * level);
            targets[group] = Target { power: need(group, level).min(limit), time };
        }
    }
    for (replica, targets) in targets.chunks_mut(stages).enumerate() {
        let pace = targets.iter().map(|target| target.time).fold(0.0, f64::max);
        for (target, time) in targets.iter_mut().zip(&times[replica * stages..]) {
            if target.power > 1.0 && target.time < pace {
                *target = Target { power: power_for(time / pace), time: time.min(pace) };
            }
        }
    }
    targets
}

/// The lowest level from `low` to `high` that can be had, to the last bits; `high` can.
fn lowest(mut low: f64, mut high: f64, can: impl Fn(f64) -> bool) -> f64 {
    if can(low) {
        return low;
    }
    for _ in 0..f64::MANTISSA_DIGITS {
        let middle = low + (high - low) / 2.0;
        if can(middle) { high = middle } else { low = middle }
    }
    high
}

/// What the domain's GPUs may draw together, in nominal GPU powers.
fn budget(domain: &Domain) -> f64 {
    domain.power_budget.unwrap_or_else(|| domain.gpus().count() as f64)
}

/// Slots that train, by domain.
fn drawn(topology: &Topology, groups: &[Group]) -> Vec<u32> {
    let mut drawn = vec![0; topology.domains().len()];
    for member in groups.iter().flat_map(|group| group.slots.iter().flatten()) {
        if let Some(domain) = topology.domain_of(&member.worker.gpu) {
            drawn[domain] += 1;
        }
    }
    drawn
}

/// Where the group's power comes from; `None` where its members are not together, so that no one domain can answer for them.
fn source(topology: &Topology, groups: &[Group], group: usize) -> Option<Source> {
    let mut domains =
        groups[group].slots.iter().flatten().map(|member| topology.domain_of(&member.worker.gpu));
    let first = domains.next()?;
    let together = domains.all(|domain| domain == first);
    together.then(|| first.map_or(Source::Own(group), Source::Domain))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn published_points() {
        assert_eq!(performance(1.0), 1.0);
        assert!((performance(1.1) - 1.0692).abs() < 1e-12);
        assert!((performance(1.2) - 1.122).abs() < 1e-12);
        assert!((performance(1.3) - 1.3 * 0.898).abs() < 1e-12);
        assert_eq!(power_for(0.5), 1.0);
        // Beyond the top of the curve there is nothing to gain.
        let top = power_for(f64::INFINITY);
        assert!(performance(top) > performance(top - 0.01) && performance(top) > performance(top + 0.01));
    }

    proptest! {
        #[test]
        fn power_for_is_the_inverse(power in 1.0..1.8_f64) {
            prop_assert!((power_for(performance(power)) - power).abs() < 1e-9);
            prop_assert!(performance(power) <= performance(power + 0.01));
        }
    }
}
