//! Everything but matrix products, as plain loops. Each sum has a fixed order, so a repeated run is bit-equal.

use crate::Real;

/// Independent partial sums of a reduction: enough for the compiler to use vector registers.
const LANES: usize = 8;

/// Makes the buffer `len` long. What it held may stay: the caller overwrites all of it.
pub(crate) fn size<T: Real>(buffer: &mut Vec<T>, len: usize) {
    buffer.resize(len, T::ZERO);
}

pub(crate) fn add<T: Real>(target: &mut [T], other: &[T]) {
    for (value, &more) in target.iter_mut().zip(other) {
        *value += more;
    }
}

pub(crate) fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    let rest = rest.fold(T::ZERO, |sum, (&x, &y)| sum + x * y);
    for (x, y) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] += x[lane] * y[lane];
        }
    }
    lanes.into_iter().fold(rest, |sum, lane| sum + lane)
}

/// The sum of squares, accumulated in `f64`.
pub(crate) fn squares<T: Real>(values: &[T]) -> f64 {
    let mut lanes = [0.0; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder().iter().map(|x| x.to_f64() * x.to_f64());
    let rest: f64 = rest.sum();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x.to_f64() * x.to_f64();
        }
    }
    lanes.into_iter().sum::<f64>() + rest
}

pub(crate) fn maximum<T: Real>(values: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder().iter().copied();
    let rest = rest.fold(T::NEG_INFINITY, T::max);
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    lanes.into_iter().fold(rest, T::max)
}

/// Replaces each value by `exp(value - shift)` and returns their sum.
pub(crate) fn exp_shifted<T: Real>(values: &mut [T], shift: T) -> T {
    for value in values.iter_mut() {
        *value = (*value - shift).exp();
    }
    let mut lanes = [T::ZERO; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder().iter();
    let rest = rest.fold(T::ZERO, |sum, &x| sum + x);
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    lanes.into_iter().fold(rest, |sum, lane| sum + lane)
}

/// Softmax of the first `live` values; the rest becomes zero.
pub(crate) fn softmax<T: Real>(row: &mut [T], live: usize) {
    let (row, masked) = row.split_at_mut(live);
    masked.fill(T::ZERO);
    let sum = exp_shifted(row, maximum(row));
    let inverse = T::ONE / sum;
    for value in row {
        *value *= inverse;
    }
}

/// In place of `d_row` (gradient of the softmax's output): `scale` times the gradient of its input.
pub(crate) fn softmax_backward<T: Real>(probabilities: &[T], d_row: &mut [T], scale: T) {
    let mean = dot(probabilities, d_row);
    for (d, &p) in d_row.iter_mut().zip(probabilities) {
        *d = scale * p * (*d - mean);
    }
}

const NORM_EPSILON: f64 = 1e-5;

/// Root-mean-square norm of each row: `x / sqrt(mean(x^2) + 1e-5) * gain`. `inverse` gets one factor a row.
pub(crate) fn rms_norm<T: Real>(x: &[T], gain: &[T], normed: &mut [T], inverse: &mut [T]) {
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

/// Adds to `d_x` and `d_gain`, given the gradient of the norm's output and what the forward pass saw.
pub(crate) fn rms_norm_backward<T: Real>(
    (x, gain, inverse): (&[T], &[T], &[T]),
    d_normed: &[T],
    d_x: &mut [T],
    d_gain: &mut [T],
) {
    let width = gain.len();
    let share = T::from_f64(1.0 / width as f64);
    let mut d_scaled = vec![T::ZERO; width];
    let rows = x.chunks_exact(width).zip(d_normed.chunks_exact(width));
    for ((row, d_row), (d_out, &inverse)) in rows.zip(d_x.chunks_exact_mut(width).zip(inverse)) {
        for ((d, &out), &gain) in d_scaled.iter_mut().zip(d_row).zip(gain) {
            *d = out * gain;
        }
        let pull = dot(&d_scaled, row) * share * inverse * inverse;
        for ((d, &scaled), &x) in d_out.iter_mut().zip(&d_scaled).zip(row) {
            *d += inverse * (scaled - x * pull);
        }
        for ((d, &out), &x) in d_gain.iter_mut().zip(d_row).zip(row) {
            *d += out * x * inverse;
        }
    }
}

/// `out = silu(gate) * up`.
pub(crate) fn swiglu<T: Real>(gate: &[T], up: &[T], out: &mut [T]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (T::ONE + (-gate).exp()) * up;
    }
}

/// Gradients of gate and up, given the gradient of [`swiglu`]'s output.
pub(crate) fn swiglu_backward<T: Real>(
    (gate, up): (&[T], &[T]),
    d_out: &[T],
    (d_gate, d_up): (&mut [T], &mut [T]),
) {
    let inputs = gate.iter().zip(up).zip(d_out);
    for (((&gate, &up), &d_out), (d_gate, d_up)) in inputs.zip(d_gate.iter_mut().zip(d_up)) {
        let sigmoid = T::ONE / (T::ONE + (-gate).exp());
        *d_gate = d_out * up * sigmoid * (T::ONE + gate * (T::ONE - sigmoid));
        *d_up = d_out * gate * sigmoid;
    }
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

    /// Turns the head at `position`.
    pub(crate) fn forward(&self, head: &mut [T], position: usize) {
        self.turn(head, position, T::ONE);
    }

    /// The transpose of the turn, which is the turn back.
    pub(crate) fn backward(&self, head: &mut [T], position: usize) {
        self.turn(head, position, -T::ONE);
    }

    fn turn(&self, head: &mut [T], position: usize, sign: T) {
        let row = position * self.half..(position + 1) * self.half;
        let angles = self.cosines[row.clone()].iter().zip(&self.sines[row]);
        let (first, second) = head.split_at_mut(self.half);
        for ((a, b), (&cosine, &sine)) in first.iter_mut().zip(second).zip(angles) {
            let (x, y, sine) = (*a, *b, sign * sine);
            *a = x * cosine - y * sine;
            *b = y * cosine + x * sine;
        }
    }
}
