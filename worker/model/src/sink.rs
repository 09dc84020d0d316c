//! Who hears that a gradient is final while the backward pass still runs.

use crate::Shard;
use reknit_layout::Axis;
use reknit_layout::job::ModelSpec;
use std::convert::Infallible;

/// Gradients that become final together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bucket {
    /// What this rank owns of the axis; perhaps nothing.
    Axis(Axis),
    /// The norms.
    Replicated,
}

impl Bucket {
    /// Every bucket in the order in which a backward pass finishes them.
    pub fn in_order(model: &ModelSpec) -> impl Iterator<Item = Self> + use<> {
        let layers = (0..model.layers).rev();
        let layers = layers.flat_map(|layer| [Axis::ffn(layer), Axis::attn(layer)].map(Self::Axis));
        layers.chain([Self::Replicated, Self::Axis(Axis::vocab())])
    }
}

/// Is told during a backward pass that a bucket's gradients will not change any more.
///
/// The order is fixed and the same on every rank, whatever it owns: of each layer, the last first, the FFN and then
/// attention; then the replicated gradients; the vocabulary last, because the embedding comes last.
pub trait GradientSink<T> {
    type Error: std::error::Error + 'static;

    /// The gradients of `bucket` are final, summed over all batches since they were zeroed. They may be moved out
    /// ([`Shard::take_gradients`]) and need not be back before the pass is over.
    ///
    /// # Errors
    /// Ends the pass.
    fn ready(&mut self, shard: &mut Shard<T>, bucket: Bucket) -> Result<(), Self::Error>;
}

/// Hears nothing: there are more batches to come, or nobody waits.
#[derive(Debug)]
pub(crate) struct Nobody;

impl<T> GradientSink<T> for Nobody {
    type Error = Infallible;

    fn ready(&mut self, _: &mut Shard<T>, _: Bucket) -> Result<(), Infallible> {
        Ok(())
    }
}
