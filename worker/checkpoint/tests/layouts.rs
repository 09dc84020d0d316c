//! What one layout wrote, any other reads, bit for bit.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{everything, job, scattered, snapshots, split, trained};
use reknit_checkpoint::{Checkpoint, CheckpointError, Store, to_write};
use reknit_layout::job::{Dtype, ModelSpec};
use reknit_layout::{Axis, Units};
use reknit_model::{Real, Shard};
use std::collections::BTreeMap;

/// What a rank that shall own these makes of a checkpoint.
fn load<T: Real>(checkpoint: &Checkpoint, model: &ModelSpec, owned: &BTreeMap<Axis, Units>) -> Shard<T> {
    let mut shard = Shard::awaiting(model, owned).unwrap();
    let take = |axis, units: &Units, state: &[u8]| {
        shard.receive(axis, units, state).unwrap();
        Ok::<_, CheckpointError>(())
    };
    checkpoint.load(owned, take).unwrap();
    shard.check_arrived().unwrap();
    shard.adopt();
    shard
}

fn any_layout_to_any<T: Real>(dtype: Dtype, tied: bool) {
    let mut job = job();
    job.model.dtype = dtype;
    job.model.tie_embeddings = tied;
    let model = &job.model;
    let whole = trained::<T>(model, 3);
    let digests = |shard: &Shard<T>| -> BTreeMap<(Axis, u32), u64> {
        let owned = shard.owned().iter().flat_map(|(axis, units)| units.iter().map(|unit| (*axis, unit)));
        owned.map(|(axis, unit)| ((axis, unit), shard.digest(axis, unit).unwrap())).collect()
    };
    let expected = digests(&whole);
    // One rank; replicas of one and of several degrees; scattered units.
    let layouts = [
        vec![vec![everything(model)]],
        vec![split(model, 3), split(model, 2)],
        vec![split(model, 4), split(model, 3), scattered(model, 5)],
    ];
    for (number, layout) in layouts.iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let snapshots = snapshots(&job, &whole, layout, 7);
        let all: usize = snapshots.iter().map(|(_, snapshot)| snapshot.state.len()).sum();
        let whole_bytes = (whole.owned().iter())
            .map(|(axis, units)| units.len() as u64 * model.unit_params(axis.family))
            .sum::<u64>()
            + model.replicated_params();
        assert_eq!(all as u64, whole_bytes * model.dtype.state_bytes(), "every unit is written once");
        for (at, (writer, snapshot)) in snapshots.iter().enumerate() {
            let mut last = (0, 0);
            let written = store.write(snapshot, writer, |done, total| last = (done, total)).unwrap();
            assert_eq!(written.complete, at + 1 == snapshots.len(), "the last part makes it complete");
            assert_eq!(last.0, last.1);
        }
        let id = snapshots[0].1.heading.id();
        assert_eq!(store.complete_ids().unwrap(), std::slice::from_ref(&id));
        let checkpoint = Checkpoint::open(&store.path().join(id.to_string())).unwrap();
        assert_eq!(checkpoint.verify(|_, _, problem| assert!(problem.is_none())), 0);
        checkpoint.fits(model).unwrap();
        for other in layouts.iter().flatten() {
            let mut found = BTreeMap::new();
            for owned in other {
                let shard = load::<T>(&checkpoint, model, owned);
                assert_eq!(shard.owned(), owned);
                assert_eq!(shard.replicated_digest(), whole.replicated_digest());
                found.extend(digests(&shard));
            }
            assert_eq!(found, expected, "of layout {number}");
        }
    }
}

#[test]
fn f32() {
    any_layout_to_any::<f32>(Dtype::F32, false);
}

#[test]
fn f64_and_tied() {
    any_layout_to_any::<f64>(Dtype::F64, true);
}

#[test]
fn the_writing_is_shared_evenly() {
    // 3 replicas of a rank that owns 17 units of each axis: no two write the same, and each as much as the others.
    let axes = (0..3).flat_map(|layer| [Axis::attn(layer), Axis::ffn(layer)]).chain([Axis::vocab()]);
    let owned: BTreeMap<Axis, Units> = axes.map(|axis| (axis, Units::range(5, 22))).collect();
    let mut written: BTreeMap<Axis, Units> = BTreeMap::new();
    let mut counts = Vec::new();
    for replica in 0..3 {
        let mut count = 0;
        for (axis, units) in to_write(&owned, replica, 3) {
            let before = written.entry(axis).or_default();
            assert!(before.intersection(&units).is_empty(), "{axis} {units}");
            *before = before.union(&units);
            count += units.len();
        }
        counts.push(count);
    }
    assert_eq!(written, owned);
    assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{counts:?}");
}
