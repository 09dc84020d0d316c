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

    /// Given the gradient of [`Tensor::expand`]'s result, writes that of `x`.
    pub(crate) fn expand_d_x(&self, of: Extents, d_out: &[T], d_x: &mut [T]) {
        let Extents { tokens, rows, hidden } = of;
        T::gemm(
            T::ONE,
            View::new(d_out, tokens, rows),
            View::new(&self.weights, rows, hidden),
            T::ZERO,
            ViewMut::new(d_x, tokens, hidden),
        );
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

    /// Given the gradient of [`Tensor::contract`]'s result, writes that of `x`.
    pub(crate) fn contract_d_x(&self, of: Extents, d_out: &[T], d_x: &mut [T]) {
        let Extents { tokens, rows, hidden } = of;
        T::gemm(
            T::ONE,
            View::new(d_out, tokens, hidden),
            View::new(&self.weights, rows, hidden).t(),
            T::ZERO,
            ViewMut::new(d_x, tokens, rows),
        );
    }
}

/// Adds `narrow^T * wide` to the gradients of a split matrix. For [`Tensor::expand`] `narrow` is the gradient of the
/// result (`tokens x rows`) and `wide` is `x` (`tokens x hidden`); for [`Tensor::contract`] it is the other way round.
pub(crate) fn add_weight_gradients<T: Real>(of: Extents, narrow: &[T], wide: &[T], gradients: &mut [T]) {
    let Extents { tokens, rows, hidden } = of;
    T::gemm(
        T::ONE,
        View::new(narrow, tokens, rows).t(),
        View::new(wide, tokens, hidden),
        T::ONE,
        ViewMut::new(gradients, rows, hidden),
    );
}
