//! Grouped-query causal attention over the owned units.

use crate::Real;
use crate::cpu::gemm::{Band, Store, banded};
use crate::cpu::kernels::{causal_softmax, row_product, size};
use crate::cpu::view::ViewMut;
use crate::linear::add_weight_gradients;
use crate::pass::{Extent, Scratch};
use crate::shard::AxisShard;

/// What the backward pass needs again.
#[derive(Debug, Default)]
pub(crate) struct Saved<T> {
    /// A row a token: for each unit its queries, key and value, the positions already turned in.
    qkv: Vec<T>,
    /// For each sample and query head a square: row i the weights of position i. The backward pass makes their
    /// gradients in place.
    squares: Vec<T>,
    /// A row a token: the heads' results before the output projection.
    mixed: Vec<T>,
}

/// How wide things are.
struct Heads {
    units: usize,
    queries: usize,
    dim: usize,
}

impl Heads {
    fn new<T>(extent: &Extent<'_, T>, axis: &AxisShard<T>) -> Self {
        Self { units: axis.units.len() as usize, queries: extent.shape.queries, dim: extent.shape.head_dim }
    }

    /// Columns of a unit's queries, key and value.
    fn unit_width(&self) -> usize {
        (self.queries + 2) * self.dim
    }

    fn qkv_width(&self) -> usize {
        self.units * self.unit_width()
    }

    /// Columns of a unit's results.
    fn unit_mixed(&self) -> usize {
        self.queries * self.dim
    }

    fn mixed_width(&self) -> usize {
        self.units * self.unit_mixed()
    }

    /// Columns that are turned: the queries and the key.
    fn turned(&self) -> usize {
        (self.queries + 1) * self.dim
    }

    fn scale<T: Real>(&self) -> T {
        T::from_f64(1.0 / (self.dim as f64).sqrt())
    }
}

/// Makes what [`project`] and the backward pass need. What a unit does in a sample is one piece of work for a thread.
pub(crate) fn attend<T: Real>(
    extent: &Extent<'_, T>,
    axis: &AxisShard<T>,
    normed: &[T],
    saved: &mut Saved<T>,
) {
    let Extent { team, rotary, samples, seq_len, .. } = *extent;
    let tokens = extent.tokens();
    let heads = Heads::new(extent, axis);
    let (wide, narrow, dim) = (heads.qkv_width(), heads.mixed_width(), heads.dim);
    let Saved { qkv, squares, mixed } = saved;
    size(qkv, tokens * wide);
    size(mixed, tokens * narrow);
    size(squares, samples * heads.units * heads.queries * seq_len * seq_len);

    axis.input.expand(extent.of(wide), normed, qkv);
    let square = seq_len * seq_len;
    let units = ViewMut::new(qkv, tokens, wide).pieces(seq_len, heads.unit_width());
    let results = ViewMut::new(mixed, tokens, narrow).pieces(seq_len, heads.unit_mixed());
    let work = units.zip(results).zip(squares.chunks_mut(heads.queries * square));
    team.each(work, |((mut qkv, mixed), squares)| {
        for position in 0..seq_len {
            rotary.forward(&mut qkv.row(position)[..heads.turned()], position);
        }
        let qkv = qkv.view();
        let key = qkv.piece(0, seq_len, heads.queries * dim, dim);
        let value = qkv.piece(0, seq_len, heads.turned(), dim);
        for ((query, mixed), square) in mixed.pieces(seq_len, dim).enumerate().zip(squares.chunks_mut(square))
        {
            let query = qkv.piece(0, seq_len, query * dim, dim);
            let mut scores = ViewMut::new(square, seq_len, seq_len);
            banded(heads.scale(), query, key.t(), Store::Replace, scores.reborrow(), Band::LowerResult);
            causal_softmax(square, seq_len);
            let weights = ViewMut::new(square, seq_len, seq_len);
            banded(T::ONE, weights.view(), value, Store::Replace, mixed, Band::LowerLeft);
        }
    });
}

/// This rank's part of the block's result, to be summed over the group.
pub(crate) fn project<T: Real>(
    extent: &Extent<'_, T>,
    axis: &AxisShard<T>,
    saved: &Saved<T>,
    out: &mut Vec<T>,
) {
    let rows = Heads::new(extent, axis).mixed_width();
    size(out, extent.tokens() * extent.shape.hidden);
    axis.output.contract(extent.of(rows), &saved.mixed, out);
}

/// Writes this rank's part of the gradient of `normed`, to be summed over the group. [`weight_gradients`] is to follow.
pub(crate) fn backward<T: Real>(
    extent: &Extent<'_, T>,
    axis: &AxisShard<T>,
    saved: &mut Saved<T>,
    d_out: &[T],
    scratch: &mut Scratch<T>,
) {
    let Extent { team, rotary, seq_len, .. } = *extent;
    let (tokens, hidden) = (extent.tokens(), extent.shape.hidden);
    let heads = Heads::new(extent, axis);
    let (wide, narrow, dim) = (heads.qkv_width(), heads.mixed_width(), heads.dim);
    let Saved { qkv, squares, mixed } = saved;
    let Scratch { d_normed, d_wide: d_qkv, d_narrow: d_mixed, means, .. } = scratch;

    size(d_mixed, tokens * narrow);
    axis.output.contract_d_x(extent.of(narrow), d_out, d_mixed);

    size(d_qkv, tokens * wide);
    size(means, tokens * heads.units * heads.queries);
    let square = seq_len * seq_len;
    let units = ViewMut::new(qkv, tokens, wide).pieces(seq_len, heads.unit_width());
    let d_units = ViewMut::new(d_qkv, tokens, wide).pieces(seq_len, heads.unit_width());
    let results = ViewMut::new(mixed, tokens, narrow).pieces(seq_len, heads.unit_mixed());
    let d_results = ViewMut::new(d_mixed, tokens, narrow).pieces(seq_len, heads.unit_mixed());
    let squares = squares.chunks_mut(heads.queries * square).zip(means.chunks_mut(heads.queries * seq_len));
    let work = units.zip(d_units).zip(results.zip(d_results)).zip(squares);
    team.each(work, |(((qkv, mut d_qkv), (mixed, d_mixed)), (squares, means))| {
        let qkv = qkv.view();
        let key = qkv.piece(0, seq_len, heads.queries * dim, dim);
        let value = qkv.piece(0, seq_len, heads.turned(), dim);
        let (d_queries, d_rest) = d_qkv.reborrow().split_cols(heads.queries * dim);
        let (mut d_key, mut d_value) = d_rest.split_cols(dim);
        let d_queries = d_queries.pieces(seq_len, dim);
        let each = squares.chunks_mut(square).zip(means.chunks_mut(seq_len)).zip(d_queries);
        for (number, ((square, means), d_query)) in each.enumerate() {
            let of_head = number * dim;
            let store = if number == 0 { Store::Replace } else { Store::Add };
            let query = qkv.piece(0, seq_len, of_head, dim);
            let (result, d_result) = (
                mixed.view().piece(0, seq_len, of_head, dim),
                d_mixed.view().piece(0, seq_len, of_head, dim),
            );
            let mut weights = ViewMut::new(square, seq_len, seq_len);
            banded(T::ONE, weights.view().t(), d_result, store, d_value.reborrow(), Band::UpperLeft);
            // What the softmax's gradient takes off each row, the weights' sum of their own gradients, can be had from the results.
            for (row, mean) in means.iter_mut().enumerate() {
                *mean = row_product(result.row(row), d_result.row(row));
            }
            let into = Store::Softmax { shift: means, factor: heads.scale() };
            banded(T::ONE, d_result, value.t(), into, weights.reborrow(), Band::LowerResult);
            let d_scores = weights.view();
            banded(T::ONE, d_scores, key, Store::Replace, d_query, Band::LowerLeft);
            banded(T::ONE, d_scores.t(), query, store, d_key.reborrow(), Band::UpperLeft);
        }
        for position in 0..seq_len {
            rotary.backward(&mut d_qkv.row(position)[..heads.turned()], position);
        }
    });

    size(d_normed, tokens * hidden);
    axis.input.expand_d_x(extent.of(wide), d_qkv, d_normed);
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
    let heads = Heads::new(extent, axis);
    let [(_, of_input), (_, of_output)] = axis.with_gradients();
    let rows = heads.mixed_width();
    add_weight_gradients(extent.of(rows), &saved.mixed, d_out, of_output);
    let rows = heads.qkv_width();
    add_weight_gradients(extent.of(rows), &scratch.d_wide, normed, of_input);
}
