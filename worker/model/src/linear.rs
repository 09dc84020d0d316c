//! Products with the split matrices. Each has `rows` rows of `hidden` values, the split dimension outermost.

use crate::Real;
use crate::cpu::gemm::{View, ViewMut};
use crate::shard::Tensor;

/// The sizes of a product; `rows` are those of the split matrix.
#[derive(Clone, Copy)]
pub(crate) struct Extents {
    pub(crate) tokens: usize,
    pub(crate) rows: usize,
    pub(crate) hidden: usize,
}

impl<T: Real> Tensor<T> {
    /// `out = x * weights^T`: from `tokens x hidden` to `tokens x rows`.
    pub(crate) fn expand(&self, of: Extents, x: &[T], out: &mut [T]) {
        let Extents { tokens, rows, hidden } = of;
        T::gemm(
            T::ONE,
            View::new(x, tokens, hidden),
            View::new(&self.weights, rows, hidden).t(),
            T::ZERO,
            ViewMut::new(out, tokens, rows),
        );
    }

    /// Adds the gradient of the weights of [`Tensor::expand`] and writes that of `x`.
    pub(crate) fn expand_backward(&mut self, of: Extents, x: &[T], d_out: &[T], d_x: &mut [T]) {
        let Extents { tokens, rows, hidden } = of;
        let d_out = View::new(d_out, tokens, rows);
        let gradients = ViewMut::new(&mut self.gradients, rows, hidden);
        T::gemm(T::ONE, d_out.t(), View::new(x, tokens, hidden), T::ONE, gradients);
        let weights = View::new(&self.weights, rows, hidden);
        T::gemm(T::ONE, d_out, weights, T::ZERO, ViewMut::new(d_x, tokens, hidden));
    }

    /// `out = x * weights`: from `tokens x rows` to `tokens x hidden`.
    pub(crate) fn contract(&self, of: Extents, x: &[T], out: &mut [T]) {
        let Extents { tokens, rows, hidden } = of;
        T::gemm(
            T::ONE,
            View::new(x, tokens, rows),
            View::new(&self.weights, rows, hidden),
            T::ZERO,
            ViewMut::new(out, tokens, hidden),
        );
    }

    /// Adds the gradient of the weights of [`Tensor::contract`] and writes that of `x`.
    pub(crate) fn contract_backward(&mut self, of: Extents, x: &[T], d_out: &[T], d_x: &mut [T]) {
        let Extents { tokens, rows, hidden } = of;
        let d_out = View::new(d_out, tokens, hidden);
        let weights = View::new(&self.weights, rows, hidden).t();
        T::gemm(T::ONE, d_out, weights, T::ZERO, ViewMut::new(d_x, tokens, rows));
        let gradients = ViewMut::new(&mut self.gradients, rows, hidden);
        T::gemm(T::ONE, View::new(x, tokens, rows).t(), d_out, T::ONE, gradients);
    }
}
