//! What a plan says of its cost: step time, throughput, power and memory.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Cluster, job, worker};
use proptest::prelude::*;
use reknit_layout::job::*;
use reknit_layout::power::{performance, power_for};
use reknit_layout::topology::{Domain, Node, POWER_LIMIT};
use reknit_layout::*;
use std::collections::BTreeMap;

/// The time of a sample in each group, told by the partitions alone; in parameters.
fn works(cluster: &Cluster) -> Vec<f64> {
    let of = |group: &Group| {
        let axes = group.partitions.iter().map(|(axis, sets)| {
            let most = sets.iter().map(Units::len).max().unwrap();
            u64::from(most) * cluster.job.unit_params(group.stage, axis.family)
        });
        axes.sum::<u64>() as f64
    };
    cluster.plan.layout.groups.iter().map(of).collect()
}

/// The time of the slowest replica's share, given the time of a sample in each group.
fn step_time(job: &JobSpec, batch: &[u32], times: &[f64]) -> f64 {
    let stages = job.parallel.pipeline;
    let replicas = times.chunks(stages as usize).zip(batch);
    let of = |(times, share): (&[f64], &u32)| {
        let fill = (stages - 1) * job.batch.micro.min(*share);
        f64::from(share + fill) * times.iter().copied().fold(0.0, f64::max)
    };
    replicas.map(of).fold(0.0, f64::max)
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

/// Each stage's groups of a replica in one of a few domains, or nowhere.
fn topology(job: &JobSpec, spots: &[Option<u8>], budgets: &[Option<f64>], power_limit: f64) -> Topology {
    let mut domains: BTreeMap<u8, Vec<GpuId>> = BTreeMap::new();
    let groups = (0..job.parallel.data).flat_map(|replica| job.stages().map(move |stage| (replica, stage)));
    for ((replica, stage), spot) in groups.zip(spots) {
        if let Some(domain) = spot {
            let gpus = (0..job.parallel.tensor).map(|slot| worker(Place::new(replica, stage.0, slot), 0).gpu);
            domains.entry(*domain).or_default().extend(gpus);
        }
    }
    let domain = |(domain, gpus): (u8, Vec<GpuId>)| Domain {
        name: DomainName(format!("d{domain}")),
        // Budgets are given for each GPU.
        power_budget: budgets[usize::from(domain)].map(|each| each * gpus.len() as f64),
        nodes: vec![Node { name: NodeName(format!("n{domain}")), gpus }],
    };
    let mut topology = Topology::new(domains.into_iter().map(domain).collect(), None);
    topology.power_limit = power_limit;
    topology
}

#[derive(Debug)]
struct Case {
    job: JobSpec,
    spots: Vec<Option<u8>>,
    budgets: Vec<Option<f64>>,
    power_limit: f64,
    lost: Vec<prop::sample::Index>,
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = (1..=4_u32, 2..=6_u32, 1..=3_u32);
    sizes.prop_flat_map(|(data, tensor, stages)| {
        let units = move || tensor..=4 * tensor;
        let spots = prop::collection::vec(prop::option::weighted(0.8, 0..4_u8), (data * stages) as usize);
        let budgets = prop::collection::vec(prop::option::of(0.8..1.3_f64), 4);
        let lost = prop::collection::vec(any::<prop::sample::Index>(), 0..5);
        let batch = (1..=6_u32, 0..40_u32, any::<bool>());
        let more = (spots, budgets, lost, batch, prop_oneof![Just(POWER_LIMIT), 1.0..POWER_LIMIT]);
        (units(), units(), units(), more).prop_map(move |(attn, ffn, vocab, more)| {
            let (spots, budgets, lost, (micro, samples, shrink), power_limit) = more;
            let mut job = job(data, tensor, attn, ffn, vocab);
            job.parallel.pipeline = stages;
            let global = (data + samples).max(micro);
            let policy = if shrink { BatchPolicy::Shrink } else { BatchPolicy::KeepGlobal };
            job.batch = BatchSpec { global, micro, policy };
            Case { job, spots, budgets, power_limit, lost }
        })
    })
}

/// The nominal layout and the one after the losses; the cluster is at the latter. `None` where nothing can be planned.
fn reduced(case: &Case, power_boost: bool) -> Option<(Plan, Cluster)> {
    let mut job = case.job.clone();
    job.recovery.power_boost = power_boost;
    let topology = topology(&job, &case.spots, &case.budgets, case.power_limit);
    let mut cluster = Cluster::start(job);
    let nominal = cluster.plan.clone();
    cluster.topology = topology;
    for at in &case.lost {
        let places: Vec<Place> = cluster.members.keys().copied().collect();
        if !places.is_empty() {
            cluster.drain(places[at.index(places.len())]);
        }
    }
    cluster.replan().ok()?;
    Some((nominal, cluster))
}

proptest! {
    #![proptest_config(common::cases(1000))]

    #[test]
    fn ratios_are_against_the_nominal_layout(case in case()) {
        let Some((nominal, cluster)) = reduced(&case, false) else { return Ok(()) };
        let whole = &nominal.predicted;
        prop_assert_eq!((whole.step_time_ratio, whole.throughput_ratio), (1.0, 1.0));
        prop_assert!(whole.power.is_empty());

        let (job, plan) = (&cluster.job, &cluster.plan);
        let slowest = job.stages().map(|stage| {
            let of = |axis: Axis| {
                let most = job.model.units(axis.family).div_ceil(job.parallel.tensor);
                u64::from(most) * job.unit_params(stage, axis.family)
            };
            job.stage_axes(stage).into_iter().map(of).sum::<u64>()
        });
        let full = vec![slowest.max().unwrap() as f64; nominal.layout.groups.len()];
        let nominal_time = step_time(job, &nominal.layout.batch, &full);
        let time = step_time(job, &plan.layout.batch, &works(&cluster));
        let predicted = &plan.predicted;
        prop_assert!(near(predicted.step_time_ratio, time / nominal_time));
        let samples = |batch: &[u32]| f64::from(batch.iter().sum::<u32>());
        let speed = samples(&plan.layout.batch) / time / (samples(&nominal.layout.batch) / nominal_time);
        prop_assert!(near(predicted.throughput_ratio, speed));
        match job.batch.policy {
            BatchPolicy::KeepGlobal => {
                prop_assert!(predicted.step_time_ratio >= 1.0);
                prop_assert_eq!(predicted.throughput_ratio, 1.0 / predicted.step_time_ratio);
            }
            BatchPolicy::Shrink => {
                let shares = plan.layout.batch.iter().zip(&nominal.layout.batch);
                prop_assert!(shares.clone().all(|(now, before)| now <= before));
                // Only what everybody takes at least can be late.
                let least = plan.layout.batch.iter().any(|share| (1..=job.batch.micro).contains(share));
                prop_assert!(predicted.step_time_ratio <= 1.0 || least);
            }
        }
    }

    /// Budgets and limits hold, nobody gets more than is of use, and nobody too little while there is some left.
    #[test]
    fn power_is_spent_where_it_is_of_use(case in case()) {
        let Some((_, plain)) = reduced(&case, false) else { return Ok(()) };
        let Some((_, cluster)) = reduced(&case, true) else { return Ok(()) };
        let (job, plan, topology) = (&cluster.job, &cluster.plan, &cluster.topology);
        let stages = job.parallel.pipeline as usize;
        let works = works(&cluster);
        let full: Vec<f64> = job.stages().map(|stage| {
            let of = |axis: Axis| u64::from(job.model.units(axis.family).div_ceil(job.parallel.tensor)) * job.unit_params(stage, axis.family);
            job.stage_axes(stage).into_iter().map(of).sum::<u64>() as f64
        }).collect();
        let nominal = full.into_iter().fold(0.0, f64::max);

        let mut drawn: BTreeMap<Option<usize>, f64> = BTreeMap::new();
        let mut times = Vec::new();
        let mut powers = Vec::new();
        for (group, work) in plan.layout.groups.iter().zip(&works) {
            let place = |slot| group.place(slot);
            let each: Vec<f64> = group.active().into_iter().map(|slot| plan.predicted.power.get(&place(slot)).copied().unwrap_or(1.0)).collect();
            let power = each.first().copied().unwrap_or(1.0);
            prop_assert!(each.iter().all(|other| *other == power));
            prop_assert!((1.0..=case.power_limit).contains(&power));
            powers.push(power);
            times.push(work / performance(power));
            let domain = group.slots.iter().flatten().next().and_then(|member| topology.domain_of(&member.worker.gpu));
            let sum: f64 = each.iter().sum();
            if domain.is_none() {
                prop_assert!(sum <= group.slots.len() as f64 + 1e-9);
            }
            *drawn.entry(domain).or_default() += sum;
        }
        let budget = |domain: usize| {
            let domain = &topology.domains()[domain];
            domain.power_budget.unwrap_or(domain.gpus().count() as f64)
        };
        for (domain, drawn) in drawn.iter().filter_map(|(domain, drawn)| Some(((*domain)?, drawn))) {
            let boosted = plan.layout.groups.iter().zip(&powers).any(|(group, power)| {
                *power > 1.0 && group.slots.iter().flatten().any(|member| topology.domain_of(&member.worker.gpu) == Some(domain))
            });
            // A budget below what the slots draw anyhow is not the planner's to keep.
            prop_assert!(!boosted || *drawn <= budget(domain) + 1e-9, "{drawn} of {}", budget(domain));
        }
        for (index, time) in times.iter().enumerate() {
            let replica = &times[index / stages * stages..][..stages];
            let pace = replica.iter().copied().fold(nominal, f64::max);
            if powers[index] > 1.0 {
                prop_assert!(near(*time, pace), "group {index} is needlessly fast: {time} of {pace}");
            }
        }
        // Who alone holds its replica back has no power left to take.
        for (index, group) in plan.layout.groups.iter().enumerate().filter(|(_, group)| group.degree() > 0) {
            let replica = &times[index / stages * stages..][..stages];
            let others = replica.iter().enumerate().filter(|(at, _)| *at != index % stages).map(|(_, time)| *time);
            let domain = group.slots.iter().flatten().next().and_then(|member| topology.domain_of(&member.worker.gpu));
            let own = powers[index] * f64::from(group.degree());
            let left = domain.map_or(group.slots.len() as f64 - own, |domain| budget(domain) - drawn[&Some(domain)]);
            let alone = plan.layout.groups.iter().zip(&works).enumerate().all(|(other, (with, work))| {
                let there = with.slots.iter().flatten().next().and_then(|member| topology.domain_of(&member.worker.gpu));
                other == index || domain.is_none() || there != domain || *work <= nominal
            });
            if alone && times[index] > nominal * (1.0 + 1e-9) && times[index] > others.fold(0.0, f64::max) * (1.0 + 1e-9) {
                prop_assert!(left <= 1e-3 || near(powers[index], case.power_limit), "{left} left");
            }
        }
        let paces = |times: &[f64]| times.chunks(stages).map(|of| of.iter().copied().fold(0.0, f64::max)).collect::<Vec<_>>();
        for (with, without) in paces(&times).into_iter().zip(paces(&works)) {
            prop_assert!(with <= without * (1.0 + 1e-12));
        }
        if job.batch.policy == BatchPolicy::KeepGlobal {
            let (with, without) = (&plan.predicted, &plain.plan.predicted);
            prop_assert!(with.step_time_ratio <= without.step_time_ratio * (1.0 + 1e-12));
        }
    }

    #[test]
    fn a_plan_fits_or_says_what_it_needs(case in case(), short in any::<bool>()) {
        let Some((_, mut cluster)) = reduced(&case, false) else { return Ok(()) };
        let needs = cluster.plan.layout.groups.iter().flat_map(|group| {
            let place = |slot| group.place(slot);
            group.active().into_iter().map(move |slot| (place(slot), group, slot))
        });
        let needs: Vec<(Place, u64)> = needs
            .map(|(place, group, slot)| (place, memory::slot_bytes(&cluster.job, group, slot)))
            .collect();
        let most = needs.iter().map(|(_, bytes)| *bytes).max().unwrap();
        let first = needs.iter().find(|(_, bytes)| *bytes == most).unwrap().0;
        cluster.topology.gpu_memory = Some(most - u64::from(short));
        match draft(&cluster.request(&cluster.workers())) {
            Ok(_) => prop_assert!(!short),
            Err(error) => prop_assert_eq!(error, DraftError::Memory { place: first, needs: most, limit: most - 1 }),
        }
    }
}

/// The 480B model of the NTP paper with a feed-forward layer of ours, on few layers: TP32 without two GPUs.
fn published(power_boost: bool) -> Cluster {
    let mut job = job(1, 32, 128, 5120, 2048);
    job.model.hidden = 20_480;
    job.model.layers = 4;
    job.model.heads = 128;
    job.batch = BatchSpec { global: 8, micro: 1, policy: BatchPolicy::KeepGlobal };
    job.recovery.power_boost = power_boost;
    job.validate().unwrap();
    let mut cluster = Cluster::start(job);
    cluster.drain(Place::new(0, 0, 9));
    cluster.drain(Place::new(0, 0, 31));
    cluster.replan().unwrap();
    cluster
}

#[test]
fn thirty_of_thirty_two_slots() {
    let cluster = published(false);
    let params = |family| cluster.job.model.unit_params(family) as f64;
    let (attn, ffn, vocab) = (params(Family::Attn), params(Family::Ffn), params(Family::Vocab));
    // 128 heads on 30 slots: some have 5 instead of 4. The others divide better: 171 blocks for 160, 69 for 64.
    let whole = 4.0 * (4.0 * attn + 160.0 * ffn) + 64.0 * vocab;
    let reduced = 4.0 * (5.0 * attn + 171.0 * ffn) + 69.0 * vocab;
    let ratio = cluster.plan.predicted.step_time_ratio;
    assert!(near(ratio, reduced / whole), "{ratio}");
    assert_eq!(cluster.job.model.slowest_work(30) as f64, reduced);
}

#[test]
fn a_reduced_group_gets_what_the_dead_leave() {
    let ratio = published(false).plan.predicted.step_time_ratio;
    let cluster = published(true);
    let predicted = &cluster.plan.predicted;
    // The power of 32 for 30, which is less than is needed.
    let power = 32.0 / 30.0;
    assert!(power < power_for(ratio));
    assert_eq!(predicted.power.len(), 30);
    assert!(predicted.power.values().all(|each| near(*each, power) && *each <= power));
    assert!(near(predicted.step_time_ratio, ratio / performance(power)));

    // A domain with more to give: exactly the nominal time, at the power for it.
    let mut cluster = published(true);
    cluster.topology = topology(&cluster.job, &[Some(0)], &[Some(1.25)], POWER_LIMIT);
    let predicted = draft(&cluster.request(&cluster.workers())).unwrap().plan.predicted;
    assert_eq!(predicted.step_time_ratio, 1.0);
    assert!(predicted.power.values().all(|each| near(*each, power_for(ratio))));
}

#[test]
fn the_refusal_shows_the_figures() {
    let place = Place::new(0, 1, 3);
    let text = DraftError::Memory { place, needs: (80 << 30) + 1, limit: 80 << 30 }.to_string();
    assert!(
        text.starts_with("the slot at 0.1.3 would need 80.01 GiB of GPU memory and has 80.00 GiB: "),
        "{text}"
    );
    let text = DraftError::Memory { place, needs: 3 << 19, limit: 1 << 20 }.to_string();
    assert!(text.contains("1.50 MiB of GPU memory and has 1.00 MiB"), "{text}");
}

#[test]
fn memory_of_a_slot() {
    // Half of a model with 2 attention units of 2 query heads, 4 FFN and 6 vocabulary blocks.
    let mut job = job(1, 2, 2, 4, 6);
    job.model = ModelSpec { layers: 3, hidden: 8, heads: 4, head_dim: Some(2), seq_len: 100, ..job.model };
    job.batch.micro = 5;
    let cluster = Cluster::start(job);
    let group = &cluster.plan.layout.groups[0];
    // Of each layer one attention unit and 32 FFN columns, 96 rows of the embedding and the head, and 7 norms.
    let attn = (4 + 2 + 2 + 4) * 8;
    let params = 3 * (attn + 3 * 32 * 8) + 2 * 96 * 8 + 7 * 8;
    // Weights, gradients and two moments.
    let state = 4 * params;
    let tokens = 5 * 100;
    let streams = 7 * tokens * 8 + 7 * tokens * (8 + 1);
    let attention = tokens * ((2 + 2) * 2 + 4) + 2 * 5 * 100 * 100;
    let layers = 3 * (attention + tokens * 3 * 32);
    let vocab = tokens * (96 + 3);
    let backward = 2 * tokens * 8 + tokens * (64 + 32 + 2) + 16 * 8;
    let rotary = 100 * 2;
    let values = state + streams + layers + vocab + backward + rotary;
    assert_eq!(memory::slot_bytes(&cluster.job, group, Slot(0)), 4 * values + 16 * tokens + 4 * 5 * 101);
    let absent = Slot(7);
    assert_eq!(memory::slot_bytes(&cluster.job, group, absent), 0);

    // Recomputing, one layer's norm, attention and FFN is there at a time. Dropout has one more gradient of the stream.
    let mut other = cluster.job.clone();
    other.model.recompute = true;
    other.model.dropout = 0.1;
    let saved = 2 * (attention + tokens * 3 * 32) + 5 * tokens * (8 + 1);
    let values = values - saved + tokens * 8;
    assert_eq!(memory::slot_bytes(&other, group, Slot(0)), 4 * values + 16 * tokens + 4 * 5 * 101);
}

/// Of three stages the first keeps up to three micro-batches, the last one.
#[test]
fn a_stage_keeps_the_micro_batches_on_their_way() {
    let bytes = |micro_batches: u32, stage: usize| {
        let mut job = job(1, 2, 4, 4, 8);
        job.parallel.pipeline = 3;
        job.batch = BatchSpec { global: 4 * micro_batches, micro: 4, policy: BatchPolicy::KeepGlobal };
        let cluster = Cluster::start(job);
        memory::slot_bytes(&cluster.job, &cluster.plan.layout.groups[stage], Slot(0))
    };
    let more = |micro_batches, stage| bytes(micro_batches, stage) - bytes(1, stage);
    let one = more(2, 0);
    assert!(one > 4 * 64 * 64 * 4);
    assert_eq!([1, 3, 9].map(|count| more(count, 0)), [0, 2 * one, 2 * one]);
    assert_eq!(more(9, 1), more(2, 1));
    assert_eq!(more(9, 2), 0);
}

/// The largest of every size that a job may have.
#[test]
fn no_size_wraps_around() {
    let mut job = job(1, 1, 1, 1, 8);
    job.model.layers = 1 << 12;
    job.model.seq_len = 1 << 24;
    job.batch = BatchSpec { global: 1 << 20, micro: 1 << 20, policy: BatchPolicy::KeepGlobal };
    job.model.heads = 1 << 16;
    job.model.head_dim = Some(2);
    job.validate().unwrap();
    let mut cluster = Cluster::start(job);
    let bytes = memory::slot_bytes(&cluster.job, &cluster.plan.layout.groups[0], Slot(0));
    assert_eq!(bytes, u64::MAX);
    cluster.topology.gpu_memory = Some(u64::MAX - 1);
    let refused = draft(&cluster.request(&cluster.workers()));
    assert!(matches!(refused, Err(DraftError::Memory { needs: u64::MAX, .. })));
}
