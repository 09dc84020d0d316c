//! How much throughput a fleet loses to failed GPUs, by what is done about them.
//!
//! **Model.** A replica spans `domains_per_replica` domains, each holding one tensor-parallel group as wide as the domain, and takes
//! `local_batch` samples a step. Failed GPUs are a uniformly random set. Domains with most failures are packed into
//! the fewest replicas, and a replica runs at the degree `d` of its worst domain. The step takes as long as without
//! failures, so a replica computes the most samples `b` with
//! `b * slowest_work(d) <= local_batch * slowest_work(domain)`: a reduced group waits for the slot with most units
//! ([`ModelSpec::slowest_work`]). The loss is `1 - sum of b / (replicas * local_batch)`, the mean over the trials.

use crate::availability::failed_gpus;
use crate::random::{below, number};
use reknit_layout::job::ModelSpec;

/// What is done with a replica that has lost GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// It does not train.
    DropReplica,
    /// It trains at the reduced degree with fewer samples (nonuniform tensor parallelism).
    Ntp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fleet {
    /// GPUs in a domain, and the nominal degree.
    pub domain: u32,
    pub domains_per_replica: u32,
    pub replicas: u32,
    /// Samples of a whole replica in a step.
    pub local_batch: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    #[error("{0} is 0: allowed are 1 and more")]
    Zero(&'static str),
    #[error("the fleet has more than {} GPUs", u32::MAX)]
    TooLarge,
}

impl Fleet {
    pub fn gpus(&self) -> Result<u32, FleetError> {
        for (name, value) in [
            ("domain", self.domain),
            ("domains_per_replica", self.domains_per_replica),
            ("replicas", self.replicas),
            ("local_batch", self.local_batch),
        ] {
            if value == 0 {
                return Err(FleetError::Zero(name));
            }
        }
        let per_replica = self.domain.checked_mul(self.domains_per_replica);
        per_replica.and_then(|gpus| gpus.checked_mul(self.replicas)).ok_or(FleetError::TooLarge)
    }

    /// Samples that the fleet computes in a step with these failures in its domains.
    fn samples(&self, strategy: Strategy, work: &[u64], mut failures: Vec<u32>) -> u64 {
        failures.sort_unstable_by(|a, b| b.cmp(a));
        let replicas = failures.chunks(self.domains_per_replica as usize);
        let nominal = u128::from(self.local_batch) * u128::from(work[0]);
        // The first domain of a replica is its worst.
        let samples = replicas.map(|domains| match (strategy, domains[0]) {
            (_, 0) => u64::from(self.local_batch),
            (Strategy::DropReplica, _) => 0,
            (Strategy::Ntp, failed) => match work.get(failed as usize) {
                Some(work) => (nominal / u128::from(*work)) as u64,
                None => 0,
            },
        });
        samples.sum()
    }
}

/// The expected share of throughput lost when `failed_fraction` of the GPUs have failed, over `trials` random sets of them.
/// The model must be valid; the same seed gives the same figure.
pub fn throughput_loss(
    strategy: Strategy,
    model: &ModelSpec,
    fleet: &Fleet,
    failed_fraction: f64,
    trials: u32,
    seed: u64,
) -> Result<f64, FleetError> {
    let gpus = fleet.gpus()?;
    if trials == 0 {
        return Err(FleetError::Zero("trials"));
    }
    let failed = failed_gpus(gpus, failed_fraction);
    // By failures in the domain, up to one GPU left.
    let work: Vec<u64> = (1..=fleet.domain).rev().map(|degree| model.slowest_work(degree)).collect();
    let computed = |trial: u32| {
        let failures = failures(gpus, fleet.domain, failed, seed, trial.into());
        fleet.samples(strategy, &work, failures) as f64
    };
    let mean = (0..trials).map(computed).sum::<f64>() / f64::from(trials);
    Ok(1.0 - mean / (f64::from(fleet.replicas) * f64::from(fleet.local_batch)))
}

/// Failures of each domain when `failed` GPUs fail. Selection sampling: each GPU in turn fails with the probability
/// (failures to come / GPUs to come), so every set is equally likely.
fn failures(gpus: u32, domain: u32, failed: u32, seed: u64, trial: u64) -> Vec<u32> {
    let mut counts = vec![0; (gpus / domain) as usize];
    let mut left = failed;
    for gpu in 0..gpus {
        if below(number(seed, trial, gpu.into()), gpus - gpu) < left {
            left -= 1;
            counts[(gpu / domain) as usize] += 1;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::availability;
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
    use reknit_layout::job::{Dtype, ModelKind};

    /// The 480B model of the NTP paper, with our feed-forward layer.
    fn model() -> ModelSpec {
        ModelSpec {
            kind: ModelKind::Decoder,
            layers: 100,
            hidden: 20_480,
            heads: 128,
            kv_heads: 128,
            head_dim: None,
            ffn: 81_920,
            ffn_block: 16,
            vocab: 131_072,
            vocab_block: 64,
            seq_len: 16_384,
            tie_embeddings: false,
            dtype: Dtype::F32,
            dropout: 0.0,
            recompute: false,
        }
    }

    /// 1024 domains of 32 in 128 replicas.
    const FLEET: Fleet = Fleet { domain: 32, domains_per_replica: 8, replicas: 128, local_batch: 8 };

    fn loss(strategy: Strategy, fraction: f64) -> f64 {
        throughput_loss(strategy, &model(), &FLEET, fraction, 40, 1).unwrap()
    }

    /// At 0.4% failed: dropping replicas costs 12%, NTP about an eighth of that, since a reduced replica takes 7
    /// samples of 8.
    #[test]
    fn published_losses() {
        let (drop, ntp) = (loss(Strategy::DropReplica, 4e-3), loss(Strategy::Ntp, 4e-3));
        assert!((drop - 0.124).abs() < 0.003, "{drop}");
        assert!((ntp - 0.0155).abs() < 0.001, "{ntp}");
    }

    #[test]
    fn a_reduced_group_waits_for_its_slowest_slot() {
        let work: Vec<u64> = (1..=32).rev().map(|degree| model().slowest_work(degree)).collect();
        let one_hit = |failed| {
            let mut failures = vec![0; 1024];
            failures[77] = failed;
            FLEET.samples(Strategy::Ntp, &work, failures)
        };
        // 128 heads on 31 or 30 slots: one slot has 5 instead of 4. On 16 slots everything takes twice as long.
        assert_eq!([0, 1, 2, 16, 31, 32].map(one_hit), [1024, 1023, 1023, 1020, 1016, 1016]);
    }

    /// With one domain to a replica, what dropping costs is what is not available.
    #[test]
    fn dropping_single_domains_matches_the_closed_form() {
        let fleet = Fleet { domains_per_replica: 1, replicas: 1024, ..FLEET };
        let lost = throughput_loss(Strategy::DropReplica, &model(), &fleet, 1e-3, 100, 3).unwrap();
        let closed = 1.0 - availability(32_768, 32, 1e-3);
        assert!((lost - closed).abs() < 0.001, "{lost} {closed}");
    }

    #[test]
    fn a_fleet_without_gpus_is_refused() {
        let empty = Fleet { replicas: 0, ..FLEET };
        let lost = throughput_loss(Strategy::Ntp, &model(), &empty, 0.0, 1, 1);
        assert_eq!(lost, Err(FleetError::Zero("replicas")));
        let huge = Fleet { replicas: u32::MAX, ..FLEET };
        assert_eq!(huge.gpus(), Err(FleetError::TooLarge));
    }

    proptest! {
        #[test]
        fn exactly_the_failed_gpus_fail(domains in 1..50_u32, failed in 0..50_u32, seed in any::<u64>()) {
            let gpus = domains * 8;
            let failed = failed.min(gpus);
            let counts = failures(gpus, 8, failed, seed, 0);
            prop_assert_eq!(counts.iter().sum::<u32>(), failed);
            prop_assert!(counts.iter().all(|count| *count <= 8));
        }

        #[test]
        fn ntp_never_loses_more(fraction in 0.0..0.2_f64, seed in any::<u64>()) {
            let fleet = Fleet { replicas: 8, ..FLEET };
            let of = |strategy| throughput_loss(strategy, &model(), &fleet, fraction, 1, seed).unwrap();
            prop_assert!(of(Strategy::Ntp) <= of(Strategy::DropReplica));
        }
    }
}
