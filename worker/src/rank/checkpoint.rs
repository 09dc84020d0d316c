//! A rank's part in writing a checkpoint and in going back to one.

use super::{Rank, RankError};
use crate::abort::Aborts;
use crate::messages::StepVote;
use crate::saver::LoadError;
use reknit_checkpoint::{Checkpoint, CheckpointError, Heading, SavedVote, Snapshot, to_write};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Epoch, Step, Units};
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
        let heading = Heading::new(&self.setting.job, step, &shard.replicated_digest(), vote);
        let bytes = state.len();
        saver.write(Snapshot { heading, pieces, state });
        info!(%step, bytes, pause_us = begun.elapsed().as_micros() as u64, "copied for a checkpoint");
    }
}

impl From<CheckpointError> for RankError {
    fn from(error: CheckpointError) -> Self {
        LoadError::from(error).into()
    }
}

/// What it shall own in `epoch`, out of the checkpoint of `step`, with the vote of that step. Ends when the epoch does.
pub(super) fn load<T: Real>(
    aborts: &Aborts,
    epoch: Epoch,
    model: &ModelSpec,
    folder: &Path,
    step: Step,
    owned: &BTreeMap<Axis, Units>,
) -> Result<(Shard<T>, Option<StepVote>), RankError> {
    let checkpoint = Checkpoint::open(folder)?;
    checkpoint.fits(model)?;
    let heading = &checkpoint.manifest().heading;
    if heading.step != step {
        let (folder, found) = (folder.display().to_string(), heading.step);
        return Err(LoadError::OtherStep { folder, found, wanted: step }.into());
    }
    let mut shard = Shard::awaiting(model, owned)?;
    checkpoint.load(owned, |axis, units, state| {
        if aborts.is_closed(epoch) {
            let given_up = format!("epoch {epoch} was closed while {} was being read", folder.display());
            return Err(RankError::Refused(given_up));
        }
        Ok(shard.receive(axis, units, state)?)
    })?;
    shard.check_arrived()?;
    shard.adopt();
    let vote = heading.vote.map(|SavedVote { grad_norm_squared, loss }| StepVote { grad_norm_squared, loss });
    Ok((shard, vote))
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_checkpoint::Store;
    use reknit_layout::JobSpec;
    use reknit_plane::AbortReason;
    use reknit_plane::host::HostPlane;
    use std::sync::Arc;

    #[test]
    fn reading_a_checkpoint_ends_with_its_epoch() {
        let dir = tempfile::tempdir().unwrap();
        let mut job = JobSpec::parse(reknit_layout::job::EXAMPLE, "example").unwrap();
        let model = &mut job.model;
        (model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim) = (1, 16, 4, 2, Some(4));
        (model.ffn, model.ffn_block, model.vocab, model.vocab_block) = (8, 4, 8, 4);
        let axes = job.model.axes().into_iter();
        let owned: BTreeMap<_, _> =
            axes.map(|axis| (axis, Units::range(0, job.model.units(axis.family)))).collect();
        let shard = Shard::<f32>::init(&job.model, 1, &owned);
        let heading = Heading::new(&job, Step(3), &shard.replicated_digest(), None);
        let mut snapshot = Snapshot { heading, pieces: vec![(None, Units::new())], state: Vec::new() };
        shard.export_replicated(&mut snapshot.state);
        for (axis, units) in &owned {
            shard.export_units(*axis, units, &mut snapshot.state).unwrap();
            snapshot.pieces.push((Some(*axis), units.clone()));
        }
        let store = Store::new(dir.path());
        assert!(store.write(&snapshot, "all", |_, _| {}).unwrap().complete);
        let folder = dir.path().join(snapshot.heading.id().to_string());

        let aborts = Aborts::new(Arc::new(HostPlane::new("node", "127.0.0.1").unwrap()));
        aborts.close(Epoch(4), AbortReason::EpochClosed);
        let load = |epoch| load::<f32>(&aborts, Epoch(epoch), &job.model, &folder, Step(3), &owned);
        let Err(RankError::Refused(why)) = load(4) else { panic!("epoch 4 is closed") };
        assert!(why.contains("epoch 4 was closed while"), "{why}");
        let (loaded, _) = load(5).unwrap();
        assert_eq!(loaded.replicated_digest(), shard.replicated_digest());
    }
}
