//! More power for the GPUs of reduced groups, within what their domains may draw.
//!
//! **Model** (arXiv 2504.06095): performance per watt falls by 2.8% at 1.1 times the nominal power and by 6.5% at
//! 1.2 times, in straight lines from 1.0 through these points and on. Performance is power times that: 1.069 and
//! 1.122 there.
//!
//! **Targets.** All slots of a group get the same power: the least that brings its time of a sample to that of the
//! slowest nominal stage, or, where another group holds its replica back, to that group's. Where a domain cannot
//! feed all its groups they end at the same relative time, the lowest that it can. Only slots that train draw on
//! the budget, the nominal power each: what lost and idle GPUs leave is for the others.

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

/// Targets of all groups. `times` are those of a sample at the nominal power, 0 for a group that does not train;
/// `nominal` is that of the slowest stage where nothing is lost; groups stand `stages` to a replica.
pub(crate) fn targets(
    topology: &Topology,
    groups: &[Group],
    stages: usize,
    times: &[f64],
    nominal: f64,
) -> Vec<Target> {
    let mut targets: Vec<Target> = times.iter().copied().map(Target::nominal).collect();
    // What each replica can reach at best.
    let most = performance(topology.power_limit);
    let goal = |times: &[f64]| times.iter().map(|time| time / most).fold(nominal, f64::max);
    let goals: Vec<f64> = times.chunks(stages).map(goal).collect();
    let over = |group: usize| times[group] / goals[group / stages];
    let slow: Vec<usize> = (0..groups.len()).filter(|&group| over(group) > 1.0).collect();

    for (left, fed) in supplies(topology, groups, &slow) {
        let power = |group: usize, level: f64| power_for(over(group) / level);
        let more = |level: f64| {
            let of = |&group: &usize| f64::from(groups[group].degree()) * (power(group, level) - 1.0);
            fed.iter().map(of).sum::<f64>()
        };
        let slowest = fed.iter().map(|&group| over(group)).fold(1.0, f64::max);
        let level = lowest(1.0, slowest, |level| more(level) <= left);
        for &group in &fed {
            let time = times[group].min(goals[group / stages] * level);
            targets[group] = Target { power: power(group, level).min(topology.power_limit), time };
        }
    }
    for (targets, times) in targets.chunks_mut(stages).zip(times.chunks(stages)) {
        let pace = targets.iter().map(|target| target.time).fold(0.0, f64::max);
        for (target, time) in targets.iter_mut().zip(times) {
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

/// What is left to draw in each domain that has some of these groups, and which they are. A group that is nobody
/// knows where is a domain of its own with the budget of its nominal slots; one whose members are not together gets
/// nothing, since no one domain could answer for it.
fn supplies(topology: &Topology, groups: &[Group], slow: &[usize]) -> Vec<(f64, Vec<usize>)> {
    if slow.is_empty() {
        return Vec::new();
    }
    let mut supplies = Vec::new();
    let mut known: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for &group in slow {
        let members = groups[group].slots.iter().flatten();
        let mut domains = members.map(|member| topology.domain_of(&member.worker.gpu));
        let first = domains.next().flatten();
        if domains.all(|domain| domain == first) {
            match first {
                Some(domain) => known.entry(domain).or_default().push(group),
                None => {
                    let idle = groups[group].slots.iter().filter(|slot| slot.is_none()).count();
                    supplies.push((idle as f64, vec![group]));
                }
            }
        }
    }
    let mut drawn = vec![0.0; topology.domains().len()];
    for member in groups.iter().flat_map(|group| group.slots.iter().flatten()) {
        if let Some(domain) = topology.domain_of(&member.worker.gpu) {
            drawn[domain] += 1.0;
        }
    }
    let of = |(domain, fed)| (budget(&topology.domains()[domain]) - drawn[domain], fed);
    supplies.extend(known.into_iter().map(of));
    supplies.retain(|(left, _)| *left >= LEAST);
    supplies
}

/// What the domain's GPUs may draw together, in nominal GPU powers.
fn budget(domain: &Domain) -> f64 {
    domain.power_budget.unwrap_or_else(|| domain.gpus().count() as f64)
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
