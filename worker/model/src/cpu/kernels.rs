//! Everything but matrix products, as loops over rows or ranges. Each sum has a fixed order, so a repeated run is bit-equal.

use crate::Real;
use crate::cpu::versions::versions;
use crate::team::Team;
use std::cmp::min;

/// Independent partial sums of a reduction: enough for the widest vector registers.
const LANES: usize = 16;

/// Rows that a thread takes at once.
const ROWS: usize = 32;

/// Values that a thread takes at once.
const RANGE: usize = 1 << 14;

/// Parts of a long sum, each added up by one thread: not by their number, so that the sum does not depend on it.
const PARTS: usize = 64;

/// Makes the buffer `len` long. What it held may stay: the caller overwrites all of it.
pub(crate) fn size<T: Real>(buffer: &mut Vec<T>, len: usize) {
    buffer.resize(len, T::ZERO);
}

#[inline(always)]
fn total<T: Real>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (x, y) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += x[lane] * y[lane];
        }
    }
    let rest = a_rest.iter().zip(b_rest);
    rest.fold(total(lanes), |sum, (&x, &y)| sum + x * y)
}

#[inline(always)]
fn maximum<T: Real>(values: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
        }
    }
    lanes.into_iter().chain(rest.iter().copied()).fold(T::NEG_INFINITY, T::max)
}

/// Replaces each value by `exp(value - shift)`.
#[inline(always)]
fn exp_shifted<T: Real>(values: &mut [T], shift: T) {
    for value in values {
        *value = (*value - shift).exp();
    }
}

#[inline(always)]
fn sum<T: Real>(values: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += chunk[lane];
        }
    }
    rest.iter().fold(total(lanes), |sum, &x| sum + x)
}

versions! {
    /// The sum of squares, accumulated in `f64`.
    fn squares_of<T>(values: &[T]) -> f64 {
        let mut lanes = [0.0; LANES];
        let (chunks, rest) = values.as_chunks::<LANES>();
        for chunk in chunks {
            for lane in 0..LANES {
                let x = chunk[lane].to_f64();
                lanes[lane] += x * x;
            }
        }
        rest.iter().fold(total(lanes), |sum, x| sum + x.to_f64() * x.to_f64())
    }

    /// Adds in place, on this thread.
    pub(crate) fn add_range<T>(target: &mut [T], other: &[T]) {
        for (value, &more) in target.iter_mut().zip(other) {
            *value += more;
        }
    }

    /// Writes the values rounded to bf16.
    pub(crate) fn round<T>(values: &[T], out: &mut [T]) {
        for (out, &value) in out.iter_mut().zip(values) {
            *out = value.to_bf16();
        }
    }

    /// The largest of each row.
    fn maxima_of<T>(rows: &[T], maxima: &mut [T]) {
        let width = rows.len() / maxima.len();
        for (row, out) in maxima.iter_mut().enumerate() {
            *out = maximum(&rows[row * width..(row + 1) * width]);
        }
    }

    /// Replaces each row by the exponentials of its values less its maximum, and gives their sums.
    fn exponentials_of<T>(rows: &mut [T], maxima: &[T], sums: &mut [T]) {
        let width = rows.len() / maxima.len();
        for (row, (&shift, out)) in maxima.iter().zip(sums).enumerate() {
            let values = &mut rows[row * width..(row + 1) * width];
            exp_shifted(values, shift);
            *out = sum(values);
        }
    }

    /// Multiplies each row by `scale` over its sum.
    fn share_rows<T>(rows: &mut [T], sums: &[T], scale: T) {
        let width = rows.len() / sums.len();
        for (row, &sum) in sums.iter().enumerate() {
            let factor = scale / sum;
            for value in &mut rows[row * width..(row + 1) * width] {
                *value *= factor;
            }
        }
    }

    /// Softmax of the first `i + 1` values of each row `i` of a square; the rest of the row becomes zero.
    pub(crate) fn causal_softmax<T>(square: &mut [T], side: usize) {
        for (position, row) in square.chunks_exact_mut(side).enumerate() {
            let live = position + 1;
            // Whole lanes: what is beyond the diagonal counts for nothing.
            let padded = min(live.next_multiple_of(LANES), side);
            row[live..padded].fill(T::NEG_INFINITY);
            let shift = maximum(&row[..padded]);
            exp_shifted(&mut row[..padded], shift);
            row[live..].fill(T::ZERO);
            let row = &mut row[..padded];
            let inverse = T::ONE / sum(row);
            for value in row {
                *value *= inverse;
            }
        }
    }

    /// Of a row of weights the gradients before the softmax, in place: `weight * (sum - shift) * factor`.
    pub(crate) fn softmax_gradient<T>(weights: &mut [T], sums: &[T], shift: T, factor: T) {
        for (weight, &sum) in weights.iter_mut().zip(sums) {
            *weight = *weight * (sum - shift) * factor;
        }
    }

    fn norm_rows<T>(x: &[T], gain: &[T], normed: &mut [T], inverse: &mut [T]) {
        let width = gain.len();
        let (share, epsilon) = (T::from_f64(1.0 / width as f64), T::from_f64(NORM_EPSILON));
        let rows = x.chunks_exact(width).zip(normed.chunks_exact_mut(width));
        for ((row, out), inverse) in rows.zip(inverse) {
            *inverse = T::ONE / (dot(row, row) * share + epsilon).sqrt();
            for ((value, &x), &gain) in out.iter_mut().zip(row).zip(gain) {
                *value = x * *inverse * gain;
            }
        }
    }

    /// Adds to `d_x` and replaces `d_gain`.
    fn norm_rows_backward<T>(of: (&[T], &[T], &[T]), d_normed: &[T], d_x: &mut [T], d_gain: &mut [T]) {
        let (x, gain, inverse) = of;
        let width = gain.len();
        let share = T::from_f64(1.0 / width as f64);
        d_gain.fill(T::ZERO);
        let rows = x.chunks_exact(width).zip(d_normed.chunks_exact(width));
        for ((row, d_row), (d_out, &inverse)) in rows.zip(d_x.chunks_exact_mut(width).zip(inverse)) {
            let mut lanes = [T::ZERO; LANES];
            let (chunks, rest) = split(row, d_row, gain);
            for (x, d, gain) in chunks {
                for lane in 0..LANES {
                    lanes[lane] += d[lane] * gain[lane] * x[lane];
                }
            }
            let pulled = rest.fold(total(lanes), |sum, (x, d, gain)| sum + d * gain * x);
            let pull = pulled * share * inverse * inverse;
            let outputs = d_out.iter_mut().zip(d_gain.iter_mut());
            for (((d_out, d_gain), (&x, &d)), &gain) in outputs.zip(row.iter().zip(d_row)).zip(gain) {
                *d_out += inverse * (d * gain - x * pull);
                *d_gain += d * x * inverse;
            }
        }
    }

    /// `out = silu(gate) * up` of each unit, whose gate columns come before its up columns.
    fn swiglu_units<T>(pairs: &[T], block: usize, out: &mut [T]) {
        for (pair, out) in pairs.chunks_exact(2 * block).zip(out.chunks_exact_mut(block)) {
            let (gate, up) = pair.split_at(block);
            for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate / (T::ONE + (-gate).exp()) * up;
            }
        }
    }

    /// Gradients of gates and ups, given that of the result.
    fn swiglu_units_backward<T>(pairs: &[T], block: usize, d_out: &[T], d_pairs: &mut [T]) {
        let units = pairs.chunks_exact(2 * block).zip(d_out.chunks_exact(block));
        for ((pair, d_out), d_pair) in units.zip(d_pairs.chunks_exact_mut(2 * block)) {
            let ((gate, up), (d_gate, d_up)) = (pair.split_at(block), d_pair.split_at_mut(block));
            let inputs = gate.iter().zip(up).zip(d_out);
            for (((&gate, &up), &d_out), (d_gate, d_up)) in inputs.zip(d_gate.iter_mut().zip(d_up)) {
                let sigmoid = T::ONE / (T::ONE + (-gate).exp());
                *d_gate = d_out * up * sigmoid * (T::ONE + gate * (T::ONE - sigmoid));
                *d_up = d_out * gate * sigmoid;
            }
        }
    }

    /// Turns a head: pairs of the first and the second half by the position's angles, or back.
    pub(crate) fn turn<T>(head: &mut [T], angles: (&[T], &[T]), sign: T) {
        let (first, second) = head.split_at_mut(head.len() / 2);
        let angles = angles.0.iter().zip(angles.1);
        for ((a, b), (&cosine, &sine)) in first.iter_mut().zip(second).zip(angles) {
            let (x, y, sine) = (*a, *b, sign * sine);
            *a = x * cosine - y * sine;
            *b = y * cosine + x * sine;
        }
    }

    /// The product of two rows.
    pub(crate) fn row_product<T>(a: &[T], b: &[T]) -> T {
        dot(a, b)
    }
}

const NORM_EPSILON: f64 = 1e-5;

/// Whole lanes of three rows, and what is left.
#[inline(always)]
#[allow(clippy::type_complexity)]
fn split<'a, T: Real>(
    a: &'a [T],
    b: &'a [T],
    c: &'a [T],
) -> (impl Iterator<Item = (&'a [T; LANES], &'a [T; LANES], &'a [T; LANES])>, impl Iterator<Item = (T, T, T)>)
{
    let ((a, a_rest), (b, b_rest), (c, c_rest)) =
        (a.as_chunks::<LANES>(), b.as_chunks::<LANES>(), c.as_chunks::<LANES>());
    let chunks = a.iter().zip(b).zip(c).map(|((a, b), c)| (a, b, c));
    let rest = a_rest.iter().zip(b_rest).zip(c_rest).map(|((&a, &b), &c)| (a, b, c));
    (chunks, rest)
}

/// The sum of squares, accumulated in `f64`.
pub(crate) fn squares<T: Real>(team: &Team, values: &[T]) -> f64 {
    let mut parts = [0.0; PARTS];
    let part = values.len().div_ceil(PARTS).max(RANGE);
    team.each(values.chunks(part).zip(&mut parts), |(values, out)| *out = squares_of(values));
    parts.into_iter().sum()
}

pub(crate) fn fill<T: Real>(team: &Team, values: &mut [T], value: T) {
    team.each(values.chunks_mut(RANGE), |values| values.fill(value));
}

pub(crate) fn add<T: Real>(team: &Team, target: &mut [T], other: &[T]) {
    team.each(target.chunks_mut(RANGE).zip(other.chunks(RANGE)), |(target, other)| add_range(target, other));
}

/// The largest of each row; nothing in a row without values.
pub(crate) fn maxima<T: Real>(team: &Team, rows: &[T], maxima: &mut [T]) {
    let width = rows.len() / maxima.len();
    if width == 0 {
        return maxima.fill(T::NEG_INFINITY);
    }
    team.each(rows.chunks(ROWS * width).zip(maxima.chunks_mut(ROWS)), |(rows, maxima)| {
        maxima_of(rows, maxima)
    });
}

/// Replaces each row by the exponentials of its values less its maximum, and gives their sums.
pub(crate) fn exponentials<T: Real>(team: &Team, rows: &mut [T], maxima: &[T], sums: &mut [T]) {
    let width = rows.len() / maxima.len();
    if width == 0 {
        return sums.fill(T::ZERO);
    }
    let chunks = rows.chunks_mut(ROWS * width).zip(maxima.chunks(ROWS)).zip(sums.chunks_mut(ROWS));
    team.each(chunks, |((rows, maxima), sums)| exponentials_of(rows, maxima, sums));
}

/// Multiplies each row by `scale` over its sum.
pub(crate) fn shares<T: Real>(team: &Team, rows: &mut [T], sums: &[T], scale: T) {
    let width = rows.len() / sums.len();
    if width > 0 {
        let chunks = rows.chunks_mut(ROWS * width).zip(sums.chunks(ROWS));
        team.each(chunks, |(rows, sums)| share_rows(rows, sums, scale));
    }
}

/// Root-mean-square norm of each row: `x / sqrt(mean(x^2) + 1e-5) * gain`. `inverse` gets one factor a row.
pub(crate) fn rms_norm<T: Real>(team: &Team, x: &[T], gain: &[T], normed: &mut [T], inverse: &mut [T]) {
    let chunk = ROWS * gain.len();
    let rows = x.chunks(chunk).zip(normed.chunks_mut(chunk)).zip(inverse.chunks_mut(ROWS));
    team.each(rows, |((x, normed), inverse)| norm_rows(x, gain, normed, inverse));
}

/// Length of the buffer for partial sums that [`rms_norm_backward`] wants.
pub(crate) fn norm_partials(rows: usize, width: usize) -> usize {
    rows.div_ceil(ROWS) * width
}

/// Adds to `d_x` and `d_gain`, given the gradient of the norm's output and what the forward pass saw.
pub(crate) fn rms_norm_backward<T: Real>(
    team: &Team,
    (x, gain, inverse): (&[T], &[T], &[T]),
    d_normed: &[T],
    (d_x, d_gain): (&mut [T], &mut [T]),
    partials: &mut [T],
) {
    let width = gain.len();
    let inputs = x.chunks(ROWS * width).zip(inverse.chunks(ROWS)).zip(d_normed.chunks(ROWS * width));
    let outputs = d_x.chunks_mut(ROWS * width).zip(partials.chunks_mut(width));
    team.each(inputs.zip(outputs), |(((x, inverse), d_normed), (d_x, d_gain))| {
        norm_rows_backward((x, gain, inverse), d_normed, d_x, d_gain);
    });
    for partial in partials.chunks(width) {
        add_range(d_gain, partial);
    }
}

/// `silu(gate) * up`. Rows are whole numbers of units, each with `block` gates and as many ups.
pub(crate) fn swiglu<T: Real>(team: &Team, pairs: &[T], block: usize, out: &mut [T]) {
    let chunk = RANGE.next_multiple_of(block);
    let chunks = pairs.chunks(2 * chunk).zip(out.chunks_mut(chunk));
    team.each(chunks, |(pairs, out)| swiglu_units(pairs, block, out));
}

/// Gradients of gates and ups, given that of [`swiglu`]'s result.
pub(crate) fn swiglu_backward<T: Real>(
    team: &Team,
    pairs: &[T],
    block: usize,
    d_out: &[T],
    d_pairs: &mut [T],
) {
    let chunk = RANGE.next_multiple_of(block);
    let chunks = pairs.chunks(2 * chunk).zip(d_out.chunks(chunk)).zip(d_pairs.chunks_mut(2 * chunk));
    team.each(chunks, |((pairs, d_out), d_pairs)| swiglu_units_backward(pairs, block, d_out, d_pairs));
}

/// Cosines and sines of the rotary positions (arXiv 2104.09864): base 10000, the first half of a head paired with the second.
#[derive(Debug, Default)]
pub(crate) struct Rotary<T> {
    positions: usize,
    half: usize,
    cosines: Vec<T>,
    sines: Vec<T>,
}

impl<T: Real> Rotary<T> {
    const BASE: f64 = 10000.0;

    pub(crate) fn prepare(&mut self, positions: usize, head_dim: usize) {
        let half = head_dim / 2;
        if (self.positions, self.half) == (positions, half) {
            return;
        }
        let angles = (0..positions).flat_map(|position| {
            (0..half).map(move |i| position as f64 * Self::BASE.powf(-2.0 * i as f64 / head_dim as f64))
        });
        let (cosines, sines) =
            angles.map(|angle| (T::from_f64(angle.cos()), T::from_f64(angle.sin()))).unzip();
        *self = Self { positions, half, cosines, sines };
    }

    /// Turns each head in the row of a token at `position`.
    pub(crate) fn forward(&self, heads: &mut [T], position: usize) {
        self.turn(heads, position, T::ONE);
    }

    /// The transpose of the turn, which is the turn back.
    pub(crate) fn backward(&self, heads: &mut [T], position: usize) {
        self.turn(heads, position, -T::ONE);
    }

    fn turn(&self, heads: &mut [T], position: usize, sign: T) {
        let row = position * self.half..(position + 1) * self.half;
        let angles = (&self.cosines[row.clone()], &self.sines[row]);
        for head in heads.chunks_exact_mut(2 * self.half) {
            turn(head, angles, sign);
        }
    }
}
