//! The SwiGLU feed-forward block over the owned units.

use crate::Real;
use crate::cpu::kernels::{size, swiglu, swiglu_backward};
use crate::linear::add_weight_gradients;
use crate::pass::{Extent, Scratch};
use crate::shard::AxisShard;

/// What the backward pass needs again.
#[derive(Debug, Default)]
pub(crate) struct Saved<T> {
    /// A row a token: for each unit its gate columns, then its up columns.
    gate_up: Vec<T>,
    /// A row a token: `silu(gate) * up`.
    active: Vec<T>,
}

/// Makes what [`project`] and the backward pass need.
pub(crate) fn activate<T: Real>(
    extent: &Extent<'_, T>,
    axis: &AxisShard<T>,
    normed: &[T],
    saved: &mut Saved<T>,
) {
    let team = extent.team;
    let (tokens, block) = (extent.tokens(), extent.shape.ffn_block);
    let narrow = axis.units.len() as usize * block;
    let Saved { gate_up, active } = saved;
    size(gate_up, tokens * 2 * narrow);
    size(active, tokens * narrow);
    axis.input.expand(extent.of(2 * narrow), normed, gate_up);
    swiglu(team, gate_up, block, active);
}

/// This rank's part of the block's result, to be summed over the group.
pub(crate) fn project<T: Real>(
    extent: &Extent<'_, T>,
    axis: &AxisShard<T>,
    saved: &Saved<T>,
    out: &mut Vec<T>,
) {
    let rows = axis.units.len() as usize * extent.shape.ffn_block;
    size(out, extent.tokens() * extent.shape.hidden);
    axis.output.contract(extent.of(rows), &saved.active, out);
}

/// Writes this rank's part of the gradient of `normed`, to be summed over the group. [`weight_gradients`] is to follow.
pub(crate) fn backward<T: Real>(
    extent: &Extent<'_, T>,
    axis: &AxisShard<T>,
    saved: &Saved<T>,
    d_out: &[T],
    scratch: &mut Scratch<T>,
) {
    let (tokens, hidden, block) = (extent.tokens(), extent.shape.hidden, extent.shape.ffn_block);
    let narrow = axis.units.len() as usize * block;
    let Saved { gate_up, .. } = saved;
    let Scratch { d_normed, d_wide: d_gate_up, d_narrow: d_active, .. } = scratch;
    let team = extent.team;

    size(d_active, tokens * narrow);
    axis.output.contract_d_x(extent.of(narrow), d_out, d_active);
    size(d_gate_up, tokens * 2 * narrow);
    swiglu_backward(team, gate_up, block, d_active, d_gate_up);
    size(d_normed, tokens * hidden);
    axis.input.expand_d_x(extent.of(2 * narrow), d_gate_up, d_normed);
}

/// Adds the gradients of the weights, after [`backward`] and with its scratch: they are final then, as far as this batch goes.
pub(crate) fn weight_gradients<T: Real>(
    extent: &Extent<'_, T>,
    axis: &mut AxisShard<T>,
    normed: &[T],
    saved: &Saved<T>,
    d_out: &[T],
    scratch: &Scratch<T>,
) {
    let rows = axis.units.len() as usize * extent.shape.ffn_block;
    let [(_, of_input), (_, of_output)] = axis.with_gradients();
    add_weight_gradients(extent.of(rows), &saved.active, d_out, of_output);
    add_weight_gradients(extent.of(2 * rows), &scratch.d_wide, normed, of_input);
}
