//! The SwiGLU feed-forward block over the owned units.

use crate::Real;
use crate::cpu::gemm::{View, ViewMut};
use crate::cpu::kernels::{size, swiglu, swiglu_backward};
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

/// This rank's part of the block's result, to be summed over the group.
pub(crate) fn forward<T: Real>(
    extent: &Extent<'_, T>,
    axis: &AxisShard<T>,
    normed: &[T],
    saved: &mut Saved<T>,
    out: &mut Vec<T>,
) {
    let (tokens, hidden, block) = (extent.tokens(), extent.shape.hidden, extent.shape.ffn_block);
    let narrow = axis.units.len() as usize * block;
    let Saved { gate_up, active } = saved;
    size(gate_up, tokens * 2 * narrow);
    size(active, tokens * narrow);
    T::gemm(
        T::ONE,
        View::new(normed, tokens, hidden),
        View::new(&axis.input.weights, 2 * narrow, hidden).t(),
        T::ZERO,
        ViewMut::new(gate_up, tokens, 2 * narrow),
    );
    // A row is a whole number of units, so units can be walked without regard to rows.
    for (pair, active) in gate_up.chunks_exact(2 * block).zip(active.chunks_exact_mut(block)) {
        let (gate, up) = pair.split_at(block);
        swiglu(gate, up, active);
    }
    size(out, tokens * hidden);
    T::gemm(
        T::ONE,
        View::new(active, tokens, narrow),
        View::new(&axis.output.weights, narrow, hidden),
        T::ZERO,
        ViewMut::new(out, tokens, hidden),
    );
}

/// Adds the gradients of the weights and writes this rank's part of the gradient of `normed`, to be summed over the group.
pub(crate) fn backward<T: Real>(
    extent: &Extent<'_, T>,
    axis: &mut AxisShard<T>,
    normed: &[T],
    saved: &Saved<T>,
    d_out: &[T],
    scratch: &mut Scratch<T>,
) {
    let (tokens, hidden, block) = (extent.tokens(), extent.shape.hidden, extent.shape.ffn_block);
    let narrow = axis.units.len() as usize * block;
    let Saved { gate_up, active } = saved;
    let Scratch { d_normed, d_wide: d_gate_up, d_narrow: d_active, d_square: _ } = scratch;

    size(d_active, tokens * narrow);
    T::gemm(
        T::ONE,
        View::new(d_out, tokens, hidden),
        View::new(&axis.output.weights, narrow, hidden).t(),
        T::ZERO,
        ViewMut::new(d_active, tokens, narrow),
    );
    T::gemm(
        T::ONE,
        View::new(active, tokens, narrow).t(),
        View::new(d_out, tokens, hidden),
        T::ONE,
        ViewMut::new(&mut axis.output.gradients, narrow, hidden),
    );
    size(d_gate_up, tokens * 2 * narrow);
    let units = gate_up.chunks_exact(2 * block).zip(d_active.chunks_exact(block));
    for ((pair, d_active), d_pair) in units.zip(d_gate_up.chunks_exact_mut(2 * block)) {
        swiglu_backward(pair.split_at(block), d_active, d_pair.split_at_mut(block));
    }
    T::gemm(
        T::ONE,
        View::new(d_gate_up, tokens, 2 * narrow).t(),
        View::new(normed, tokens, hidden),
        T::ONE,
        ViewMut::new(&mut axis.input.gradients, 2 * narrow, hidden),
    );
    size(d_normed, tokens * hidden);
    T::gemm(
        T::ONE,
        View::new(d_gate_up, tokens, 2 * narrow),
        View::new(&axis.input.weights, 2 * narrow, hidden),
        T::ZERO,
        ViewMut::new(d_normed, tokens, hidden),
    );
}
