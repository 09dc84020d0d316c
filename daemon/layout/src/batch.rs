//! How many samples of a step each replica takes.
//!
//! **Parts.** Samples are shared out in whole micro-batches; where `global` is not a multiple of `micro`, the rest
//! is one short micro-batch. A job without a whole micro-batch for each of its replicas shares out single samples.
//!
//! **Time.** A pipeline of `stages` that are alike is full after `stages - 1` micro-batches, so a share of `s`
//! samples takes `(s + (stages - 1) * min(s, micro)) * t`, where `t` is the time of a sample at the slowest stage:
//! for `m` whole micro-batches `(m + stages - 1) * micro * t`. `t` is 0 for a replica that does not train.

use crate::JobSpec;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What the time of a share depends on, apart from the replica's speed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Apportionment {
    global: u32,
    micro: u32,
    /// Samples that go together: `micro` or 1.
    part: u32,
    stages: u32,
}

impl Apportionment {
    pub(crate) fn new(job: &JobSpec) -> Self {
        let (global, micro) = (job.batch.global, job.batch.micro);
        let whole = u64::from(global) >= u64::from(job.parallel.data) * u64::from(micro);
        Self { global, micro, part: if whole { micro } else { 1 }, stages: job.parallel.pipeline }
    }

    /// The time of `samples` at `time` a sample.
    pub(crate) fn time(&self, samples: u32, time: f64) -> f64 {
        let fill = u64::from(self.stages - 1) * u64::from(samples.min(self.micro));
        (u64::from(samples) + fill) as f64 * time
    }

    /// When the slowest replica is done.
    pub(crate) fn step_time(&self, shares: &[u32], times: &[f64]) -> f64 {
        shares.iter().zip(times).map(|(share, time)| self.time(*share, *time)).fold(0.0, f64::max)
    }

    /// Shares out all samples, at least one part (or the short one) to each replica that trains, so that the slowest is
    /// done as early as possible; ties to lower numbers.
    ///
    /// Each whole part goes to the replica that would be done with it first, then so does the short one. Parts are
    /// alike, so this is the best there is if everybody gets a whole part. Otherwise one replica has the short part
    /// alone, and that is the slowest: what it could do, every other can.
    pub(crate) fn all_samples(&self, times: &[f64]) -> Vec<u32> {
        let training: Vec<usize> = (0..times.len()).filter(|&replica| times[replica] > 0.0).collect();
        let (parts, short) = (self.global / self.part, self.global % self.part);
        let mut shares = self.whole_parts(parts, times, &training);
        if short == 0 {
            return shares;
        }
        let done = |shares: &[u32], replica: usize| self.time(shares[replica] + short, times[replica]);
        let first = training.iter().copied().min_by(|&a, &b| done(&shares, a).total_cmp(&done(&shares, b)));
        if let Some(first) = first {
            shares[first] += short;
        }
        let slowest = training.iter().copied().rev().max_by(|&a, &b| times[a].total_cmp(&times[b]));
        if let (Some(slowest), true) = (slowest, training.len() > 1) {
            let others: Vec<usize> = training.into_iter().filter(|replica| *replica != slowest).collect();
            let mut spared = self.whole_parts(parts, times, &others);
            spared[slowest] = short;
            if self.step_time(&spared, times) < self.step_time(&shares, times) {
                return spared;
            }
        }
        shares
    }

    /// Each replica takes as many whole parts as it can do in the time of the nominal step, at least one, but never
    /// more than its nominal share. `nominal` is the time of a sample where nothing is lost.
    pub(crate) fn in_nominal_time(&self, times: &[f64], nominal: f64) -> Vec<u32> {
        let full = vec![nominal; times.len()];
        let shares = self.all_samples(&full);
        let end = self.step_time(&shares, &full);
        let able = |(share, time): (u32, f64)| {
            if time == 0.0 {
                return 0;
            }
            if self.time(share, time) <= end {
                return share;
            }
            // The most parts that are done by the end, by bisection: `done` are, `late` are not.
            let (mut done, mut late) = (0, share / self.part + 1);
            while late - done > 1 {
                let parts = done + (late - done) / 2;
                if self.time(parts * self.part, time) <= end { done = parts } else { late = parts }
            }
            (done.max(1) * self.part).min(share)
        };
        shares.into_iter().zip(times.iter().copied()).map(able).collect()
    }

    /// Shares out whole parts over some of the replicas, at least one to each: every part goes to the one that would be
    /// done with it first.
    fn whole_parts(&self, parts: u32, times: &[f64], replicas: &[usize]) -> Vec<u32> {
        let mut shares = vec![0; times.len()];
        let mut given = 0;
        for (&replica, first) in replicas.iter().zip(self.sure_parts(parts, times, replicas)) {
            shares[replica] = first * self.part;
            given += first;
        }
        // Times are not negative, so their bits are in their order.
        let next = |share: u32, replica: usize| {
            Reverse((self.time(share + self.part, times[replica]).to_bits(), replica))
        };
        let mut queue: BinaryHeap<_> =
            replicas.iter().map(|&replica| next(shares[replica], replica)).collect();
        for _ in given..parts {
            let Some(mut first) = queue.peek_mut() else { break };
            let Reverse((_, replica)) = *first;
            shares[replica] += self.part;
            *first = next(shares[replica], replica);
        }
        shares
    }

    /// Parts that each replica gets in any case, so that they need not be dealt one by one. Could whole
    /// micro-batches be divided at will, those who get more than the one that all get would be done together; what
    /// a replica is done with before that is its own.
    fn sure_parts(&self, parts: u32, times: &[f64], replicas: &[usize]) -> Vec<u32> {
        let mut sure = vec![1; replicas.len()];
        let fill = f64::from(self.stages - 1);
        let mut sharing: Vec<usize> = (0..replicas.len()).collect();
        while self.part == self.micro && !sharing.is_empty() {
            let left = f64::from(parts) - (replicas.len() - sharing.len()) as f64;
            let speed: f64 = sharing.iter().map(|&index| 1.0 / times[replicas[index]]).sum();
            let end = (left + fill * sharing.len() as f64) / speed;
            let done = |index: usize| end / times[replicas[index]] - fill;
            let before = sharing.len();
            sharing.retain(|&index| done(index) >= 1.0);
            if sharing.len() == before {
                // One less than is done, so that rounding cannot matter.
                sharing.iter().for_each(|&index| sure[index] = (done(index) - 1.0).max(1.0) as u32);
                break;
            }
        }
        sure
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The smallest makespan over every way to share out `parts` whole parts and perhaps the short one.
    fn best(rule: &Apportionment, parts: u32, short: u32, times: &[f64]) -> f64 {
        let Some((&time, rest)) = times.split_first() else {
            return if parts == 0 && short == 0 { 0.0 } else { f64::INFINITY };
        };
        let mut least = f64::INFINITY;
        for whole in 0..=parts {
            for (more, left) in [(0, short), (short, 0)] {
                let share = whole * rule.part + more;
                if share > 0 {
                    let others = best(rule, parts - whole, left, rest);
                    least = least.min(rule.time(share, time).max(others));
                }
            }
        }
        least
    }

    fn times() -> impl Strategy<Value = Vec<f64>> {
        prop::collection::vec(prop_oneof![4 => (1..12_u32).prop_map(f64::from), 1 => 1.0..40.0_f64], 1..=4)
    }

    fn rule() -> impl Strategy<Value = (Apportionment, Vec<f64>)> {
        (times(), 1..=5_u32, 0..14_u32, 1..=4_u32, any::<bool>()).prop_map(
            |(times, micro, more, stages, single)| {
                let part = if single { 1 } else { micro };
                let global = times.len() as u32 * part + more;
                (Apportionment { global, micro, part, stages }, times)
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn no_split_is_done_earlier((rule, times) in rule()) {
            let shares = rule.all_samples(&times);
            prop_assert_eq!(shares.iter().sum::<u32>(), rule.global);
            prop_assert!(shares.iter().all(|share| *share > 0));
            let short = shares.iter().filter(|share| *share % rule.part > 0).count();
            prop_assert_eq!(short, usize::from(!rule.global.is_multiple_of(rule.part)), "{:?}", shares);
            let (parts, short) = (rule.global / rule.part, rule.global % rule.part);
            prop_assert_eq!(rule.step_time(&shares, &times), best(&rule, parts, short, &times), "{:?}", shares);
        }

        /// What is given without dealing is what dealing would have given.
        #[test]
        fn sure_parts_are_sure(
            times in prop::collection::vec(prop_oneof![(1..4_u32).prop_map(f64::from), 0.5..500.0_f64], 1..12),
            micro in 1..5_u32,
            more in 0..3000_u32,
            stages in 1..9_u32,
        ) {
            let training: Vec<usize> = (0..times.len()).collect();
            let parts = times.len() as u32 + more;
            let rule = Apportionment { global: parts * micro, micro, part: micro, stages };
            let mut dealt = vec![micro; times.len()];
            for _ in 0..more {
                let next = |replica: usize| rule.time(dealt[replica] + micro, times[replica]);
                let first = training.iter().copied().min_by(|&a, &b| next(a).total_cmp(&next(b))).unwrap();
                dealt[first] += micro;
            }
            prop_assert_eq!(rule.whole_parts(parts, &times, &training), dealt);
        }

        #[test]
        fn shrunk_replicas_end_with_the_nominal_step((rule, slower) in rule(), nominal in 1..6_u32) {
            let nominal = f64::from(nominal);
            let full = vec![nominal; slower.len()];
            let whole = rule.all_samples(&full);
            let end = rule.step_time(&whole, &full);
            let times: Vec<f64> = slower.iter().map(|factor| nominal * factor).collect();
            for (replica, share) in rule.in_nominal_time(&times, nominal).into_iter().enumerate() {
                let (time, most) = (times[replica], whole[replica]);
                prop_assert!((1..=most).contains(&share));
                prop_assert!(rule.time(share, time) <= end || share == rule.part.min(most));
                // One part more would be late, or more than its own.
                let more = share - share % rule.part + rule.part;
                prop_assert!(share == most || more > most || rule.time(more, time) > end);
                prop_assert!(share == most || share % rule.part == 0);
            }
        }
    }

    fn whole(global: u32, micro: u32, stages: u32) -> Apportionment {
        Apportionment { global, micro, part: micro, stages }
    }

    #[test]
    fn a_replica_that_does_not_train_gets_nothing() {
        assert_eq!(whole(32, 1, 1).all_samples(&[4.0, 0.0, 3.0]), [14, 0, 18]);
        assert_eq!(whole(7, 1, 1).all_samples(&[5.0, 5.0, 5.0]), [3, 2, 2]);
        assert_eq!(whole(32, 4, 2).in_nominal_time(&[1.0, 0.0], 1.0), [16, 0]);
        assert_eq!(whole(8, 4, 1).all_samples(&[0.0, 0.0]), [0, 0]);
    }

    #[test]
    fn micro_batches_stay_whole() {
        // 8 micro-batches of 4: in 28 units of time either does 3 and 4, so one is late.
        assert_eq!(whole(32, 4, 1).all_samples(&[8.0, 7.0]), [16, 16]);
        assert_eq!(whole(34, 4, 1).all_samples(&[8.0, 7.0]), [16, 18]);
        // The slow one is spared all but the short micro-batch.
        assert_eq!(whole(9, 4, 1).all_samples(&[1.0, 100.0]), [8, 1]);
    }

    /// The most that a job may ask for is shared out at once.
    #[test]
    fn the_largest_batch() {
        let times: Vec<f64> = (0..1000).map(|replica| if replica % 7 == 0 { 8.0 } else { 7.0 }).collect();
        let shares = whole(1 << 20, 1, 8).all_samples(&times);
        assert_eq!(shares.iter().sum::<u32>(), 1 << 20);
    }
}
