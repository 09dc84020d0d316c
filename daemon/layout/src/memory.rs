//! What a slot keeps in the memory of its GPU.
//!
//! With `e` bytes a value (4, or 8 in f64), `n = micro * seq_len` tokens in a micro-batch and, of the stage, `L`
//! layers:
//!
//! **State**, a parameter of an owned unit or a replicated one: weight, gradient and both moments, `4 e`; in bf16 too,
//! whose weights are kept in f32 and rounded when they are used.
//!
//! **Activations** of one micro-batch, in values, as the worker's model keeps them from forward to backward. A
//! slot's widths are those of its units: `a` its query heads, `q` the width of their results, `p` that of queries,
//! keys and values, `f` FFN columns, `v` vocabulary rows.
//!
//! | what | values |
//! |---|---|
//! | residual stream before each block and after the last | `(2 L + 1) n hidden` |
//! | each norm, with a factor a token | `2 L n (hidden + 1)` |
//! | attention of a layer: queries, keys, values; results; weights | `n p + n q + a micro seq_len^2` |
//! | FFN of a layer: gate and up; their product | `3 n f` |
//! | last stage: the final norm; exponentials; largest, sum and target a token; row of the target (16 bytes) | `n (hidden + 1) + n v + 3 n` |
//! | gradients of the stream and of a norm | `2 n hidden` |
//! | with dropout: the stream's gradient without what is dropped | `n hidden` |
//! | of the wider and the narrower intermediates of a block | `n max(p, 2 f) + n max(q, f)` |
//! | a mean for each row of attention weights; partial sums of a norm's gradient | `n a + n / 32 hidden` |
//! | rotary angles | `seq_len head_dim` |
//!
//! With `recompute` the norms, attention and FFN count once and not for each layer.
//!
//! And 4 bytes for each token of the text. A stage of several keeps the micro-batches that are on their way through those after
//! it (one forward, one backward in turn): the rows of the table up to the last stage's (with `recompute` the residual
//! stream and the last stage's), and the text, count `min(stages - stage, micro-batches of the step)` times. Not
//! counted: 3 MiB a thread for packed matrices, what communicators and libraries keep for themselves, and the shard that a
//! worker holds beside its new one while slices move.

use crate::job::ModelSpec;
use crate::{Axis, DraftError, Group, JobSpec, Partitions, Place, Slot, StageId, Topology, Units};
use std::collections::HashMap;
use std::sync::Arc;

/// Tokens over which a norm's gradient is summed at once.
const NORM_ROWS: u128 = 32;
/// Bytes for the row of a target, which may be on another GPU.
const TARGET_ROW: u128 = 16;

/// Bytes that an active slot of the group keeps; 0 for an inactive one. `u64::MAX` stands for all that cannot be
/// counted.
pub fn slot_bytes(job: &JobSpec, group: &Group, slot: Slot) -> u64 {
    if !matches!(group.slots.get(slot.0 as usize), Some(Some(_))) {
        return 0;
    }
    let bytes = state_bytes(job, group, slot) + activation_bytes(job, group, slot);
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// The place that needs most, the first of equals, and its bytes; `None` when nobody trains.
pub fn most(job: &JobSpec, groups: &[Group]) -> Option<(Place, u64)> {
    // Groups that are split alike need the same.
    let mut known: HashMap<(*const Partitions, StageId), (u64, Slot)> = HashMap::new();
    let mut most: Option<(Place, u64)> = None;
    for group in groups.iter().filter(|group| group.degree() > 0) {
        let (needs, slot) =
            *known.entry((Arc::as_ptr(&group.partitions), group.stage)).or_insert_with(|| {
                let slots = group.active().into_iter().map(|slot| (slot_bytes(job, group, slot), slot));
                slots.rev().max_by_key(|(needs, _)| *needs).unwrap_or_default()
            });
        if most.is_none_or(|(_, most)| needs > most) {
            most = Some((group.place(slot), needs));
        }
    }
    most
}

/// Whether every slot fits the memory of a GPU, where that is known.
///
/// # Errors
/// [`DraftError::Memory`] for the place that needs [`most`].
pub(crate) fn fits(job: &JobSpec, topology: &Topology, groups: &[Group]) -> Result<(), DraftError> {
    let Some(limit) = topology.gpu_memory else {
        return Ok(());
    };
    match most(job, groups) {
        Some((place, needs)) if needs > limit => Err(DraftError::Memory { place, needs, limit }),
        Some(_) | None => Ok(()),
    }
}

/// Units that the slot owns of the axis.
fn units(group: &Group, axis: Axis, slot: Slot) -> u128 {
    let sets = group.partitions.get(&axis);
    sets.and_then(|sets| sets.get(slot.0 as usize)).map_or(0, Units::len).into()
}

/// Weights, gradients and moments.
fn state_bytes(job: &JobSpec, group: &Group, slot: Slot) -> u128 {
    let dtype = job.model.dtype;
    let each = u128::from(dtype.state_bytes() + dtype.gradient_bytes());
    let owned = group
        .partitions
        .keys()
        .map(|axis| units(group, *axis, slot) * u128::from(job.unit_params(group.stage, axis.family)));
    let replicated = job.replicated_bytes(group.stage) / dtype.state_bytes();
    (owned.sum::<u128>() + u128::from(replicated)) * each
}

/// What the micro-batches on their way leave from forward to backward, and the buffers of backward.
fn activation_bytes(job: &JobSpec, group: &Group, slot: Slot) -> u128 {
    let model = &job.model;
    let (micro, seq_len) = (u128::from(job.batch.micro), u128::from(model.seq_len));
    let (tokens, hidden) = (micro * seq_len, u128::from(model.hidden));
    let last = job.is_last(group.stage);
    let layers = job.stage_layers(group.stage);
    let blocks = 2 * layers.len() as u128;

    // What one micro-batch leaves, and what is there once for all.
    let mut values = (blocks + 1) * tokens * hidden;
    let mut buffers = 2 * tokens * hidden;
    let (mut remade, mut wide, mut narrow, mut heads) = ([0; 2], 0, 0, 0);
    for layer in layers {
        let attn = Attention::new(model, units(group, Axis::attn(layer), slot));
        let ffn = units(group, Axis::ffn(layer), slot) * u128::from(model.ffn_block);
        let attention = tokens * (attn.projected + attn.results) + attn.heads * micro * seq_len * seq_len;
        if model.recompute {
            remade = [remade[0].max(attention), remade[1].max(tokens * 3 * ffn)];
        } else {
            values += 2 * tokens * (hidden + 1) + attention + tokens * 3 * ffn;
        }
        (wide, narrow) = (wide.max(attn.projected).max(2 * ffn), narrow.max(attn.results).max(ffn));
        heads = heads.max(attn.heads);
    }
    if model.recompute {
        buffers += tokens * (hidden + 1) + remade[0] + remade[1];
    }
    let mut bytes = micro * (seq_len + 1) * 4;
    if last {
        let rows = units(group, Axis::vocab(), slot) * u128::from(model.vocab_block);
        values += tokens * (hidden + 1 + rows + 3);
        bytes += tokens * TARGET_ROW;
    }
    if model.dropout > 0.0 {
        buffers += tokens * hidden;
    }
    buffers += tokens * (wide + narrow + heads) + tokens.div_ceil(NORM_ROWS) * hidden;
    buffers += seq_len * u128::from(model.head_dim());
    let value = u128::from(model.dtype.gradient_bytes());
    let under_way = (job.parallel.pipeline - group.stage.0).min(job.batch.global.div_ceil(job.batch.micro));
    u128::from(under_way) * (bytes + values * value) + buffers * value
}

/// Widths of the attention of some units.
struct Attention {
    heads: u128,
    /// Queries, keys and values of a token.
    projected: u128,
    /// What the heads make of a token.
    results: u128,
}

impl Attention {
    fn new(model: &ModelSpec, units: u128) -> Self {
        let (queries, dim) = (u128::from(model.heads / model.kv_heads), u128::from(model.head_dim()));
        Self {
            heads: units * queries,
            projected: units * (queries + 2) * dim,
            results: units * queries * dim,
        }
    }
}

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The size for people, such as `81.25 GiB`, rounded up.
pub(crate) fn at_least(bytes: u64) -> String {
    size(bytes, u128::div_ceil)
}

/// The size for people, rounded down: below [`at_least`] of anything larger.
pub(crate) fn at_most(bytes: u64) -> String {
    size(bytes, |hundredths, unit| hundredths / unit)
}

fn size(bytes: u64, round: impl Fn(u128, u128) -> u128) -> String {
    let (unit, name) = if bytes < GIB { (MIB, "MiB") } else { (GIB, "GiB") };
    let hundredths = round(u128::from(bytes) * 100, unit.into());
    format!("{}.{:02} {name}", hundredths / 100, hundredths % 100)
}
