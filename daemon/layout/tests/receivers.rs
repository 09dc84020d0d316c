//! How much the most loaded receiver of a reduced group gets, against the least over every balanced way to give the lost units.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Cluster, job};
use proptest::prelude::*;
use reknit_layout::*;
use std::collections::BTreeMap;

/// The least that the most loaded of `slots` receives. `axes`: bytes of a unit, and of each slot what it lacks at the
/// smaller size; then how many more are given, one to a slot, and who may take one.
fn least(axes: &[(u64, Vec<u32>, u32, Vec<bool>)], received: &mut Vec<u64>) -> u64 {
    let Some(((unit, lacks, more, free), rest)) = axes.split_first() else {
        return received.iter().copied().max().unwrap();
    };
    let slots = received.len();
    let mut best = u64::MAX;
    for taken in 0..1_u32 << slots {
        let takes = |slot: usize| taken >> slot & 1 == 1;
        if taken.count_ones() != *more || (0..slots).any(|slot| takes(slot) && !free[slot]) {
            continue;
        }
        let add: Vec<u64> =
            (0..slots).map(|slot| (u64::from(lacks[slot]) + u64::from(takes(slot))) * unit).collect();
        received.iter_mut().zip(&add).for_each(|(sum, add)| *sum += add);
        best = best.min(least(rest, received));
        received.iter_mut().zip(&add).for_each(|(sum, add)| *sum -= add);
    }
    best
}

proptest! {
    #![proptest_config(common::cases(2000))]

    /// Seen over 2,000 cases: the least in nine of ten but for 3%, at most 11% more in 99 of 100, 43% in one. These have one or
    /// two layers: with more the extra units even out.
    #[test]
    fn no_more_than_half_above_the_least(
        (tensor, layers) in (2..=5_u32, 1..=2_u32),
        more in (0..9_u32, 0..9_u32, 0..9_u32),
        at in any::<prop::sample::Index>(),
    ) {
        let mut spec = job(2, tensor, tensor + more.0, tensor + more.1, 8 + more.2);
        spec.model.layers = layers;
        let mut cluster = Cluster::start(spec);
        let before = cluster.plan.layout.groups[0].partitions.clone();
        let lost = at.index(tensor as usize) as u32;
        cluster.lose(Place::new(0, 0, lost));
        cluster.replan().unwrap();
        let mut received: BTreeMap<&WorkerKey, u64> = BTreeMap::new();
        for transfer in &cluster.plan.transfers {
            *received.entry(&transfer.to).or_default() += transfer.bytes;
        }
        let found = received.values().copied().max().unwrap_or(0);
        let degree = tensor - 1;
        let axes: Vec<_> = before.iter().map(|(axis, sets)| {
            let units = cluster.job.model.units(axis.family);
            let (size, extras) = (units / degree, units % degree);
            let held: Vec<u32> = (0..tensor).filter(|slot| *slot != lost).map(|slot| sets[slot as usize].len()).collect();
            let keepers = held.iter().filter(|held| **held > size).count() as u32;
            let lacks = held.iter().map(|held| size.saturating_sub(*held)).collect();
            let free = held.iter().map(|held| *held <= size).collect();
            (cluster.job.unit_bytes(StageId(0), axis.family), lacks, extras - keepers, free)
        }).collect();
        let best = least(&axes, &mut vec![0; degree as usize]);
        prop_assert!(best <= found && found * 2 <= best * 3, "{found} bytes received, least {best}");
    }
}
