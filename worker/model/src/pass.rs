//! The forward and the backward pass through the whole model.

use crate::batch::{Batch, BatchError};
use crate::cpu::kernels::{Rotary, add, fill, norm_partials, rms_norm, rms_norm_backward, size};
use crate::parallel::TensorParallel;
use crate::shape::Shape;
use crate::shard::Shard;
use crate::sink::{Bucket, GradientSink, Nobody};
use crate::team::Team;
use crate::{Real, attention, ffn, vocab};
use reknit_layout::Axis;
use std::convert::Infallible;
use std::error::Error;
use std::mem;
use std::sync::Arc;

/// Why a pass did not finish. Gradients may hold a part of it: zero them before the next.
#[derive(Debug, thiserror::Error)]
pub enum StepError<E: Error + 'static, S: Error + 'static = Infallible> {
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The group could not finish a sum or a maximum.
    #[error("tensor-parallel exchange failed")]
    Parallel(#[source] E),
    /// The sink could not take a bucket.
    #[error("a final gradient could not be handed on")]
    Sink(#[source] S),
}

/// How much one pass computes.
pub(crate) struct Extent<'a, T> {
    pub(crate) shape: &'a Shape,
    pub(crate) team: &'a Team,
    pub(crate) samples: usize,
    pub(crate) seq_len: usize,
    pub(crate) rotary: &'a Rotary<T>,
}

impl<T> Extent<'_, T> {
    pub(crate) fn tokens(&self) -> usize {
        self.samples * self.seq_len
    }
}

/// Buffers of a pass. Everything in them is written before it is read.
#[derive(Debug, Default)]
pub(crate) struct Workspace<T> {
    rotary: Rotary<T>,
    /// The residual stream before each block, and after the last: `2 * layers + 1` of them.
    residual: Vec<Vec<T>>,
    /// The norm in front of each block, and the final one.
    norms: Vec<Norm<T>>,
    attn: Vec<attention::Saved<T>>,
    ffn: Vec<ffn::Saved<T>>,
    vocab: vocab::Saved<T>,
    d_residual: Vec<T>,
    scratch: Scratch<T>,
}

/// A norm's results.
#[derive(Debug, Default)]
struct Norm<T> {
    normed: Vec<T>,
    inverse: Vec<T>,
}

/// Gradients of activations that a block's backward pass makes and uses up.
#[derive(Debug, Default)]
pub(crate) struct Scratch<T> {
    pub(crate) d_normed: Vec<T>,
    pub(crate) d_wide: Vec<T>,
    pub(crate) d_narrow: Vec<T>,
    /// A value for each row of the attention weights.
    pub(crate) means: Vec<T>,
    /// Sums over some of the tokens, to be added up in order.
    pub(crate) partials: Vec<T>,
}

impl<T: Real> Norm<T> {
    fn forward(&mut self, team: &Team, x: &[T], gain: &[T]) {
        size(&mut self.normed, x.len());
        size(&mut self.inverse, x.len() / gain.len());
        rms_norm(team, x, gain, &mut self.normed, &mut self.inverse);
    }
}

impl<T: Real> Shard<T> {
    /// Adds the gradients of `scale` times the batch's cross-entropies, summed over samples and positions, and
    /// returns the sum itself (natural logarithm, not scaled), the same on every rank of the group.
    ///
    /// A batch without samples changes nothing and exchanges nothing.
    ///
    /// # Errors
    /// The batch does not fit the model, or the group failed.
    pub fn forward_backward<P: TensorParallel<T>>(
        &mut self,
        tokens: &Batch,
        scale: f64,
        tp: &mut P,
    ) -> Result<f64, StepError<P::Error>> {
        self.forward_backward_into(tokens, scale, tp, &mut Nobody)
    }

    /// [`Shard::forward_backward`] of the last batch before the gradients are used: `sink` hears of each bucket when
    /// it is final. Also for a batch without samples, so that every rank's sink hears the same.
    ///
    /// # Errors
    /// The batch does not fit the model, or the group or the sink failed.
    pub fn forward_backward_into<P: TensorParallel<T>, S: GradientSink<T>>(
        &mut self,
        tokens: &Batch,
        scale: f64,
        tp: &mut P,
        sink: &mut S,
    ) -> Result<f64, StepError<P::Error, S::Error>> {
        let loss = self.with_workspace(tokens, |shard, workspace| {
            let loss = shard.forward(tokens, workspace, tp).map_err(StepError::Parallel)?;
            tp.backward_begins();
            shard.backward(tokens, T::from_f64(scale), workspace, tp, sink)?;
            Ok(loss)
        })?;
        match loss {
            Some(loss) => Ok(loss),
            None => {
                for bucket in self.buckets() {
                    sink.ready(self, bucket).map_err(StepError::Sink)?;
                }
                Ok(0.0)
            }
        }
    }

    /// Every bucket in the order in which a backward pass finishes them.
    pub fn buckets(&self) -> impl Iterator<Item = Bucket> + use<T> {
        Bucket::in_order(&self.model)
    }

    /// The sum of the batch's cross-entropies, as [`Shard::forward_backward`] returns it.
    ///
    /// # Errors
    /// The batch does not fit the model, or the group failed.
    pub fn loss_only<P: TensorParallel<T>>(
        &mut self,
        tokens: &Batch,
        tp: &mut P,
    ) -> Result<f64, StepError<P::Error>> {
        let forward = |shard: &mut Self, workspace: &mut Workspace<T>| {
            shard.forward(tokens, workspace, tp).map_err(StepError::Parallel)
        };
        self.with_workspace(tokens, forward).map(Option::unwrap_or_default)
    }

    /// What `pass` returns; `None` if the batch is empty, so that there was nothing to pass.
    fn with_workspace<E: Error + 'static, S: Error + 'static>(
        &mut self,
        batch: &Batch,
        pass: impl FnOnce(&mut Self, &mut Workspace<T>) -> Result<f64, StepError<E, S>>,
    ) -> Result<Option<f64>, StepError<E, S>> {
        batch.check(self.shape.vocab)?;
        if batch.samples == 0 || batch.seq_len == 0 {
            return Ok(None);
        }
        let mut workspace = mem::take(&mut self.workspace);
        workspace.rotary.prepare(batch.seq_len, self.shape.head_dim);
        workspace.residual.resize_with(2 * self.shape.layers + 1, Vec::new);
        workspace.norms.resize_with(2 * self.shape.layers + 1, Norm::default);
        workspace.attn.resize_with(self.shape.layers, Default::default);
        workspace.ffn.resize_with(self.shape.layers, Default::default);
        let result = pass(self, &mut workspace);
        self.workspace = workspace;
        result.map(Some)
    }

    /// The gain of the norm in front of the block, or of the final norm.
    fn gain(&self, block: usize) -> &[T] {
        let hidden = self.shape.hidden;
        &self.replicated.weights[block * hidden..(block + 1) * hidden]
    }

    fn forward<P: TensorParallel<T>>(
        &self,
        batch: &Batch,
        workspace: &mut Workspace<T>,
        tp: &mut P,
    ) -> Result<f64, P::Error> {
        let Workspace { rotary, residual, norms, attn, ffn, vocab, .. } = workspace;
        let team: &Team = &self.team;
        let extent =
            Extent { shape: &self.shape, team, samples: batch.samples, seq_len: batch.seq_len, rotary };
        let last = 2 * self.shape.layers;
        vocab::embed(&extent, &self.vocab, batch.inputs(), &mut residual[0]);
        tp.all_reduce_sum(&mut residual[0])?;
        for block in 0..last {
            let (before, after) = residual.split_at_mut(block + 1);
            let (before, after) = (&before[block], &mut after[0]);
            norms[block].forward(team, before, self.gain(block));
            let (layer, normed) = (block / 2, &norms[block].normed);
            if block % 2 == 0 {
                attention::attend(&extent, &self.attn[layer], normed, &mut attn[layer]);
                attention::project(&extent, &self.attn[layer], &attn[layer], after);
            } else {
                ffn::activate(&extent, &self.ffn[layer], normed, &mut ffn[layer]);
                ffn::project(&extent, &self.ffn[layer], &ffn[layer], after);
            }
            tp.all_reduce_sum(after)?;
            add(team, after, before);
        }
        norms[last].forward(team, &residual[last], self.gain(last));
        vocab::cross_entropy(&extent, &self.vocab, &norms[last].normed, batch.targets(), vocab, tp)
    }

    /// In every block the sum of the norm's gradient runs while the gradients of the block's weights are made.
    fn backward<P: TensorParallel<T>, S: GradientSink<T>>(
        &mut self,
        batch: &Batch,
        scale: T,
        workspace: &mut Workspace<T>,
        tp: &mut P,
        sink: &mut S,
    ) -> Result<(), StepError<P::Error, S::Error>> {
        let Workspace { rotary, residual, norms, attn, ffn, vocab, d_residual, scratch } = workspace;
        let (shape, team) = (self.shape, Arc::clone(&self.team));
        let extent =
            Extent { shape: &shape, team: &team, samples: batch.samples, seq_len: batch.seq_len, rotary };
        let last = 2 * shape.layers;
        vocab::cross_entropy_backward(&extent, &self.vocab, scale, vocab, scratch);
        tp.begin_sum(&mut scratch.d_normed).map_err(StepError::Parallel)?;
        vocab::head_gradients(&extent, &mut self.vocab, &norms[last].normed, vocab);
        tp.finish_sum(&mut scratch.d_normed).map_err(StepError::Parallel)?;
        size(d_residual, extent.tokens() * shape.hidden);
        fill(&team, d_residual, T::ZERO);
        self.norm_backward(last, &residual[last], &norms[last], scratch, d_residual);
        for block in (0..last).rev() {
            let (layer, normed) = (block / 2, &norms[block].normed);
            let axis = if block % 2 == 0 {
                attention::backward(&extent, &self.attn[layer], &mut attn[layer], d_residual, scratch);
                tp.begin_sum(&mut scratch.d_normed).map_err(StepError::Parallel)?;
                let (axis, saved) = (&mut self.attn[layer], &attn[layer]);
                attention::weight_gradients(&extent, axis, normed, saved, d_residual, scratch);
                Axis::attn(layer as u32)
            } else {
                ffn::backward(&extent, &self.ffn[layer], &ffn[layer], d_residual, scratch);
                tp.begin_sum(&mut scratch.d_normed).map_err(StepError::Parallel)?;
                let (axis, saved) = (&mut self.ffn[layer], &ffn[layer]);
                ffn::weight_gradients(&extent, axis, normed, saved, d_residual, scratch);
                Axis::ffn(layer as u32)
            };
            tp.finish_sum(&mut scratch.d_normed).map_err(StepError::Parallel)?;
            sink.ready(self, Bucket::Axis(axis)).map_err(StepError::Sink)?;
            self.norm_backward(block, &residual[block], &norms[block], scratch, d_residual);
        }
        sink.ready(self, Bucket::Replicated).map_err(StepError::Sink)?;
        vocab::embed_backward(&extent, &mut self.vocab, batch.inputs(), d_residual);
        sink.ready(self, Bucket::Axis(Axis::vocab())).map_err(StepError::Sink)
    }

    fn norm_backward(
        &mut self,
        block: usize,
        x: &[T],
        norm: &Norm<T>,
        scratch: &mut Scratch<T>,
        d_x: &mut [T],
    ) {
        let hidden = self.shape.hidden;
        let Scratch { d_normed, partials, .. } = scratch;
        size(partials, norm_partials(x.len() / hidden, hidden));
        let place = block * hidden..(block + 1) * hidden;
        let gain = &self.replicated.weights[place.clone()];
        let d_gain = &mut self.replicated_gradients[place];
        rms_norm_backward(&self.team, (x, gain, &norm.inverse), d_normed, (d_x, d_gain), partials);
    }
}
