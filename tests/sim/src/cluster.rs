//! The job and the cluster that is simulated: two tensor groups of the same size, a node for each.

use crate::memory::BATCH;
use reknit_engine::{GpuReport, HealthClass, JobName, Timeouts};
use reknit_layout::job::*;
use reknit_layout::{GpuId, JobSpec, NodeName};

pub(crate) const NODES: usize = 2;
pub(crate) const DAEMONS: usize = 3;

/// Short, so that runs end soon.
pub(crate) const TIMEOUTS: Timeouts =
    Timeouts { operation_ms: 1_000, rejoin_hold_ms: 200, start_ms: 5_000, rebuild_ms: 1_500 };

pub(crate) fn job_name() -> JobName {
    JobName("demo".to_owned())
}

pub(crate) fn spec(tensor: u32) -> JobSpec {
    JobSpec {
        name: job_name().0,
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
        run: RunSpec { steps: 1_000_000, seed: 1 },
    }
}

pub(crate) fn node_name(node: usize) -> NodeName {
    NodeName(format!("node-{node}"))
}

/// Numbered through the nodes.
pub(crate) fn gpu_name(gpu: usize, tensor: u32) -> GpuId {
    GpuId(format!("g{}{}", gpu / tensor as usize, gpu % tensor as usize))
}

pub(crate) fn gpus_of(node: usize, tensor: u32) -> Vec<GpuReport> {
    (0..tensor)
        .map(|index| GpuReport {
            gpu: gpu_name(node * tensor as usize + index as usize, tensor),
            index,
            name: "model".to_owned(),
            memory_bytes: 1 << 30,
            health: HealthClass::Healthy,
            cause: String::new(),
            action: String::new(),
            shards_readable: true,
        })
        .collect()
}
