//! AdamW with a warm-up and cosine schedule.

use crate::Real;
use crate::cpu::versions::versions;
use crate::shard::{AxisShard, Shard, Tensor};
use crate::team::Team;
use reknit_layout::Step;
use reknit_layout::job::OptimizerSpec;
use std::f64::consts::PI;
use std::sync::Arc;

/// The learning rate of the step (from 1): linear up to `lr` at step `warmup_steps`, then a cosine down to `min_lr` at
/// step `decay_steps`, and `min_lr` from there. With `decay_steps` 0 it stays at `lr`.
pub fn learning_rate(optimizer: &OptimizerSpec, step: Step) -> f64 {
    let OptimizerSpec { lr, min_lr, warmup_steps, decay_steps, .. } = *optimizer;
    if step.0 <= warmup_steps {
        lr * step.0 as f64 / warmup_steps.max(1) as f64
    } else if decay_steps == 0 {
        lr
    } else if step.0 >= decay_steps {
        min_lr
    } else {
        let done = (step.0 - warmup_steps) as f64 / (decay_steps - warmup_steps) as f64;
        min_lr + 0.5 * (lr - min_lr) * (1.0 + (PI * done).cos())
    }
}

/// The numbers of one step that are the same for every parameter.
struct Update<T> {
    clip: T,
    rate: T,
    betas: [T; 2],
    rest: [T; 2],
    corrections: [T; 2],
    epsilon: T,
}

impl<T: Real> Shard<T> {
    /// One step of AdamW (arXiv 1711.05101; the order of operations is PyTorch's) on all the rank holds.
    ///
    /// `step` is the step being committed, from 1. Gradients are first scaled by `min(1, grad_clip / norm)`, where
    /// `grad_norm_squared` is that of the whole model; `grad_clip` 0 turns it off. Norms do not decay. Gradients stay as they are.
    pub fn apply(&mut self, step: Step, optimizer: &OptimizerSpec, grad_norm_squared: f64) {
        let norm = grad_norm_squared.sqrt();
        let clip = if optimizer.grad_clip > 0.0 && norm > optimizer.grad_clip {
            optimizer.grad_clip / norm
        } else {
            1.0
        };
        let rate = learning_rate(optimizer, step);
        let power = i32::try_from(step.0).unwrap_or(i32::MAX);
        let update = Update {
            clip: T::from_f64(clip),
            rate: T::from_f64(rate),
            betas: optimizer.betas.map(T::from_f64),
            rest: optimizer.betas.map(|beta| T::from_f64(1.0 - beta)),
            corrections: optimizer.betas.map(|beta| T::from_f64(1.0 / (1.0 - beta.powi(power)))),
            epsilon: T::from_f64(optimizer.eps),
        };
        let kept = T::from_f64(1.0 - rate * optimizer.weight_decay);
        let team = Arc::clone(&self.team);
        for (tensor, gradients) in self.axes_mut().flat_map(AxisShard::with_gradients) {
            update.apply(&team, tensor, gradients, kept);
        }
        update.apply(&team, &mut self.replicated, &self.replicated_gradients, T::ONE);
    }
}

impl<T: Real> Update<T> {
    /// `kept` is what decay leaves of a weight.
    fn apply(&self, team: &Team, tensor: &mut Tensor<T>, gradients: &[T], kept: T) {
        assert_eq!(gradients.len(), tensor.len(), "gradients are taken out");
        let Tensor { weights, first_moments, second_moments, .. } = tensor;
        let moments = first_moments.chunks_mut(RANGE).zip(second_moments.chunks_mut(RANGE));
        let ranges = weights.chunks_mut(RANGE).zip(gradients.chunks(RANGE)).zip(moments);
        team.each(ranges, |((weights, gradients), (first, second))| {
            update(self, kept, weights, gradients, first, second);
        });
    }
}

/// Values that a thread takes at once.
const RANGE: usize = 1 << 14;

versions! {
    fn update<T>(
        by: &Update<T>,
        kept: T,
        weights: &mut [T],
        gradients: &[T],
        first: &mut [T],
        second: &mut [T],
    ) {
        let moments = first.iter_mut().zip(second);
        for ((weight, &gradient), (first, second)) in weights.iter_mut().zip(gradients).zip(moments) {
            let gradient = gradient * by.clip;
            *first = by.betas[0] * *first + by.rest[0] * gradient;
            *second = by.betas[1] * *second + by.rest[1] * gradient * gradient;
            let size = (*second * by.corrections[1]).sqrt() + by.epsilon;
            *weight = *weight * kept - by.rate * (*first * by.corrections[0]) / size;
        }
    }
}
