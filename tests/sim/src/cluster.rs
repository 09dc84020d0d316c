//! What is simulated: nodes and their GPUs, where they are, and the jobs.

use crate::memory::BATCH;
use reknit_engine::{GpuReport, HealthClass, JobName, Timeouts};
use reknit_layout::job::*;
use reknit_layout::{GpuId, JobSpec, NodeName, Topology, WorkerKey};

/// In the soak; a story has one.
pub(crate) const DAEMONS: usize = 3;

/// Short, so that runs end soon.
pub const TIMEOUTS: Timeouts =
    Timeouts { operation_ms: 1_000, rejoin_hold_ms: 200, start_ms: 5_000, rebuild_ms: 2_000 };

/// More steps than any run takes.
pub const ENDLESS: u64 = 1_000_000;

#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// GPUs of each node.
    pub nodes: Vec<u32>,
    /// As the daemons are configured.
    pub topology: Topology,
    /// In the order in which they are submitted.
    pub jobs: Vec<JobSpec>,
}

impl Cluster {
    /// Two groups of the same size, a node for each, and one job.
    pub fn pair(tensor: u32) -> Self {
        let jobs = vec![spec("demo", tensor, ENDLESS)];
        Self { nodes: vec![tensor, tensor], topology: Topology::default(), jobs }
    }

    pub fn gpus(&self) -> usize {
        self.nodes.iter().sum::<u32>() as usize
    }
}

/// A worker of a job: jobs number their workers on their own.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Who {
    pub job: JobName,
    pub key: WorkerKey,
}

impl Who {
    pub fn new(job: &JobName, key: &WorkerKey) -> Self {
        Self { job: job.clone(), key: key.clone() }
    }

    /// Of the same job.
    pub(crate) fn peer(&self, key: &WorkerKey) -> Self {
        Self::new(&self.job, key)
    }
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {}", self.key, self.job)
    }
}

/// TP `tensor` x DP 2, 12 units in each family. Jobs of other names have other seeds.
pub fn spec(name: &str, tensor: u32, steps: u64) -> JobSpec {
    JobSpec {
        name: name.to_owned(),
        model: ModelSpec {
            kind: ModelKind::Decoder,
            layers: 1,
            hidden: 48,
            heads: 12,
            kv_heads: 12,
            head_dim: None,
            ffn: 96,
            ffn_block: 8,
            vocab: 240,
            vocab_block: 20,
            seq_len: 16,
            tie_embeddings: true,
            dtype: Dtype::F32,
            dropout: 0.0,
            recompute: false,
        },
        parallel: ParallelSpec { data: 2, tensor, pipeline: 1, min_tensor: 1 },
        batch: BatchSpec { global: BATCH as u32, micro: 1, policy: BatchPolicy::KeepGlobal },
        optimizer: OptimizerSpec {
            lr: 0.001,
            warmup_steps: 0,
            decay_steps: 0,
            min_lr: 0.0001,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.0,
            grad_clip: 1.0,
        },
        data: DataSpec { files: vec!["*.txt".to_owned()], tokenizer: "bytes".to_owned() },
        recovery: RecoverySpec::default(),
        checkpoint: CheckpointSpec::default(),
        run: RunSpec { steps, seed: name.bytes().map(u64::from).sum() },
    }
}

/// How many GPUs a job trains on when nothing is lost.
pub(crate) fn size(spec: &JobSpec) -> usize {
    (spec.parallel.data * spec.parallel.tensor) as usize
}

pub fn node(index: u32) -> NodeName {
    NodeName(format!("node-{index}"))
}

pub fn gpu(node: u32, index: u32) -> GpuId {
    GpuId(format!("g{node}{index}"))
}

pub(crate) fn node_name(index: usize) -> NodeName {
    node(index as u32)
}

pub(crate) fn node_number(node: &NodeName) -> usize {
    node.0.trim_start_matches("node-").parse().unwrap_or_default()
}

pub(crate) fn gpus_of(node: u32, gpus: u32) -> Vec<GpuReport> {
    let report = |index| GpuReport {
        gpu: gpu(node, index),
        index,
        name: "model".to_owned(),
        health: HealthClass::Healthy,
        cause: String::new(),
        action: String::new(),
        shards_readable: true,
    };
    (0..gpus).map(report).collect()
}
