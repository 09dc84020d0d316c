//! The job file: what to train and how, as `reknit job submit` and `reknit plan` take it.

mod parse;
mod places;
mod trainable;
mod validate;

pub use crate::toml_file::Invalid;
pub use places::NoSuchPlace;

use crate::table::table;
use crate::{Axis, CheckpointId, Family};
use serde::{Deserialize, Serialize};

/// A complete, documented job file, as `reknit job example` prints it.
pub const EXAMPLE: &str = include_str!("job/example.toml");

/// A job file, parsed and checked. Serialises back to the same TOML.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    pub name: String,
    #[serde(deserialize_with = "table")]
    pub model: ModelSpec,
    #[serde(deserialize_with = "table")]
    pub parallel: ParallelSpec,
    #[serde(deserialize_with = "table")]
    pub batch: BatchSpec,
    #[serde(deserialize_with = "table")]
    pub optimizer: OptimizerSpec,
    #[serde(deserialize_with = "table")]
    pub data: DataSpec,
    #[serde(default, deserialize_with = "table")]
    pub recovery: RecoverySpec,
    #[serde(default, deserialize_with = "table")]
    pub checkpoint: CheckpointSpec,
    #[serde(deserialize_with = "table")]
    pub run: RunSpec,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    pub kind: ModelKind,
    pub layers: u32,
    pub hidden: u32,
    pub heads: u32,
    /// Attention units: each KV head goes with `heads / kv_heads` query heads.
    pub kv_heads: u32,
    /// Default `hidden / heads`.
    #[serde(default)]
    pub head_dim: Option<u32>,
    pub ffn: u32,
    pub ffn_block: u32,
    pub vocab: u32,
    pub vocab_block: u32,
    pub seq_len: u32,
    #[serde(default)]
    pub tie_embeddings: bool,
    #[serde(default)]
    pub dtype: Dtype,
    /// The share of the residual stream's values that is dropped behind the embedding and each block.
    #[serde(default)]
    pub dropout: f64,
    /// Only the residual stream is kept from the forward to the backward pass; the rest is computed again.
    #[serde(default)]
    pub recompute: bool,
}

impl ModelSpec {
    pub fn head_dim(&self) -> u32 {
        self.head_dim.unwrap_or(self.hidden / self.heads)
    }

    /// How many units the family has (in each layer, if it has layers).
    pub fn units(&self, family: Family) -> u32 {
        match family {
            Family::Attn => self.kv_heads,
            Family::Ffn => self.ffn / self.ffn_block,
            Family::Vocab => self.vocab / self.vocab_block,
        }
    }

    /// Every axis of the model, in a fixed order.
    pub fn axes(&self) -> Vec<Axis> {
        let layered = (0..self.layers).flat_map(|layer| [Axis::attn(layer), Axis::ffn(layer)]);
        layered.chain([Axis::vocab()]).collect()
    }

    /// Parameters in one unit of the family (in one layer, if it has layers).
    ///
    /// attn: rows of Q for the query heads, one row block each of K and V, and the matching rows of the
    /// transposed output projection. ffn: gate, up and transposed down. vocab: embedding rows, and head rows unless tied.
    pub fn unit_params(&self, family: Family) -> u64 {
        let (hidden, head_dim) = (u64::from(self.hidden), u64::from(self.head_dim()));
        match family {
            Family::Attn => {
                let queries = u64::from(self.heads / self.kv_heads);
                (2 * queries + 2) * head_dim * hidden
            }
            Family::Ffn => 3 * u64::from(self.ffn_block) * hidden,
            Family::Vocab => {
                let copies = if self.tie_embeddings { 1 } else { 2 };
                copies * u64::from(self.vocab_block) * hidden
            }
        }
    }

    /// Parameters that every rank holds: two norms a layer and the last one.
    pub fn replicated_params(&self) -> u64 {
        (2 * u64::from(self.layers) + 1) * u64::from(self.hidden)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelKind {
    /// Dense decoder-only transformer.
    Decoder,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    #[default]
    F32,
    Bf16,
    /// Test mode.
    F64,
}

impl Dtype {
    /// Bytes of one parameter with both Adam moments, which is what a reshard moves.
    ///
    /// With bf16 they are the f32 weights that the passes see rounded: 12 bytes as well.
    pub fn state_bytes(self) -> u64 {
        match self {
            Self::F32 | Self::Bf16 => 12,
            Self::F64 => 24,
        }
    }

    /// Bytes of one parameter's gradient. Those of bf16 weights are summed in f32.
    pub fn gradient_bytes(self) -> u64 {
        match self {
            Self::F32 | Self::Bf16 => 4,
            Self::F64 => 8,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParallelSpec {
    pub data: u32,
    pub tensor: u32,
    #[serde(default = "one")]
    pub pipeline: u32,
    /// A group with fewer active slots than this does not train.
    #[serde(default = "one")]
    pub min_tensor: u32,
}

fn one() -> u32 {
    1
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchSpec {
    /// Samples per optimizer step, over all replicas.
    pub global: u32,
    /// Samples per micro-batch of one replica.
    pub micro: u32,
    #[serde(default)]
    pub policy: BatchPolicy,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchPolicy {
    /// The global batch stays; samples are apportioned again so that the slowest replica is done earliest.
    #[default]
    KeepGlobal,
    /// A reduced replica takes fewer samples and the sum is weighted.
    Shrink,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSpec {
    pub lr: f64,
    pub warmup_steps: u64,
    pub decay_steps: u64,
    pub min_lr: f64,
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
    pub grad_clip: f64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSpec {
    /// Files or glob patterns, relative to the job file.
    pub files: Vec<String>,
    #[serde(default = "bytes")]
    pub tokenizer: String,
}

fn bytes() -> String {
    "bytes".to_owned()
}

/// What the data files consist of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tokens<'a> {
    /// Text, each byte of which is a token.
    Bytes,
    /// Token numbers of 16 or 32 bits, little-endian, and nothing else.
    U16,
    U32,
    /// Text, and the `tokenizer.json` that makes tokens of it.
    Text(&'a str),
}

impl Tokens<'_> {
    /// Bytes of a token in the files; `None`: tokens are made of them.
    pub fn width(self) -> Option<u64> {
        match self {
            Self::Bytes => Some(1),
            Self::U16 => Some(2),
            Self::U32 => Some(4),
            Self::Text(_) => None,
        }
    }
}

impl DataSpec {
    /// `None`: there is no such kind.
    pub fn tokens(&self) -> Option<Tokens<'_>> {
        match self.tokenizer.as_str() {
            "bytes" => Some(Tokens::Bytes),
            "u16" => Some(Tokens::U16),
            "u32" => Some(Tokens::U32),
            path => path.ends_with(".json").then_some(Tokens::Text(path)),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RecoverySpec {
    pub spares: u32,
    pub power_boost: bool,
    /// What to do about a worker that the others wait for and that does not move.
    pub on_hang: Reaction,
    /// What to do about a worker that is slower than its share of the work explains.
    pub on_straggler: Reaction,
}

impl Default for RecoverySpec {
    fn default() -> Self {
        Self { spares: 0, power_boost: false, on_hang: Reaction::Act, on_straggler: Reaction::Report }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reaction {
    /// Tell people: an event and an incident.
    Report,
    /// And take the worker out.
    Act,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointSpec {
    /// Empty: none.
    pub dir: String,
    pub every_steps: u64,
    /// How many complete ones are kept.
    pub keep: u32,
    /// What to do when units have no live holder.
    pub restore: Restore,
    /// The folder of the checkpoint to start from, in place of the seed. Empty: none.
    pub from: String,
}

impl Default for CheckpointSpec {
    fn default() -> Self {
        Self { dir: String::new(), every_steps: 0, keep: 3, restore: Restore::Ask, from: String::new() }
    }
}

impl CheckpointSpec {
    /// Where the job's checkpoints lie: a folder of its own below `dir`. `None`: it has none.
    pub fn folder(&self, job: &str) -> Option<String> {
        (!self.dir.is_empty()).then(|| format!("{}/{job}", self.dir.trim_end_matches('/')))
    }

    /// Which checkpoint `from` is, by the folder's name.
    pub fn origin(&self) -> Option<CheckpointId> {
        self.from.trim_end_matches('/').rsplit('/').next()?.parse().ok()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Restore {
    /// Wait: for a holder that comes back, or for an operator's word.
    Ask,
    /// Go back to the newest complete checkpoint at once.
    Act,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSpec {
    /// The job completes when this many steps are committed.
    pub steps: u64,
    pub seed: u64,
}
