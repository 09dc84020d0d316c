//! Layers that are alike, as one.

use reknit_layout::{Axis, Family, JobSpec, StageId};

/// A run of consecutive layers of a family with the same value; `layers` is `None` for a family without layers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Run<T> {
    pub(crate) family: Family,
    pub(crate) layers: Option<(u32, u32)>,
    pub(crate) value: T,
}

/// `axes` ascend, as the keys of a map do.
pub(crate) fn runs<T: PartialEq>(axes: impl IntoIterator<Item = (Axis, T)>) -> Vec<Run<T>> {
    let mut runs: Vec<Run<T>> = Vec::new();
    for (axis, value) in axes {
        let layers = axis.layer.map(|layer| (layer, layer + 1));
        match (runs.last_mut(), axis.layer) {
            (Some(Run { family, layers: Some((_, end)), value: last }), Some(layer))
                if *family == axis.family && *end == layer && *last == value =>
            {
                *end = layer + 1;
            }
            (Some(_) | None, _) => runs.push(Run { family: axis.family, layers, value }),
        }
    }
    runs
}

/// The axes of a stage in ascending order.
pub(crate) fn ascending(job: &JobSpec, stage: StageId) -> Vec<Axis> {
    let mut axes = job.stage_axes(stage);
    axes.sort_unstable();
    axes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_neighbours_become_one() {
        let axes = [
            (Axis::attn(0), 1),
            (Axis::attn(1), 1),
            (Axis::attn(2), 2),
            (Axis::attn(4), 2),
            (Axis::ffn(5), 2),
            (Axis::vocab(), 2),
        ];
        let run = |family, layers, value| Run { family, layers, value };
        let expected = [
            run(Family::Attn, Some((0, 2)), 1),
            run(Family::Attn, Some((2, 3)), 2),
            run(Family::Attn, Some((4, 5)), 2),
            run(Family::Ffn, Some((5, 6)), 2),
            run(Family::Vocab, None, 2),
        ];
        assert_eq!(runs(axes), expected);
    }
}
