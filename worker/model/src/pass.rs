//! The forward and the backward pass through the whole model.

use crate::batch::{Batch, BatchError};
use crate::cpu::kernels::{Rotary, add, fill, norm_partials, rms_norm, rms_norm_backward, size};
use crate::dropout::Place;
use crate::linear::Extents;
use crate::pages::give_back;
use crate::parallel::TensorParallel;
use crate::shape::Shape;
use crate::shard::Shard;
use crate::sink::{Bucket, GradientSink, Nobody};
use crate::team::Team;
use crate::{Real, attention, ffn, vocab};
use reknit_layout::{Axis, Units};
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
    pub(crate) seed: u64,
    pub(crate) first_sample: u64,
    pub(crate) rotary: &'a Rotary<T>,
}

impl<'a, T> Extent<'a, T> {
    fn new(shape: &'a Shape, team: &'a Team, batch: &Batch, rotary: &'a Rotary<T>) -> Self {
        let Batch { samples, seq_len, seed, first_sample, .. } = *batch;
        Self { shape, team, samples, seq_len, seed, first_sample, rotary }
    }

    /// Of a product with a split matrix of that many rows.
    pub(crate) fn of(&self, rows: usize) -> Extents<'a> {
        let Shape { hidden, rounded, .. } = *self.shape;
        Extents { team: self.team, tokens: self.tokens(), rows, hidden, rounded }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.samples * self.seq_len
    }
}

/// Buffers of a pass. Everything in them is written before it is read.
#[derive(Debug, Default)]
pub(crate) struct Workspace<T> {
    /// Units that the shard had, and samples of its first batch, when they last changed.
    need: (u32, usize),
    rotary: Rotary<T>,
    /// The residual stream before each block, and after the last: `2 * layers + 1` of them.
    residual: Vec<Vec<T>>,
    /// The norm in front of each block (one for all when recomputing), and the final one.
    norms: Vec<Norm<T>>,
    /// By layer, or one for all.
    attn: Vec<attention::Saved<T>>,
    /// By layer, or one for all.
    ffn: Vec<ffn::Saved<T>>,
    vocab: vocab::Saved<T>,
    d_residual: Vec<T>,
    /// `d_residual` without what the block's dropout dropped.
    d_kept: Vec<T>,
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
        if mem::take(&mut self.just_adopted) {
            // Buffers never shrink; and to make new ones costs time, which a shard that has just grown has not.
            let need = (self.owned.values().map(Units::len).sum(), batch.samples);
            if need < workspace.need {
                workspace = Workspace::default();
            }
            give_back();
            workspace.need = need;
        }
        workspace.rotary.prepare(batch.seq_len, self.shape.head_dim);
        workspace.residual.resize_with(2 * self.shape.layers + 1, Vec::new);
        let kept = if self.shape.recompute { 1 } else { self.shape.layers };
        workspace.norms.resize_with(self.norm_place(2 * self.shape.layers) + 1, Norm::default);
        workspace.attn.resize_with(kept, Default::default);
        workspace.ffn.resize_with(kept, Default::default);
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
        let extent = Extent::new(&self.shape, team, batch, rotary);
        let last = 2 * self.shape.layers;
        vocab::embed(&extent, &self.vocab, batch.inputs(), &mut residual[0]);
        tp.all_reduce_sum(&mut residual[0])?;
        if let Some(dropout) = self.shape.dropout {
            dropout.apply(&extent, 0, Place::Embedding, &mut residual[0]);
        }
        for block in 0..last {
            let (before, after) = residual.split_at_mut(block + 1);
            let (before, after) = (&before[block], &mut after[0]);
            self.half_block(&extent, block, before, norms, attn, ffn);
            let (layer, kept) = (block / 2, self.layer_place(block / 2));
            let place = if block % 2 == 0 {
                attention::project(&extent, &self.attn[layer], &attn[kept], after);
                Place::Attention
            } else {
                ffn::project(&extent, &self.ffn[layer], &ffn[kept], after);
                Place::Ffn
            };
            tp.all_reduce_sum(after)?;
            if let Some(dropout) = self.shape.dropout {
                dropout.apply(&extent, layer, place, after);
            }
            add(team, after, before);
        }
        let norm = &mut norms[self.norm_place(last)];
        norm.forward(team, &residual[last], self.gain(last));
        vocab::cross_entropy(&extent, &self.vocab, &norm.normed, batch.targets(), vocab, tp)
    }

    /// Where the results of the norm in front of the block are kept, or those of the final norm.
    fn norm_place(&self, block: usize) -> usize {
        let last = 2 * self.shape.layers;
        if self.shape.recompute { usize::from(block == last) } else { block }
    }

    /// Where the results of the layer are kept.
    fn layer_place(&self, layer: usize) -> usize {
        if self.shape.recompute { 0 } else { layer }
    }

    /// A block up to its output projection: all that its backward pass needs.
    fn half_block(
        &self,
        extent: &Extent<'_, T>,
        block: usize,
        x: &[T],
        norms: &mut [Norm<T>],
        attn: &mut [attention::Saved<T>],
        ffn: &mut [ffn::Saved<T>],
    ) {
        let (layer, kept) = (block / 2, self.layer_place(block / 2));
        let norm = &mut norms[self.norm_place(block)];
        norm.forward(extent.team, x, self.gain(block));
        if block.is_multiple_of(2) {
            attention::attend(extent, &self.attn[layer], &norm.normed, &mut attn[kept]);
        } else {
            ffn::activate(extent, &self.ffn[layer], &norm.normed, &mut ffn[kept]);
        }
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
        let Workspace { need: _, rotary, residual, norms, attn, ffn, vocab, d_residual, d_kept, scratch } =
            workspace;
        let (shape, team) = (self.shape, Arc::clone(&self.team));
        let extent = Extent::new(&shape, &team, batch, rotary);
        let last = 2 * shape.layers;
        let norm = &norms[self.norm_place(last)];
        vocab::cross_entropy_backward(&extent, &self.vocab, scale, vocab, scratch);
        tp.begin_sum(&mut scratch.d_normed).map_err(StepError::Parallel)?;
        vocab::head_gradients(&extent, &mut self.vocab, &norm.normed, vocab);
        tp.finish_sum(&mut scratch.d_normed).map_err(StepError::Parallel)?;
        size(d_residual, extent.tokens() * shape.hidden);
        fill(&team, d_residual, T::ZERO);
        self.norm_backward(last, &residual[last], norm, scratch, d_residual);
        for block in (0..last).rev() {
            if shape.recompute {
                self.half_block(&extent, block, &residual[block], norms, attn, ffn);
            }
            let (layer, kept) = (block / 2, self.layer_place(block / 2));
            let place = if block % 2 == 0 { Place::Attention } else { Place::Ffn };
            let d_out: &[T] = match shape.dropout {
                Some(dropout) => {
                    d_kept.clear();
                    d_kept.extend_from_slice(d_residual);
                    dropout.apply(&extent, layer, place, d_kept);
                    d_kept
                }
                None => d_residual,
            };
            let norm = &norms[self.norm_place(block)];
            let axis = if block % 2 == 0 {
                attention::backward(&extent, &self.attn[layer], &mut attn[kept], d_out, scratch);
                tp.begin_sum(&mut scratch.d_normed).map_err(StepError::Parallel)?;
                let (axis, saved) = (&mut self.attn[layer], &attn[kept]);
                attention::weight_gradients(&extent, axis, &norm.normed, saved, d_out, scratch);
                Axis::attn(layer as u32)
            } else {
                ffn::backward(&extent, &self.ffn[layer], &ffn[kept], d_out, scratch);
                tp.begin_sum(&mut scratch.d_normed).map_err(StepError::Parallel)?;
                let (axis, saved) = (&mut self.ffn[layer], &ffn[kept]);
                ffn::weight_gradients(&extent, axis, &norm.normed, saved, d_out, scratch);
                Axis::ffn(layer as u32)
            };
            tp.finish_sum(&mut scratch.d_normed).map_err(StepError::Parallel)?;
            sink.ready(self, Bucket::Axis(axis)).map_err(StepError::Sink)?;
            self.norm_backward(block, &residual[block], norm, scratch, d_residual);
        }
        sink.ready(self, Bucket::Replicated).map_err(StepError::Sink)?;
        if let Some(dropout) = shape.dropout {
            dropout.apply(&extent, 0, Place::Embedding, d_residual);
        }
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
