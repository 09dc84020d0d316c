//! How many samples of a step each replica takes.
//!
//! The time a replica needs for a sample is taken as proportional to the work of its slowest slots: attention and FFN
//! of every layer each wait for the slot that has most units, `cost = sum over axes of max over slots of units *
//! parameters of a unit`, and the slowest stage sets the pace.

use crate::job::BatchPolicy;
use crate::{Group, JobSpec, Units};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Samples of each replica; 0 for one that does not train.
pub(super) fn batch(job: &JobSpec, groups: &[Group]) -> Vec<u32> {
    let replicas: Vec<&[Group]> = groups.chunks(job.parallel.pipeline as usize).collect();
    match job.batch.policy {
        BatchPolicy::KeepGlobal => {
            let costs: Vec<u64> = replicas.iter().map(|stages| cost(job, stages)).collect();
            apportion(job.batch.global, &costs)
        }
        BatchPolicy::Shrink => {
            let nominal = apportion(job.batch.global, &vec![1; replicas.len()]);
            let shrunk = replicas.iter().zip(nominal).map(|(stages, share)| {
                let degree = stages.iter().map(Group::degree).min().unwrap_or(0);
                let scaled = u64::from(share) * u64::from(degree) / u64::from(job.parallel.tensor);
                (scaled as u32).max(u32::from(degree > 0))
            });
            shrunk.collect()
        }
    }
}

/// The cost of one sample at the slowest stage; 0 for a replica that does not train.
fn cost(job: &JobSpec, stages: &[Group]) -> u64 {
    let stage_cost = |group: &Group| {
        let axes = group.partitions.iter().map(|(axis, sets)| {
            let most = sets.iter().map(Units::len).max().unwrap_or(0);
            u64::from(most) * job.unit_params(group.stage, axis.family)
        });
        axes.sum()
    };
    stages.iter().map(stage_cost).max().unwrap_or(0)
}

/// Splits `samples` so that the largest `share * cost` is as small as it can be, at least one sample to each
/// replica with a cost. Each sample goes to the replica that would be done with it first; ties to the lower number.
/// Greedy is optimal here: samples are alike.
fn apportion(samples: u32, costs: &[u64]) -> Vec<u32> {
    let mut shares: Vec<u32> = costs.iter().map(|cost| u32::from(*cost > 0)).collect();
    let done_at = |share: u32, replica: usize| (u128::from(share) + 1) * u128::from(costs[replica]);
    let training = (0..costs.len()).filter(|&replica| costs[replica] > 0);
    let mut queue: BinaryHeap<_> = training.map(|replica| Reverse((done_at(1, replica), replica))).collect();
    let given: u32 = shares.iter().sum();
    for _ in given..samples {
        if let Some(Reverse((_, replica))) = queue.pop() {
            shares[replica] += 1;
            queue.push(Reverse((done_at(shares[replica], replica), replica)));
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The smallest makespan over every way to split the samples with at least one each.
    fn best(samples: u32, costs: &[u64]) -> u64 {
        match costs {
            [] => unreachable!("at least one replica"),
            [cost] => u64::from(samples) * cost,
            [cost, rest @ ..] => {
                let shares = 1..=samples - rest.len() as u32;
                let makespan = |share: u32| (u64::from(share) * cost).max(best(samples - share, rest));
                shares.map(makespan).min().unwrap()
            }
        }
    }

    proptest! {
        #[test]
        fn apportioning_is_optimal(
            (samples, costs) in prop::collection::vec(1..20_u64, 1..=4)
                .prop_flat_map(|costs| (costs.len() as u32..16, Just(costs)))
        ) {
            let shares = apportion(samples, &costs);
            prop_assert_eq!(shares.iter().sum::<u32>(), samples);
            let makespan = shares.iter().zip(&costs).map(|(share, cost)| u64::from(*share) * cost).max();
            prop_assert_eq!(makespan, Some(best(samples, &costs)));
        }
    }

    #[test]
    fn a_replica_that_does_not_train_gets_nothing() {
        assert_eq!(apportion(32, &[4, 0, 3]), [14, 0, 18]);
        assert_eq!(apportion(7, &[5, 5, 5]), [3, 2, 2]);
    }
}
