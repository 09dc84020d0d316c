//! Grouped-query causal attention over the owned units.

use crate::Real;
use crate::cpu::gemm::{View, ViewMut};
use crate::cpu::kernels::{size, softmax, softmax_backward};
use crate::linear::{Extents, add_weight_gradients};
use crate::pass::{Extent, Scratch};
use crate::shard::AxisShard;

/// Query rows handled at once: rows of a block need no key beyond the block's end.
const QUERY_BLOCK: usize = 64;

/// What the backward pass needs again.
#[derive(Debug, Default)]
pub(crate) struct Saved<T> {
    /// A row a token: for each unit its queries, key and value, the positions already turned in.
    qkv: Vec<T>,
    /// For each sample and query head a square: row i the weights of position i. Only what the causal blocks cover is written.
    probabilities: Vec<T>,
    /// A row a token: the heads' results before the output projection.
    mixed: Vec<T>,
}

/// Where things lie in the rows of `qkv` and `mixed`.
struct Heads {
    units: usize,
    queries: usize,
    dim: usize,
}

/// One query head of one sample.
struct Head {
    /// Offset of its query, its unit's key and value at the sample's first position in `qkv`; of its result in `mixed`; of its square.
    query: usize,
    key: usize,
    value: usize,
    mixed: usize,
    square: usize,
}

impl Heads {
    fn new<T>(extent: &Extent<'_, T>, axis: &AxisShard<T>) -> Self {
        Self { units: axis.units.len() as usize, queries: extent.shape.queries, dim: extent.shape.head_dim }
    }

    fn qkv_width(&self) -> usize {
        self.units * (self.queries + 2) * self.dim
    }

    fn mixed_width(&self) -> usize {
        self.units * self.queries * self.dim
    }

    /// Every query head of every sample, in the order of their squares.
    fn each(&self, samples: usize, seq_len: usize) -> impl Iterator<Item = Head> {
        let all = (0..samples).flat_map(move |sample| {
            (0..self.units).flat_map(move |unit| (0..self.queries).map(move |query| (sample, unit, query)))
        });
        all.enumerate().map(move |(number, (sample, unit, query))| {
            let row = sample * seq_len * self.qkv_width();
            let unit_start = row + unit * (self.queries + 2) * self.dim;
            let key = unit_start + self.queries * self.dim;
            Head {
                query: unit_start + query * self.dim,
                key,
                value: key + self.dim,
                mixed: sample * seq_len * self.mixed_width() + (unit * self.queries + query) * self.dim,
                square: number * seq_len * seq_len,
            }
        })
    }

    /// Applies `turn` to every query and key of the rows, with its position.
    fn turn<T>(&self, rows: &mut [T], seq_len: usize, turn: impl Fn(&mut [T], usize)) {
        if rows.is_empty() {
            return;
        }
        for (token, row) in rows.chunks_exact_mut(self.qkv_width()).enumerate() {
            for unit in row.chunks_exact_mut((self.queries + 2) * self.dim) {
                let (turned, _value) = unit.split_at_mut((self.queries + 1) * self.dim);
                for head in turned.chunks_exact_mut(self.dim) {
                    turn(head, token % seq_len);
                }
            }
        }
    }
}

/// First and end row of each causal block.
fn blocks(seq_len: usize) -> impl Iterator<Item = (usize, usize)> {
    let starts = (0..seq_len).step_by(QUERY_BLOCK);
    starts.map(move |start| (start, seq_len.min(start + QUERY_BLOCK)))
}

fn scale<T: Real>(head_dim: usize) -> T {
    T::from_f64(1.0 / (head_dim as f64).sqrt())
}

/// This rank's part of the block's result, to be summed over the group.
pub(crate) fn forward<T: Real>(
    extent: &Extent<'_, T>,
    axis: &AxisShard<T>,
    normed: &[T],
    saved: &mut Saved<T>,
    out: &mut Vec<T>,
) {
    let (tokens, seq_len, hidden) = (extent.tokens(), extent.seq_len, extent.shape.hidden);
    let heads = Heads::new(extent, axis);
    let (wide, narrow, dim) = (heads.qkv_width(), heads.mixed_width(), heads.dim);
    let Saved { qkv, probabilities, mixed } = saved;
    size(qkv, tokens * wide);
    size(mixed, tokens * narrow);
    size(probabilities, extent.samples * heads.units * heads.queries * seq_len * seq_len);

    axis.input.expand(Extents { tokens, rows: wide, hidden }, normed, qkv);
    heads.turn(qkv, seq_len, |head, position| extent.rotary.forward(head, position));
    for head in heads.each(extent.samples, seq_len) {
        for (start, end) in blocks(seq_len) {
            let square = &mut probabilities[head.square + start * seq_len..];
            T::gemm(
                scale(dim),
                View::strided(&qkv[head.query + start * wide..], end - start, dim, wide),
                View::strided(&qkv[head.key..], end, dim, wide).t(),
                T::ZERO,
                ViewMut::strided(square, end - start, end, seq_len),
            );
            for (row, position) in square.chunks_mut(seq_len).zip(start..end) {
                softmax(&mut row[..end], position + 1);
            }
            T::gemm(
                T::ONE,
                View::strided(square, end - start, end, seq_len),
                View::strided(&qkv[head.value..], end, dim, wide),
                T::ZERO,
                ViewMut::strided(&mut mixed[head.mixed + start * narrow..], end - start, dim, narrow),
            );
        }
    }
    size(out, tokens * hidden);
    axis.output.contract(Extents { tokens, rows: narrow, hidden }, mixed, out);
}

/// Writes this rank's part of the gradient of `normed`, to be summed over the group. [`weight_gradients`] is to follow.
pub(crate) fn backward<T: Real>(
    extent: &Extent<'_, T>,
    axis: &AxisShard<T>,
    saved: &Saved<T>,
    d_out: &[T],
    scratch: &mut Scratch<T>,
) {
    let (tokens, seq_len, hidden) = (extent.tokens(), extent.seq_len, extent.shape.hidden);
    let heads = Heads::new(extent, axis);
    let (wide, narrow, dim) = (heads.qkv_width(), heads.mixed_width(), heads.dim);
    let Saved { qkv, probabilities, .. } = saved;
    let Scratch { d_normed, d_wide: d_qkv, d_narrow: d_mixed, d_square } = scratch;

    size(d_mixed, tokens * narrow);
    axis.output.contract_d_x(Extents { tokens, rows: narrow, hidden }, d_out, d_mixed);

    size(d_qkv, tokens * wide);
    d_qkv.fill(T::ZERO);
    size(d_square, QUERY_BLOCK.min(seq_len) * seq_len);
    for head in heads.each(extent.samples, seq_len) {
        for (start, end) in blocks(seq_len) {
            let rows = end - start;
            let square = &probabilities[head.square + start * seq_len..];
            let d_result = View::strided(&d_mixed[head.mixed + start * narrow..], rows, dim, narrow);
            T::gemm(
                T::ONE,
                View::strided(square, rows, end, seq_len).t(),
                d_result,
                T::ONE,
                ViewMut::strided(&mut d_qkv[head.value..], end, dim, wide),
            );
            T::gemm(
                T::ONE,
                d_result,
                View::strided(&qkv[head.value..], end, dim, wide).t(),
                T::ZERO,
                ViewMut::strided(d_square, rows, end, seq_len),
            );
            let pairs = square.chunks(seq_len).zip(d_square.chunks_exact_mut(seq_len));
            for (probabilities, d_row) in pairs.take(rows) {
                softmax_backward(&probabilities[..end], &mut d_row[..end], scale(dim));
            }
            let d_scores = View::strided(d_square, rows, end, seq_len);
            T::gemm(
                T::ONE,
                d_scores,
                View::strided(&qkv[head.key..], end, dim, wide),
                T::ZERO,
                ViewMut::strided(&mut d_qkv[head.query + start * wide..], rows, dim, wide),
            );
            T::gemm(
                T::ONE,
                d_scores.t(),
                View::strided(&qkv[head.query + start * wide..], rows, dim, wide),
                T::ONE,
                ViewMut::strided(&mut d_qkv[head.key..], end, dim, wide),
            );
        }
    }
    heads.turn(d_qkv, seq_len, |head, position| extent.rotary.backward(head, position));

    size(d_normed, tokens * hidden);
    axis.input.expand_d_x(Extents { tokens, rows: wide, hidden }, d_qkv, d_normed);
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
    let (tokens, hidden) = (extent.tokens(), extent.shape.hidden);
    let heads = Heads::new(extent, axis);
    let [(_, of_input), (_, of_output)] = axis.with_gradients();
    let rows = heads.mixed_width();
    add_weight_gradients(Extents { tokens, rows, hidden }, &saved.mixed, d_out, of_output);
    let rows = heads.qkv_width();
    add_weight_gradients(Extents { tokens, rows, hidden }, &scratch.d_wide, normed, of_input);
}
