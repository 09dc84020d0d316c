//! Random jobs, losses, returns, drains, moves and reshards that stop half-way, with the linter as oracle.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Cluster, cases, job};
use proptest::prelude::*;
use reknit_layout::*;

#[derive(Debug, Clone)]
enum Change {
    Lose(prop::sample::Index),
    Drain(prop::sample::Index),
    Restore(prop::sample::Index),
    /// Two members change places.
    Swap(prop::sample::Index, prop::sample::Index),
    /// One is lost and part of the reshard that follows is carried out.
    HalfWay(prop::sample::Index, usize),
}

fn change() -> impl Strategy<Value = Change> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => index().prop_map(Change::Lose),
        1 => index().prop_map(Change::Drain),
        4 => index().prop_map(Change::Restore),
        1 => (index(), index()).prop_map(|(a, b)| Change::Swap(a, b)),
        2 => (index(), 0..30_usize).prop_map(|(at, transfers)| Change::HalfWay(at, transfers)),
    ]
}

fn any_job() -> impl Strategy<Value = JobSpec> {
    jobs(1)
}

/// Jobs that outlive the loss of one slot.
fn reducible_job() -> impl Strategy<Value = JobSpec> {
    jobs(2).prop_map(|mut job| {
        job.parallel.min_tensor = job.parallel.min_tensor.min(job.parallel.tensor - 1);
        job
    })
}

fn jobs(least: u32) -> impl Strategy<Value = JobSpec> {
    let shape = (least..=4, least..=8, 1..=2_u32, any::<bool>());
    shape.prop_flat_map(|(data, tensor, pipeline, shrink)| {
        let units = || tensor..=tensor * 4 + 3;
        (units(), units(), units(), 1..=tensor).prop_map(move |(heads, ffn, vocab, least)| {
            let mut job = job(data, tensor, heads, ffn, vocab.max(8));
            job.parallel.pipeline = pipeline;
            job.parallel.min_tensor = least;
            if shrink {
                job.batch.policy = job::BatchPolicy::Shrink;
            }
            job
        })
    })
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn any_sequence_keeps_the_rules(
        job in any_job(),
        domains in 0..4_usize,
        changes in prop::collection::vec(change(), 1..12),
    ) {
        let mut cluster = Cluster::start(job);
        cluster.settle(domains);
        for change in &changes {
            let places: Vec<Place> = cluster.members.keys().copied().collect();
            let parallel = &cluster.job.parallel;
            let free: Vec<Place> = (0..parallel.data)
                .flat_map(|r| (0..parallel.pipeline).map(move |s| (r, s)))
                .flat_map(|(r, s)| (0..parallel.tensor).map(move |t| Place::new(r, s, t)))
                .filter(|place| !cluster.members.contains_key(place))
                .collect();
            match change {
                Change::Lose(at) if !places.is_empty() => cluster.lose(*at.get(&places)),
                Change::Drain(at) if !places.is_empty() => cluster.drain(*at.get(&places)),
                Change::Restore(at) if !free.is_empty() => cluster.restore(*at.get(&free)),
                Change::Swap(a, b) if !places.is_empty() => {
                    let (a, b) = (*a.get(&places), *b.get(&places));
                    let (at_a, at_b) = (cluster.members[&a].clone(), cluster.members[&b].clone());
                    cluster.members.insert(a, at_b);
                    cluster.members.insert(b, at_a);
                }
                Change::HalfWay(at, transfers) if !places.is_empty() => {
                    cluster.lose(*at.get(&places));
                    cluster.stop_half_way(*transfers);
                }
                Change::Lose(_) | Change::Drain(_) | Change::Restore(_) | Change::Swap(..) | Change::HalfWay(..) => {}
            }
            let request_before = (cluster.members.clone(), cluster.holdings.clone());
            match plan(&cluster.request(&cluster.workers())) {
                Ok(plan) => {
                    // The bound is of the state before the plan is carried out.
                    let layout_before = std::mem::replace(&mut cluster.plan, plan.clone());
                    let (bound, above) = cluster.bytes_to_move();
                    cluster.plan = layout_before;
                    prop_assert_eq!(plan.bytes_moved, bound + above);
                    prop_assert!(cluster.whole_groups_are_nominal(&plan.layout));
                    prop_assert_eq!(plan.bytes_lower_bound, bound);
                    cluster.replan().unwrap();
                }
                Err(PlanError::Unrecoverable(missing)) => {
                    let newest = cluster.newest();
                    for (axis, units) in &missing {
                        // With stages, rows held for the embedding are no source of the head.
                        if axis.layer.is_some() || cluster.job.parallel.pipeline == 1 {
                            let live = request_before.1.values().filter(|holding| holding.step == newest);
                            for holding in live {
                                prop_assert!(holding.of(*axis).intersection(units).is_empty());
                            }
                        }
                    }
                    return Ok(());
                }
                Err(PlanError::Draft(DraftError::TooFew { needed, found })) => {
                    prop_assert!(found < needed);
                    return Ok(());
                }
                // No limit is known.
                Err(error @ PlanError::Draft(DraftError::Memory { .. })) => prop_assert!(false, "{error}"),
            }
        }
    }

    /// old -> new -> old is the identity on ownership, whatever the sizes.
    #[test]
    fn loss_and_return_is_the_identity(job in reducible_job(), at in any::<prop::sample::Index>()) {
        let mut cluster = Cluster::start(job);
        let nominal = cluster.plan.layout.groups.clone();
        let places: Vec<Place> = cluster.members.keys().copied().collect();
        let place = *at.get(&places);
        cluster.lose(place);
        cluster.replan().unwrap();
        cluster.restore(place);
        cluster.replan().unwrap();
        for (before, after) in nominal.iter().zip(&cluster.plan.layout.groups) {
            prop_assert_eq!(&before.partitions, &after.partitions);
        }
        prop_assert_eq!(cluster.plan.layout.handover_bytes(&cluster.job), 0);
    }

    /// With one reduced replica nothing travels in it, and elsewhere no more than what its missing slots owned.
    #[test]
    fn one_loss_hands_over_only_the_extra_slot(job in reducible_job(), at in any::<prop::sample::Index>()) {
        let mut cluster = Cluster::start(job);
        let nominal = cluster.plan.layout.groups.clone();
        let places: Vec<Place> = cluster.members.keys().copied().collect();
        let place = *at.get(&places);
        cluster.lose(place);
        cluster.replan().unwrap();
        let others = u64::from(cluster.job.parallel.data - 1);
        let group = nominal.iter().find(|group| (group.replica, group.stage) == (place.replica, place.stage)).unwrap();
        let owned = group.owned(place.slot);
        let params: u64 = owned
            .iter()
            .map(|(axis, units)| u64::from(units.len()) * cluster.job.unit_params(place.stage, axis.family))
            .sum();
        prop_assert!(cluster.plan.layout.handover_bytes(&cluster.job) <= 4 * others * params);
    }
}
