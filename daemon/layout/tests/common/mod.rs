//! A cluster without processes: who is a member and what everybody holds, for tests of the planner.
#![allow(dead_code, unreachable_pub, reason = "each test file uses another part of this module")]

use proptest::test_runner::{Config as ProptestConfig, FileFailurePersistence};
use reknit_layout::job::*;
use reknit_layout::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A valid job with these counts of units.
pub fn job(data: u32, tensor: u32, kv_heads: u32, ffn_units: u32, vocab_units: u32) -> JobSpec {
    JobSpec {
        name: "test".to_owned(),
        model: ModelSpec {
            kind: ModelKind::Decoder,
            layers: 5,
            hidden: 16 * kv_heads,
            heads: 2 * kv_heads,
            kv_heads,
            head_dim: None,
            ffn: 16 * ffn_units,
            ffn_block: 16,
            vocab: 32 * vocab_units,
            vocab_block: 32,
            seq_len: 64,
            tie_embeddings: false,
            dtype: Dtype::F32,
            dropout: 0.0,
            recompute: false,
        },
        parallel: ParallelSpec { data, tensor, pipeline: 1, min_tensor: 1 },
        batch: BatchSpec { global: 32, micro: 4, policy: BatchPolicy::KeepGlobal },
        optimizer: OptimizerSpec {
            lr: 3e-4,
            warmup_steps: 20,
            decay_steps: 1000,
            min_lr: 3e-5,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            grad_clip: 1.0,
        },
        data: DataSpec { files: vec!["*.txt".to_owned()], tokenizer: "bytes".to_owned() },
        recovery: RecoverySpec::default(),
        checkpoint: CheckpointSpec::default(),
        run: RunSpec { steps: 100, seed: 1 },
    }
}

/// As many cases; one that fails is written down beside the test and tried again ever after.
pub fn cases(count: u32) -> ProptestConfig {
    ProptestConfig {
        cases: count,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    }
}

pub struct Cluster {
    pub job: JobSpec,
    pub topology: Topology,
    pub members: BTreeMap<Place, WorkerKey>,
    pub holdings: BTreeMap<WorkerKey, Holding>,
    pub plan: Plan,
    spawned: u64,
    epoch: u64,
}

impl Cluster {
    /// All nominal places filled, a fresh plan made and carried out.
    pub fn start(job: JobSpec) -> Self {
        let mut members = BTreeMap::new();
        let mut spawned = 0;
        for replica in 0..job.parallel.data {
            for stage in 0..job.parallel.pipeline {
                for slot in 0..job.parallel.tensor {
                    spawned += 1;
                    let place = Place::new(replica, stage, slot);
                    members.insert(place, worker(place, spawned));
                }
            }
        }
        let holdings = BTreeMap::new();
        let plan = plan(&PlanRequest {
            job: &job,
            topology: &Topology::default(),
            epoch: Epoch(1),
            workers: &candidates(members.clone(), []),
            fresh: true,
        })
        .unwrap();
        let mut cluster =
            Self { job, topology: Topology::default(), members, holdings, plan, spawned, epoch: 1 };
        cluster.lint();
        cluster.commit(Step(1));
        cluster
    }

    pub fn workers(&self) -> BTreeMap<WorkerKey, Candidate> {
        candidates(self.members.clone(), self.holdings.clone())
    }

    pub fn request<'a>(&'a self, workers: &'a BTreeMap<WorkerKey, Candidate>) -> PlanRequest<'a> {
        PlanRequest {
            job: &self.job,
            topology: &self.topology,
            epoch: Epoch(self.epoch),
            workers,
            fresh: false,
        }
    }

    /// Puts the groups into so many domains in turn; 0: nothing is known of where GPUs are.
    pub fn settle(&mut self, domains: usize) {
        let node = |number: usize| {
            let places = self.members.keys().filter(|place| {
                let group = place.replica.0 * self.job.parallel.pipeline + place.stage.0;
                group as usize % domains == number
            });
            let gpus = places.map(|place| GpuId(format!("GPU-{place}"))).collect();
            topology::Node { name: NodeName(format!("n{number}")), gpus }
        };
        let domain = |number: usize| topology::Domain {
            name: DomainName(format!("d{number}")),
            nodes: vec![node(number)],
            power_budget: None,
        };
        self.topology = Topology::new((0..domains).map(domain).collect(), None);
    }

    /// The worker of `place` is gone with all it held.
    pub fn lose(&mut self, place: Place) {
        if let Some(worker) = self.members.remove(&place) {
            self.holdings.remove(&worker);
        }
    }

    /// The worker of `place` leaves but can still send.
    pub fn drain(&mut self, place: Place) {
        self.members.remove(&place);
    }

    /// A new process, which holds nothing, takes `place`.
    pub fn restore(&mut self, place: Place) {
        self.spawned += 1;
        self.members.insert(place, worker(place, self.spawned));
    }

    /// Plans and carries the plan out.
    pub fn replan(&mut self) -> Result<&Plan, PlanError> {
        let step = Step(self.epoch);
        self.epoch += 1;
        self.plan = plan(&self.request(&self.workers()))?;
        self.lint();
        self.commit(step);
        Ok(&self.plan)
    }

    /// Some of the transfers arrive, then the reshard stops: receivers hold more than before, nobody less.
    pub fn stop_half_way(&mut self, transfers: usize) {
        let Ok(plan) = plan(&self.request(&self.workers())) else {
            return;
        };
        let step = self.newest();
        for transfer in plan.transfers.iter().take(transfers) {
            let holding = self.holdings.entry(transfer.to.clone()).or_default();
            holding.step = step;
            if let Some(axis) = transfer.axis {
                let units = Arc::make_mut(&mut holding.units).entry(axis).or_default();
                *units = units.union(&transfer.units);
            }
        }
    }

    pub fn newest(&self) -> Step {
        let live = self.holdings.values().filter(|holding| !holding.is_empty());
        live.map(|holding| holding.step).max().unwrap_or_default()
    }

    /// Growth ends where it began, whatever came between.
    pub fn whole_groups_are_nominal(&self, layout: &Layout) -> bool {
        let nominal = Self::start(self.job.clone()).plan.layout;
        let whole = |group: &&Group| group.degree() == self.job.parallel.tensor;
        let groups = layout.groups.iter().filter(whole);
        groups.into_iter().all(|group| {
            let first = nominal.group(group.replica, group.stage).unwrap();
            group.partitions == first.partitions
        })
    }

    fn lint(&self) {
        let workers = self.workers();
        let mut request = self.request(&workers);
        request.fresh = self.plan.fresh;
        let violations = check(&request, &self.plan);
        assert!(violations.is_empty(), "{violations:#?}");
    }

    /// Every member holds exactly what it owns; others are gone.
    pub fn commit(&mut self, step: Step) {
        let layout = &self.plan.layout;
        let workers = layout.members().map(|(_, member)| member.worker.clone());
        self.holdings = workers.zip(layout.holdings(step).map(|(_, holding)| holding)).collect();
    }

    /// The bytes that must move, by the min-cut formula: a group can keep no more units of an axis than, for any set of
    /// its slots, the places of that set and the units held by the others. Independent of the planner's search. And the bytes that
    /// a whole group moves above that to become nominal.
    pub fn bytes_to_move(&self) -> (u64, u64) {
        let newest = self.newest();
        let live = |worker: &WorkerKey, stage: StageId| {
            let holding = self.holdings.get(worker);
            let layers = self.job.stage_layers(stage);
            let first = |holding: &Holding| {
                let held = holding.units.iter().filter(|(_, units)| !units.is_empty());
                held.filter_map(|(axis, _)| axis.layer).next().unwrap_or(0)
            };
            holding
                .filter(|holding| !holding.is_empty() && holding.step == newest)
                .filter(|holding| layers.contains(&first(holding)))
        };
        let (mut bytes, mut above) = (0, 0);
        for group in &self.plan.layout.groups {
            let workers: Vec<_> = group.slots.iter().flatten().map(|member| &member.worker).collect();
            let new = workers.iter().filter(|worker| live(worker, group.stage).is_none()).count();
            bytes += new as u64 * self.job.replicated_bytes(group.stage);
            for (axis, sets) in group.partitions.iter() {
                let units = self.job.model.units(axis.family);
                let held: Vec<BTreeSet<u32>> = workers
                    .iter()
                    .map(|worker| {
                        live(worker, group.stage)
                            .map(|holding| holding.of(*axis).iter().collect())
                            .unwrap_or_default()
                    })
                    .collect();
                let full = workers.len() == group.slots.len();
                let degree = workers.len() as u32;
                let places = |set: u32| {
                    let of = |slot: &usize| set >> slot & 1 == 1;
                    if full {
                        return (0..workers.len()).filter(of).map(|slot| sets[slot].len()).sum::<u32>();
                    }
                    set.count_ones() * (units / degree) + set.count_ones().min(units % degree)
                };
                let others = |set: u32| {
                    let outside = held.iter().enumerate().filter(|(slot, _)| set >> slot & 1 == 0);
                    outside.flat_map(|(_, units)| units).collect::<BTreeSet<_>>().len() as u32
                };
                let kept = (0..1_u32 << degree).map(|set| places(set) + others(set)).min().unwrap();
                let unit = self.job.unit_bytes(group.stage, axis.family);
                bytes += u64::from(units - kept) * unit;
                if full {
                    let own = sets.iter().zip(&held);
                    let own = own.map(|(own, held)| own.iter().filter(|unit| held.contains(unit)).count());
                    above += (u64::from(kept) - own.sum::<usize>() as u64) * unit;
                }
            }
        }
        (bytes, above)
    }
}

pub fn worker(place: Place, incarnation: u64) -> WorkerKey {
    WorkerKey { gpu: GpuId(format!("GPU-{place}")), incarnation: Incarnation(incarnation) }
}
