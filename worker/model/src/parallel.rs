//! What the model asks of the other ranks of its tensor-parallel group.

use std::convert::Infallible;

/// Sums and maxima over a tensor-parallel group.
///
/// Every rank makes the same calls with the same lengths in the same order. The result must have the same bits on
/// every rank: replicated parameters stay equal because of it. The vector may be swapped for another; only what it
/// holds after the call counts, and its length must be what it was.
pub trait TensorParallel<T> {
    type Error: std::error::Error + 'static;

    fn all_reduce_sum(&mut self, values: &mut Vec<T>) -> Result<(), Self::Error>;
    fn all_reduce_max(&mut self, values: &mut Vec<T>) -> Result<(), Self::Error>;

    /// Starts a sum that [`TensorParallel::finish_sum`] ends. Between the two calls the model computes and asks
    /// nothing else of the group, and it neither reads nor writes `values`: their content may be moved away.
    ///
    /// As it stands the sum is done at once.
    fn begin_sum(&mut self, values: &mut Vec<T>) -> Result<(), Self::Error> {
        self.all_reduce_sum(values)
    }

    /// Ends the sum that was begun, with the same vector: it holds the result afterwards.
    fn finish_sum(&mut self, values: &mut Vec<T>) -> Result<(), Self::Error> {
        let _ = values;
        Ok(())
    }

    /// The forward pass of a batch is done and its backward pass begins.
    fn backward_begins(&mut self) {}
}

/// A group of one rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl<T> TensorParallel<T> for Alone {
    type Error = Infallible;

    fn all_reduce_sum(&mut self, _: &mut Vec<T>) -> Result<(), Infallible> {
        Ok(())
    }

    fn all_reduce_max(&mut self, _: &mut Vec<T>) -> Result<(), Infallible> {
        Ok(())
    }
}
