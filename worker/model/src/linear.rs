//! Products with the split matrices. Each has `rows` rows of `hidden` values, the split dimension outermost.

use crate::Real;
use crate::cpu::gemm::{Store, product};
use crate::cpu::view::{View, ViewMut};
use crate::shard::Tensor;
use crate::team::Team;

/// The sizes of a product; `rows` are those of the split matrix.
#[derive(Clone, Copy)]
pub(crate) struct Extents<'a> {
    pub(crate) team: &'a Team,
    pub(crate) tokens: usize,
    pub(crate) rows: usize,
    pub(crate) hidden: usize,
    /// The matrix is seen rounded to bf16.
    pub(crate) rounded: bool,
}

impl<T: Real> Tensor<T> {
    fn matrix(&self, of: Extents<'_>) -> View<'_, T> {
        View::new(&self.weights, of.rows, of.hidden).rounded(of.rounded)
    }

    /// `out = x * weights^T`: from `tokens x hidden` to `tokens x rows`.
    pub(crate) fn expand(&self, of: Extents<'_>, x: &[T], out: &mut [T]) {
        let (x, out) = (View::new(x, of.tokens, of.hidden), ViewMut::new(out, of.tokens, of.rows));
        product(of.team, x, self.matrix(of).t(), Store::Replace, out);
    }

    /// Given the gradient of [`Tensor::expand`]'s result, writes that of `x`.
    pub(crate) fn expand_d_x(&self, of: Extents<'_>, d_out: &[T], d_x: &mut [T]) {
        let (d_out, d_x) = (View::new(d_out, of.tokens, of.rows), ViewMut::new(d_x, of.tokens, of.hidden));
        product(of.team, d_out, self.matrix(of), Store::Replace, d_x);
    }

    /// `out = x * weights`: from `tokens x rows` to `tokens x hidden`.
    pub(crate) fn contract(&self, of: Extents<'_>, x: &[T], out: &mut [T]) {
        let (x, out) = (View::new(x, of.tokens, of.rows), ViewMut::new(out, of.tokens, of.hidden));
        product(of.team, x, self.matrix(of), Store::Replace, out);
    }

    /// Given the gradient of [`Tensor::contract`]'s result, writes that of `x`.
    pub(crate) fn contract_d_x(&self, of: Extents<'_>, d_out: &[T], d_x: &mut [T]) {
        let (d_out, d_x) = (View::new(d_out, of.tokens, of.hidden), ViewMut::new(d_x, of.tokens, of.rows));
        product(of.team, d_out, self.matrix(of).t(), Store::Replace, d_x);
    }
}

/// Adds `narrow^T * wide` to the gradients of a split matrix. For [`Tensor::expand`] `narrow` is the gradient of the
/// result (`tokens x rows`) and `wide` is `x` (`tokens x hidden`); for [`Tensor::contract`] it is the other way round.
pub(crate) fn add_weight_gradients<T: Real>(of: Extents<'_>, narrow: &[T], wide: &[T], gradients: &mut [T]) {
    let (narrow, wide) = (View::new(narrow, of.tokens, of.rows), View::new(wide, of.tokens, of.hidden));
    product(of.team, narrow.t(), wide, Store::Add, ViewMut::new(gradients, of.rows, of.hidden));
}
