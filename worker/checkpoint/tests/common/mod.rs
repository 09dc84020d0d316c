//! A small model that was trained a little, splits of it, and what its ranks write.

#![allow(dead_code, reason = "not every test needs all of it")]

use reknit_checkpoint::{Heading, SavedVote, Snapshot, to_write};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, JobSpec, Step, Units};
use reknit_model::{Alone, Batch, Real, Shard};
use std::collections::BTreeMap;

pub(crate) type Owned = BTreeMap<Axis, Units>;

/// The example's model with grouped-query attention, 6, 6 and 12 units.
pub(crate) fn job() -> JobSpec {
    let mut job = JobSpec::parse(reknit_layout::job::EXAMPLE, "example").unwrap();
    let model = &mut job.model;
    (model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim) = (2, 16, 12, 6, Some(4));
    (model.ffn, model.ffn_block, model.vocab, model.vocab_block, model.seq_len) = (18, 3, 24, 2, 7);
    job.parallel.tensor = 2;
    job
}

pub(crate) fn everything(model: &ModelSpec) -> Owned {
    let axes = model.axes().into_iter();
    axes.map(|axis| (axis, Units::range(0, model.units(axis.family)))).collect()
}

pub(crate) fn split(model: &ModelSpec, ranks: u32) -> Vec<Owned> {
    let part = |axis: &Axis, rank: u32| {
        let units = model.units(axis.family);
        Units::range(units * rank / ranks, units * (rank + 1) / ranks)
    };
    (0..ranks).map(|rank| model.axes().iter().map(|axis| (*axis, part(axis, rank))).collect()).collect()
}

/// Round-robin: no rank's units are contiguous.
pub(crate) fn scattered(model: &ModelSpec, ranks: u32) -> Vec<Owned> {
    let of_rank = |rank| {
        let axes = model.axes().into_iter();
        axes.map(|axis| (axis, (rank..model.units(axis.family)).step_by(ranks as usize).collect())).collect()
    };
    (0..ranks).map(of_rank).collect()
}

/// The whole model after some steps: no weight or moment is what it was.
pub(crate) fn trained<T: Real>(model: &ModelSpec, steps: u64) -> Shard<T> {
    let optimizer = JobSpec::parse(reknit_layout::job::EXAMPLE, "example").unwrap().optimizer;
    let mut shard = Shard::<T>::init(model, 5, &everything(model));
    let length = model.seq_len as usize + 1;
    for step in 1..=steps {
        let token = |at: usize| (at as u32 * 7919 + step as u32) % model.vocab;
        let tokens = (0..2 * length).map(token).collect();
        let batch =
            Batch { tokens, samples: 2, seq_len: model.seq_len as usize, first_sample: 2 * step, seed: 5 };
        shard.zero_gradients();
        shard.forward_backward(&batch, 0.1, &mut Alone).unwrap();
        let norm = shard.gradient_norm_squared(true);
        shard.apply(Step(step), &optimizer, norm);
    }
    shard
}

/// What the ranks of these replicas write, each with its name.
pub(crate) fn snapshots<T: Real>(
    job: &JobSpec,
    whole: &Shard<T>,
    replicas: &[Vec<Owned>],
    step: u64,
) -> Vec<(String, Snapshot)> {
    let mut all = Vec::new();
    for (replica, ranks) in replicas.iter().enumerate() {
        for (rank, owned) in ranks.iter().enumerate() {
            let vote = SavedVote { grad_norm_squared: 1.5, loss: 2.5 };
            let heading = Heading::new(job, Step(step), &whole.replicated_digest(), Some(vote));
            let mut snapshot = Snapshot { heading, pieces: Vec::new(), state: Vec::new() };
            if (replica, rank) == (0, 0) {
                snapshot.pieces.push((None, Units::new()));
                whole.export_replicated(&mut snapshot.state);
            }
            for (axis, units) in to_write(owned, replica as u32, replicas.len() as u32) {
                whole.export_units(axis, &units, &mut snapshot.state).unwrap();
                snapshot.pieces.push((Some(axis), units));
            }
            all.push((format!("{replica}.0.{rank}"), snapshot));
        }
    }
    all
}
