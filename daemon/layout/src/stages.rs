//! The pipeline stages: their layers, axes and bytes, and which replicas train.

use crate::grid::Grid;
use crate::{Axis, DraftError, Family, JobSpec, Place, ReplicaId, StageId};
use std::ops::Range;

impl JobSpec {
    pub fn stages(&self) -> impl Iterator<Item = StageId> + use<> {
        (0..self.parallel.pipeline).map(StageId)
    }

    /// The replicas that train when these places, each named once, are filled: those with `min_tensor` active slots in
    /// every stage. Places outside the nominal layout do not count.
    ///
    /// # Errors
    /// [`DraftError::TooFew`] when none does.
    pub fn training(&self, places: impl IntoIterator<Item = Place>) -> Result<Vec<ReplicaId>, DraftError> {
        let grid = Grid::new(self);
        let mut active = vec![0; grid.groups()];
        for place in places.into_iter().filter_map(|place| grid.number(place)) {
            active[grid.group(place)] += 1;
        }
        let replicas = active.chunks(self.parallel.pipeline as usize);
        let smallest: Vec<u32> = replicas.map(|groups| groups.iter().copied().min().unwrap_or(0)).collect();
        let needed = self.parallel.min_tensor;
        let training: Vec<_> = (0..)
            .map(ReplicaId)
            .zip(&smallest)
            .filter(|(_, least)| **least >= needed)
            .map(|(replica, _)| replica)
            .collect();
        if training.is_empty() {
            return Err(DraftError::TooFew { needed, found: smallest.into_iter().max().unwrap_or(0) });
        }
        Ok(training)
    }

    /// The layers of a stage: contiguous, the earlier stages one longer where they do not divide.
    pub fn stage_layers(&self, stage: StageId) -> Range<u32> {
        let (layers, stages) = (self.model.layers, self.parallel.pipeline);
        let start = |stage: u32| stage * (layers / stages) + stage.min(layers % stages);
        start(stage.0)..start(stage.0 + 1)
    }

    /// The stage of a layer, if the model has it.
    pub fn stage_of(&self, layer: u32) -> Option<StageId> {
        let (size, longer) =
            (self.model.layers / self.parallel.pipeline, self.model.layers % self.parallel.pipeline);
        let in_longer = longer * (size + 1);
        let stage = if layer < in_longer { layer / (size + 1) } else { longer + (layer - in_longer) / size };
        (layer < self.model.layers).then_some(StageId(stage))
    }

    /// The axes of a stage in a fixed order. The first stage has the embedding and the last one the head: both
    /// are `vocab`.
    pub fn stage_axes(&self, stage: StageId) -> Vec<Axis> {
        let layers = self.stage_layers(stage);
        let layered = layers.flat_map(|layer| [Axis::attn(layer), Axis::ffn(layer)]);
        let vocab = self.is_first(stage) || self.is_last(stage);
        layered.chain(vocab.then_some(Axis::vocab())).collect()
    }

    /// Parameters in one unit of `family` at `stage`: a stage that is not both first and last has one copy of the
    /// vocabulary rows, the embedding or the head (a tied head too is a copy of its own there).
    pub fn unit_params(&self, stage: StageId, family: Family) -> u64 {
        let model = &self.model;
        match family {
            Family::Attn | Family::Ffn => model.unit_params(family),
            Family::Vocab if self.is_first(stage) && self.is_last(stage) => model.unit_params(family),
            Family::Vocab => u64::from(model.vocab_block) * u64::from(model.hidden),
        }
    }

    /// Bytes that move with one unit: weights and both moments.
    pub fn unit_bytes(&self, stage: StageId, family: Family) -> u64 {
        self.unit_params(stage, family) * self.model.dtype.state_bytes()
    }

    /// Bytes of the replicated parameters of a stage with both moments: two norms a layer and, in the last stage, one more.
    pub fn replicated_bytes(&self, stage: StageId) -> u64 {
        let norms = 2 * self.stage_layers(stage).len() as u64 + u64::from(self.is_last(stage));
        norms * u64::from(self.model.hidden) * self.model.dtype.state_bytes()
    }

    pub(crate) fn is_first(&self, stage: StageId) -> bool {
        stage.0 == 0
    }

    pub(crate) fn is_last(&self, stage: StageId) -> bool {
        stage.0 + 1 == self.parallel.pipeline
    }
}
