//! What is trained: a decoder of about as many parameters as asked for, and a text to go with it.

use super::RecoveryArgs;
use crate::bench::job::{OPTIMIZER, count};
use crate::failure::Failure;
use reknit_layout::JobSpec;
use reknit_layout::job::{
    BatchPolicy, BatchSpec, CheckpointSpec, DataSpec, Dtype, ModelKind, ModelSpec, ParallelSpec,
    RecoverySpec, RunSpec,
};
use std::path::{Path, PathBuf};

pub(super) const NAME: &str = "bench";
const LAYERS: u32 = 6;
const HEAD_DIM: u32 = 32;
/// Shares of a step that 2, 3, 4 and 6 replicas can divide.
const SAMPLES: u32 = 12;
/// A step of 10 million parameters takes some 0.15 s on two cores.
const SEQ_LEN: u32 = 32;
const TEXT_BYTES: usize = 4 << 20;
/// Of a cluster on one machine.
const MOST_PARAMS: u64 = 2_000_000_000;

/// `10m` or `10000000`.
pub(super) fn params(text: &str) -> Result<u64, String> {
    let lower = text.to_lowercase();
    let (digits, unit) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 1e3),
        Some(b'm') => (&lower[..lower.len() - 1], 1e6),
        Some(b'b') => (&lower[..lower.len() - 1], 1e9),
        Some(_) | None => (lower.as_str(), 1.0),
    };
    let number: f64 = digits.parse().map_err(|_| "give a number, such as 10m or 250k".to_owned())?;
    let params = number * unit;
    if (1.0..=MOST_PARAMS as f64).contains(&params) {
        Ok(params as u64)
    } else {
        Err(format!("allowed are 1 to {}b", MOST_PARAMS / 1_000_000_000))
    }
}

/// Six layers, as wide as comes nearest: 384 for 10 million. It has 12 heads then and 16 blocks of the feed-forward part.
fn model(params: u64, tensor: u32) -> ModelSpec {
    let wide = |width: u32| {
        let hidden = width * 2 * HEAD_DIM;
        ModelSpec {
            kind: ModelKind::Decoder,
            layers: LAYERS,
            hidden,
            heads: hidden / HEAD_DIM,
            kv_heads: hidden / HEAD_DIM,
            head_dim: None,
            // The nearest to 8/3 of the width in whole blocks.
            ffn: (hidden * 8 / 3).next_multiple_of(64),
            ffn_block: 64,
            vocab: 256,
            vocab_block: 16,
            seq_len: SEQ_LEN,
            tie_embeddings: false,
            dtype: Dtype::F32,
            dropout: 0.0,
            recompute: false,
        }
    };
    // Every slot needs a unit of each family.
    let models = (tensor.div_ceil(2)..=256).map(wide);
    let off = |model: &ModelSpec| (count(model) as f64 / params as f64).ln().abs();
    models.min_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or_else(|| wide(tensor))
}

pub(super) fn spec(args: &RecoveryArgs, text: &Path) -> Result<JobSpec, Failure> {
    let file = text.to_str().map(glob::Pattern::escape);
    let file = file.ok_or_else(|| Failure::Usage("TMPDIR: its name is no text; set another".to_owned()))?;
    let global = SAMPLES.next_multiple_of(args.data);
    Ok(JobSpec {
        name: NAME.to_owned(),
        model: model(args.params, args.tensor),
        parallel: ParallelSpec { data: args.data, tensor: args.tensor, pipeline: 1, min_tensor: 1 },
        // Each replica computes its share at once.
        batch: BatchSpec { global, micro: global, policy: BatchPolicy::KeepGlobal },
        optimizer: OPTIMIZER,
        data: DataSpec { files: vec![file], tokenizer: "bytes".to_owned() },
        recovery: RecoverySpec::default(),
        checkpoint: CheckpointSpec::default(),
        // It is stopped when all was seen.
        run: RunSpec { steps: 1_000_000_000, seed: 1 },
    })
}

/// A file of made-up words in the folder: what it says does not matter here, and every machine has it.
pub(super) fn text(folder: &Path) -> Result<PathBuf, Failure> {
    let mut state = 1_u64;
    let mut text = Vec::with_capacity(TEXT_BYTES);
    while text.len() < TEXT_BYTES {
        // Knuth's MMIX generator; its high bits are the good ones.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let letter = (state >> 33) % 32;
        text.push(if letter < 26 { b'a' + letter as u8 } else { b' ' });
    }
    let path = folder.join("words.txt");
    std::fs::write(&path, text).map_err(Failure::failed(path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts() {
        assert_eq!(params("10m"), Ok(10_000_000));
        assert_eq!(params("2.5K"), Ok(2_500));
        assert_eq!(params("77"), Ok(77));
        for wrong in ["", "m", "ten", "-1m", "3b", "nan"] {
            assert!(params(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn models_are_about_as_large_as_asked() {
        for params in [1_000_000, 10_000_000, 100_000_000_u64] {
            let got = count(&model(params, 2)) as f64 / params as f64;
            assert!((0.7..1.4).contains(&got), "{params}: {got}");
        }
        assert_eq!((model(10_000_000, 2).hidden, model(10_000_000, 2).ffn), (384, 1024));
    }
}
