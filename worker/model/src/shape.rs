//! Sizes of the model, as the loops want them.

use crate::dropout::Dropout;
use reknit_layout::Family;
use reknit_layout::job::{Dtype, ModelSpec};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) head_dim: usize,
    /// Query heads of an attention unit.
    pub(crate) queries: usize,
    pub(crate) ffn_block: usize,
    pub(crate) vocab_block: usize,
    pub(crate) vocab: usize,
    pub(crate) tied: bool,
    /// The passes see the matrices rounded to bf16.
    pub(crate) rounded: bool,
    pub(crate) recompute: bool,
    pub(crate) dropout: Option<Dropout>,
}

impl Shape {
    pub(crate) fn new(model: &ModelSpec) -> Self {
        Self {
            layers: model.layers as usize,
            hidden: model.hidden as usize,
            head_dim: model.head_dim() as usize,
            queries: (model.heads / model.kv_heads) as usize,
            ffn_block: model.ffn_block as usize,
            vocab_block: model.vocab_block as usize,
            vocab: model.vocab as usize,
            tied: model.tie_embeddings,
            rounded: model.dtype == Dtype::Bf16,
            recompute: model.recompute,
            dropout: Dropout::new(model.dropout),
        }
    }

    /// Input rows and output rows of one unit; see the crate's table.
    pub(crate) fn unit_rows(&self, family: Family) -> (usize, usize) {
        match family {
            Family::Attn => ((self.queries + 2) * self.head_dim, self.queries * self.head_dim),
            Family::Ffn => (2 * self.ffn_block, self.ffn_block),
            Family::Vocab if self.tied => (self.vocab_block, 0),
            Family::Vocab => (self.vocab_block, self.vocab_block),
        }
    }

    pub(crate) fn replicated_len(&self) -> usize {
        (2 * self.layers + 1) * self.hidden
    }
}
