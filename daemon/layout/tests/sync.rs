//! How much gradients travel to the hosts of their columns, against the least over every choice.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Cluster, job};
use proptest::prelude::*;
use reknit_layout::*;

/// The least that travels over every way to give columns hosts. For given hosts each unit is best in the column in which
/// most replicas own it at the host, so this also allows columns of any size.
fn least(layout: &Layout, job: &JobSpec) -> u64 {
    let groups: Vec<&Group> = layout.groups.iter().filter(|group| group.degree() > 0).collect();
    let columns = groups.iter().map(|group| group.degree()).min().unwrap() as usize;
    let choices: Vec<Vec<Vec<Slot>>> =
        groups.iter().map(|group| arrangements(&group.active(), columns)).collect();
    let mut least = u64::MAX;
    // The columns are nameless: the first replica's hosts need no other order, only another choice.
    let mut first: Vec<Vec<Slot>> = choices[0].clone();
    first.retain(|hosts| hosts.is_sorted());
    for hosts in &first {
        best(&groups, &choices[1..], &mut vec![hosts.clone()], job, &mut least);
    }
    least * job.model.dtype.gradient_bytes()
}

fn best(
    groups: &[&Group],
    rest: &[Vec<Vec<Slot>>],
    hosts: &mut Vec<Vec<Slot>>,
    job: &JobSpec,
    least: &mut u64,
) {
    let Some((choices, rest)) = rest.split_first() else {
        let mut travel = 0;
        for axis in groups[0].partitions.keys() {
            for unit in 0..job.model.units(axis.family) {
                let owns = |group: &Group, slot: Slot| group.partitions[axis][slot.0 as usize].contains(unit);
                let stays = |column: usize| {
                    groups.iter().zip(&*hosts).filter(|(group, hosts)| owns(group, hosts[column])).count()
                };
                let most = (0..hosts[0].len()).map(stays).max().unwrap();
                travel += (groups.len() - most) as u64 * job.unit_params(StageId(0), axis.family);
            }
        }
        *least = travel.min(*least);
        return;
    };
    for choice in choices {
        hosts.push(choice.clone());
        best(groups, rest, hosts, job, least);
        hosts.pop();
    }
}

/// Unit by unit: the owner sends the gradient to the host of its column, which sends it back.
fn busiest(layout: &Layout, job: &JobSpec) -> u64 {
    let mut sent: std::collections::BTreeMap<Place, u64> = Default::default();
    for group in layout.groups.iter().filter(|group| group.degree() > 0) {
        for axis in &layout.sync[0].axes {
            let bytes = job.unit_params(StageId(0), axis.axis.family) * job.model.dtype.gradient_bytes();
            for unit in 0..job.model.units(axis.axis.family) {
                let with = |sets: &[Units]| sets.iter().position(|units| units.contains(unit)).unwrap();
                let owner = Slot(with(&group.partitions[&axis.axis]) as u32);
                let host = layout.sync[0].hosts[group.replica.0 as usize][with(&axis.columns)];
                for slot in [owner, host].into_iter().filter(|_| owner != host) {
                    let place = group.place(slot);
                    *sent.entry(place).or_default() += bytes;
                }
            }
        }
    }
    sent.into_values().max().unwrap_or(0)
}

fn arrangements(slots: &[Slot], count: usize) -> Vec<Vec<Slot>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for rest in arrangements(slots, count - 1) {
        for slot in slots.iter().filter(|slot| !rest.contains(slot)) {
            all.push(rest.iter().chain([slot]).copied().collect());
        }
    }
    all
}

proptest! {
    #![proptest_config(common::cases(2000))]

    /// Seen over 20,000 cases: the least but for 38, at most 7.6% more in one, 0.014% more in all.
    #[test]
    fn no_more_than_a_tenth_above_the_least(
        (data, tensor) in (2..=3_u32, 2..=4_u32),
        more in (0..6_u32, 0..6_u32),
        lost in prop::collection::vec(any::<prop::sample::Index>(), 1..4),
    ) {
        let mut spec = job(data, tensor, tensor + more.0, tensor + more.1, 8);
        spec.model.layers = 2;
        let mut cluster = Cluster::start(spec);
        for at in lost {
            let places: Vec<Place> = cluster.members.keys().copied().collect();
            cluster.lose(*at.get(&places));
            if cluster.replan().is_err() {
                return Ok(());
            }
        }
        let layout = &cluster.plan.layout;
        let (found, least) = (layout.handover_bytes(&cluster.job), least(layout, &cluster.job));
        prop_assert!(found * 10 <= least * 11, "{found} bytes travel, least {least}");
        prop_assert_eq!(layout.busiest_handover_bytes(&cluster.job), busiest(layout, &cluster.job));
    }
}
