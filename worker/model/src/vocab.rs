//! The two ends of the model, split by vocabulary rows: embedding, head and cross-entropy.

use crate::Real;
use crate::cpu::kernels::{add_range, exponentials as to_exponentials, maxima as row_maxima, shares, size};
use crate::linear::add_weight_gradients;
use crate::parallel::TensorParallel;
use crate::pass::{Extent, Scratch};
use crate::shape::Shape;
use crate::shard::AxisShard;

/// What the backward pass needs again.
#[derive(Debug, Default)]
pub(crate) struct Saved<T> {
    /// For each target the stored row of its token, if it is on this rank.
    target_rows: Vec<Option<usize>>,
    /// A row a token: the exponentials of the shifted logits of the owned vocabulary.
    exponentials: Vec<T>,
    maxima: Vec<T>,
    /// For each token the sum of exponentials, then for each token the target's shifted logit.
    sums: Vec<T>,
}

/// The stored rows of the tokens that are on this rank.
fn rows<T>(
    shape: &Shape,
    axis: &AxisShard<T>,
    tokens: impl Iterator<Item = u32>,
) -> impl Iterator<Item = Option<usize>> {
    let block = shape.vocab_block;
    tokens.map(move |token| {
        let unit = axis.units.position(token / block as u32)?;
        Some(unit as usize * block + token as usize % block)
    })
}

/// This rank's part of the embedded tokens: zeros where another rank owns the token.
pub(crate) fn embed<T: Real>(
    extent: &Extent<'_, T>,
    axis: &AxisShard<T>,
    inputs: impl Iterator<Item = u32>,
    out: &mut Vec<T>,
) {
    let hidden = extent.shape.hidden;
    size(out, extent.tokens() * hidden);
    let tokens = rows(extent.shape, axis, inputs);
    for (out, row) in out.chunks_exact_mut(hidden).zip(tokens) {
        match row {
            Some(row) => {
                out.copy_from_slice(&axis.input.weights[row * hidden..(row + 1) * hidden]);
                if extent.shape.rounded {
                    out.iter_mut().for_each(|x| *x = x.to_bf16());
                }
            }
            None => out.fill(T::ZERO),
        }
    }
}

/// Adds the embedding's gradients.
pub(crate) fn embed_backward<T: Real>(
    extent: &Extent<'_, T>,
    axis: &mut AxisShard<T>,
    inputs: impl Iterator<Item = u32>,
    d_out: &[T],
) {
    let hidden = extent.shape.hidden;
    let AxisShard { units, gradients, .. } = axis;
    let block = extent.shape.vocab_block;
    for (d_row, token) in d_out.chunks_exact(hidden).zip(inputs) {
        if let Some(unit) = units.position(token / block as u32) {
            let row = unit as usize * block + token as usize % block;
            add_range(&mut gradients[row * hidden..(row + 1) * hidden], d_row);
        }
    }
}

/// The sum of the cross-entropies of all tokens, the same on every rank.
pub(crate) fn cross_entropy<T: Real, P: TensorParallel<T>>(
    extent: &Extent<'_, T>,
    axis: &AxisShard<T>,
    normed: &[T],
    targets: impl Iterator<Item = u32>,
    saved: &mut Saved<T>,
    group: &mut P,
) -> Result<f64, P::Error> {
    let (team, tokens) = (extent.team, extent.tokens());
    let width = axis.units.len() as usize * extent.shape.vocab_block;
    let Saved { target_rows, exponentials, maxima, sums } = saved;
    target_rows.clear();
    target_rows.extend(rows(extent.shape, axis, targets));

    size(exponentials, tokens * width);
    let head = if extent.shape.tied { &axis.input } else { &axis.output };
    head.expand(extent.of(width), normed, exponentials);
    size(maxima, tokens);
    row_maxima(team, exponentials, maxima);
    group.all_reduce_max(maxima)?;

    size(sums, 2 * tokens);
    let (of_tokens, of_targets) = sums.split_at_mut(tokens);
    for (token, (out, row)) in of_targets.iter_mut().zip(target_rows.iter()).enumerate() {
        *out = row.map_or(T::ZERO, |row| exponentials[token * width + row] - maxima[token]);
    }
    to_exponentials(team, exponentials, maxima, of_tokens);
    group.all_reduce_sum(sums)?;
    let (sums, targets) = sums.split_at(tokens);
    let losses = sums.iter().zip(targets).map(|(&sum, &target)| sum.ln() - target);
    Ok(losses.map(T::to_f64).sum())
}

/// Writes, for `scale` times the loss, this rank's part of the gradient of `normed`, to be summed over the group.
/// [`head_gradients`] is to follow.
pub(crate) fn cross_entropy_backward<T: Real>(
    extent: &Extent<'_, T>,
    axis: &AxisShard<T>,
    scale: T,
    saved: &mut Saved<T>,
    scratch: &mut Scratch<T>,
) {
    let (team, tokens, hidden) = (extent.team, extent.tokens(), extent.shape.hidden);
    let width = axis.units.len() as usize * extent.shape.vocab_block;
    // From exponentials to gradients of the logits, in place: they are not needed again.
    let Saved { target_rows, exponentials: d_logits, sums, .. } = saved;
    shares(team, d_logits, &sums[..tokens], scale);
    for (token, row) in target_rows.iter().enumerate() {
        if let Some(row) = row {
            d_logits[token * width + row] += -scale;
        }
    }
    let d_normed = &mut scratch.d_normed;
    size(d_normed, tokens * hidden);
    let head = if extent.shape.tied { &axis.input } else { &axis.output };
    head.expand_d_x(extent.of(width), d_logits, d_normed);
}

/// Adds the head's gradients, after [`cross_entropy_backward`].
pub(crate) fn head_gradients<T: Real>(
    extent: &Extent<'_, T>,
    axis: &mut AxisShard<T>,
    normed: &[T],
    saved: &Saved<T>,
) {
    let rows = axis.units.len() as usize * extent.shape.vocab_block;
    let [(_, of_input), (_, of_output)] = axis.with_gradients();
    let gradients = if extent.shape.tied { of_input } else { of_output };
    // What were exponentials are gradients of the logits by now.
    add_weight_gradients(extent.of(rows), &saved.exponentials, normed, gradients);
}
