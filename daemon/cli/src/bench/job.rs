//! What all benches know of their models.

use reknit_layout::job::{ModelSpec, OptimizerSpec};

/// A constant rate, so that no length of a run shows in it.
pub(super) const OPTIMIZER: OptimizerSpec = OptimizerSpec {
    lr: 3e-4,
    warmup_steps: 0,
    decay_steps: 0,
    min_lr: 3e-4,
    betas: [0.9, 0.95],
    eps: 1e-8,
    weight_decay: 0.1,
    grad_clip: 1.0,
};

/// Parameters of the whole model.
pub(super) fn count(model: &ModelSpec) -> u64 {
    let of_axis = |family| u64::from(model.units(family)) * model.unit_params(family);
    model.axes().iter().map(|axis| of_axis(axis.family)).sum::<u64>() + model.replicated_params()
}
