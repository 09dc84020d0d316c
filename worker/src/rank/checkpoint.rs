//! A rank's part in writing a checkpoint and in going back to one.

use super::{Rank, RankError};
use crate::messages::StepVote;
use crate::saver::LoadError;
use reknit_checkpoint::{Checkpoint, Heading, SavedVote, Snapshot, to_write};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Step, Units};
use reknit_model::{Real, Shard};
use reknit_plane::Element;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;
use tracing::info;

impl<T: Real + Element> Rank<T> {
    /// Hands a copy of its share of the committed state to the thread that writes it, if all can do so.
    pub(super) fn save(&mut self, all_are_ready: bool) {
        let step = self.committed;
        if !all_are_ready {
            let reason = "the one before is still being written";
            info!(%step, reason, "no checkpoint");
            return;
        }
        let (Some(saver), Some(team), Some(shard)) = (&mut self.saver, &self.team, &self.shard) else {
            return;
        };
        let begun = Instant::now();
        let trains = |replica: &usize| team.layout.batch[*replica] > 0;
        let training: Vec<usize> = (0..team.layout.batch.len()).filter(trains).collect();
        let turn = training.iter().position(|replica| *replica == team.place.replica.0 as usize);
        let Some(turn) = turn else { return };
        let mut state = saver.memory();
        let mut pieces = Vec::new();
        if turn == 0 && team.tensor.rank() == 0 {
            shard.export_replicated(&mut state);
            pieces.push((None, Units::new()));
        }
        for (axis, units) in to_write(shard.owned(), turn as u32, training.len() as u32) {
            // It owns them, so there is no error.
            if shard.export_units(axis, &units, &mut state).is_ok() {
                pieces.push((Some(axis), units));
            }
        }
        let vote =
            self.vote.map(|StepVote { grad_norm_squared, loss }| SavedVote { grad_norm_squared, loss });
        let heading = Heading::new(&self.setting.job, step, shard.replicated_digest(), vote);
        let bytes = state.len();
        saver.write(Snapshot { heading, pieces, state });
        info!(%step, bytes, pause_us = begun.elapsed().as_micros() as u64, "copied for a checkpoint");
    }
}

/// What it shall own, out of the checkpoint of `step`, with the vote of that step.
pub(super) fn load<T: Real>(
    model: &ModelSpec,
    folder: &Path,
    step: Step,
    owned: &BTreeMap<Axis, Units>,
) -> Result<(Shard<T>, Option<StepVote>), RankError> {
    let checkpoint = Checkpoint::open(folder).map_err(LoadError::from)?;
    checkpoint.fits(model).map_err(LoadError::from)?;
    let heading = &checkpoint.manifest().heading;
    if heading.step != step {
        let (folder, found) = (folder.display().to_string(), heading.step);
        return Err(LoadError::OtherStep { folder, found, wanted: step }.into());
    }
    let mut shard = Shard::awaiting(model, owned)?;
    for block in checkpoint.load(owned).map_err(LoadError::from)? {
        shard.receive(block.axis, &block.units, 0, &block.state)?;
    }
    shard.check_arrived()?;
    shard.adopt();
    let vote = heading.vote.map(|SavedVote { grad_norm_squared, loss }| StepVote { grad_norm_squared, loss });
    Ok((shard, vote))
}
