//! The sharded decoder-only transformer: explicit forward and backward passes, AdamW, and the movement of its state.
//!
//! A rank holds a [`Shard`]: the units it owns of every axis, and the replicated norms. Pre-norm blocks with RMSNorm,
//! rotary positions, grouped-query attention, SwiGLU, optionally tied embeddings and dropout in the residual stream; no biases.
//!
//! Ranks of a tensor-parallel group exchange sums through [`TensorParallel`], which the caller provides. Every rank
//! makes the same calls in the same order, whatever it owns: also a rank without a single unit of an axis.
//!
//! With `dtype = "bf16"` the passes see each matrix rounded to bf16, while the weights that are kept, moved and updated
//! have all their bits; norms, activations, gradients and sums are not rounded. With `recompute` only the residual stream
//! is kept from forward to backward, and what else a block needs is made again, to the same bits.
//!
//! # How a unit is stored
//! The split dimension of every matrix is outermost, so a unit is a range of whole rows of `hidden` values, and
//! wherever a unit's values travel they come in this order, each row-major:
//!
//! | family | input rows | output rows |
//! |---|---|---|
//! | attn | query rows of its heads, key rows, value rows | its rows of the transposed output projection |
//! | ffn | gate rows, up rows | its rows of the transposed down projection |
//! | vocab | embedding rows | head rows (none when tied) |
//!
//! Replicated values: for each layer the norm before attention, then the norm before the FFN; last the final norm.

// A unit travels as little-endian bytes, copied without conversion.
#[cfg(target_endian = "big")]
compile_error!("reknit-model exchanges its buffers as little-endian bytes and has no big-endian conversion");

mod arrivals;
mod attention;
mod batch;
mod cpu;
mod dropout;
mod ffn;
mod init;
mod linear;
mod optimizer;
mod pages;
mod parallel;
mod pass;
mod random;
mod real;
mod reshard;
mod shape;
mod shard;
mod sink;
mod team;
mod vocab;

pub use arrivals::ArrivalError;
pub use batch::{Batch, BatchError};
pub use optimizer::learning_rate;
pub use parallel::{Alone, TensorParallel};
pub use pass::StepError;
pub use real::Real;
pub use shard::{Shard, ShardError};
pub use sink::{Bucket, GradientSink};
pub use team::Team;
