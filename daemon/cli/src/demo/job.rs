//! The demo's job.

use super::data::Chosen;
use reknit_layout::JobSpec;
use reknit_layout::job::{
    BatchPolicy, BatchSpec, CheckpointSpec, DataSpec, Dtype, ModelKind, ModelSpec, OptimizerSpec,
    ParallelSpec, RecoverySpec, RunSpec,
};

pub(crate) const NAME: &str = "demo";
/// Replicas; each fills one node.
pub(crate) const REPLICAS: u32 = 2;
/// Slots of a group, and GPUs of a node.
pub(crate) const TENSOR: u32 = 4;

/// A transformer of about 3 million parameters. Both split families have 12 units, which 4 and 3 divide.
pub(crate) fn spec(data: &Chosen, steps: u64, seed: u64, cores: usize) -> JobSpec {
    let global = global_batch(cores);
    let escaped = data.files.iter().filter_map(|file| file.to_str()).map(glob::Pattern::escape);
    JobSpec {
        name: NAME.to_owned(),
        model: ModelSpec {
            kind: ModelKind::Decoder,
            layers: 4,
            hidden: 192,
            heads: 12,
            kv_heads: 12,
            head_dim: Some(16),
            ffn: 768,
            ffn_block: 64,
            vocab: 256,
            vocab_block: 16,
            seq_len: 64,
            tie_embeddings: false,
            dtype: Dtype::F32,
            dropout: 0.0,
            recompute: false,
        },
        parallel: ParallelSpec { data: REPLICAS, tensor: TENSOR, pipeline: 1, min_tensor: 2 },
        // Each replica computes its share at once, so that shares can be divided to the sample.
        batch: BatchSpec { global, micro: global, policy: BatchPolicy::KeepGlobal },
        optimizer: OptimizerSpec {
            lr: 3e-3,
            warmup_steps: (steps / 10).max(1),
            decay_steps: steps,
            min_lr: 3e-4,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            grad_clip: 1.0,
        },
        data: DataSpec { files: escaped.collect(), tokenizer: "bytes".to_owned() },
        recovery: RecoverySpec::default(),
        checkpoint: CheckpointSpec::default(),
        run: RunSpec { steps, seed },
    }
}

/// Samples per step. A step shall take about as long on any machine, so that its steps tell how long a GPU is away.
/// Eight workers use no more than eight cores.
fn global_batch(cores: usize) -> u32 {
    match cores {
        0..4 => 16,
        4..8 => 32,
        8.. => 64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_layout::Family;
    use std::path::PathBuf;

    fn job() -> JobSpec {
        let files = vec![PathBuf::from("/data/[draft].txt")];
        spec(&Chosen { files, bytes: 1 << 20 }, 120, 7, 2)
    }

    #[test]
    fn both_families_divide_by_four_and_by_three() {
        for family in [Family::Attn, Family::Ffn] {
            assert_eq!(job().model.units(family), 12);
        }
    }

    #[test]
    fn a_name_with_the_letters_of_a_pattern_is_taken_literally() {
        let pattern = glob::Pattern::new(&job().data.files[0]).unwrap();
        assert!(pattern.matches("/data/[draft].txt"));
    }

    #[test]
    fn the_job_is_a_valid_job_file() {
        assert_eq!(JobSpec::parse(&job().to_toml(), "demo").unwrap(), job());
    }
}
