//! What all benches know of their models.

use reknit_layout::job::ModelSpec;

/// Parameters of the whole model.
pub(super) fn count(model: &ModelSpec) -> u64 {
    let of_axis = |family| u64::from(model.units(family)) * model.unit_params(family);
    model.axes().iter().map(|axis| of_axis(axis.family)).sum::<u64>() + model.replicated_params()
}
