//! A group of ranks computes what one rank computes, however the units are split.

use crate::support::{
    Left, Owned, State, batch, everything, gradients, group, lively, model, scattered, split, together,
};
use reknit_layout::job::{Dtype, ModelSpec};
use reknit_layout::{Axis, Units};
use reknit_model::{Alone, Batch, BatchError, Real, Shard, StepError};
use std::thread;

fn wide<T: Real>(model: &ModelSpec, shard: &Shard<T>, axis: Axis, units: &Units) -> Vec<f64> {
    gradients(model, shard, axis, units).into_iter().map(T::to_f64).collect()
}

/// Relative to the largest value of the tensor's unit: single values may cancel.
fn assert_close(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(0.0_f64, |largest, x| largest.max(x.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(
            (got - expected).abs() <= tolerance * largest,
            "{what}, element {i}: {got} instead of {expected}"
        );
    }
}

fn same_as_one_rank<T: Real>(model: &ModelSpec, owned: &[Owned], tolerance: f64) {
    let mut single = lively::<T>(model);
    let received = State::of(std::slice::from_ref(&single));
    let mut shards: Vec<_> = owned.iter().map(|owned| received.build(model, owned)).collect();
    let batch = batch(model, 3, 9);
    let expected = single.forward_backward(&batch, 0.25, &mut Alone).expect("alone");
    let losses =
        together(&mut shards, |shard, rank| shard.forward_backward(&batch, 0.25, rank).expect("whole group"));
    let again = together(&mut shards, |shard, rank| shard.loss_only(&batch, rank).expect("whole group"));
    assert_eq!(losses, again);
    let mut compared = 0;
    let mut norm = 0.0;
    for (rank, shard) in shards.iter().enumerate() {
        assert_eq!(losses[rank].to_bits(), losses[0].to_bits());
        assert!((losses[rank] / expected - 1.0).abs() < tolerance, "{} {expected}", losses[rank]);
        norm += shard.gradient_norm_squared(rank == 0);
        assert_eq!(shard.owned(), &owned[rank]);
        for (&axis, units) in shard.owned() {
            for unit in units.iter() {
                let unit = Units::range(unit, unit + 1);
                let (got, expected) = (wide(model, shard, axis, &unit), wide(model, &single, axis, &unit));
                assert_close(&format!("rank {rank}, {axis} unit {unit}"), &got, &expected, tolerance);
                compared += got.len() as u64;
            }
        }
        assert_eq!(shard.replicated_gradients(), shards[0].replicated_gradients());
        let in_f64 =
            |shard: &Shard<T>| shard.replicated_gradients().iter().map(|x| x.to_f64()).collect::<Vec<_>>();
        assert_close("norms", &in_f64(shard), &in_f64(&single), tolerance);
    }
    let all: u64 = model
        .axes()
        .iter()
        .map(|axis| u64::from(model.units(axis.family)) * model.unit_params(axis.family))
        .sum();
    assert_eq!(compared, all);
    assert!((norm / single.gradient_norm_squared(true) - 1.0).abs() < tolerance);
}

#[test]
fn two_three_and_four_ranks() {
    for ranks in 2..=4 {
        same_as_one_rank::<f64>(&model(), &split(&model(), ranks), 1e-10);
        same_as_one_rank::<f32>(&model(), &split(&model(), ranks), 1e-4);
    }
}

#[test]
fn in_every_mode() {
    for dropout in [0.0, 0.25] {
        for recompute in [false, true] {
            for dtype in [Dtype::F64, Dtype::Bf16] {
                let model = ModelSpec { dropout, recompute, dtype, ..model() };
                same_as_one_rank::<f64>(&model, &scattered(&model, 3), 1e-10);
                same_as_one_rank::<f32>(&model, &split(&model, 4), 1e-4);
            }
        }
    }
}

#[test]
fn twelve_units_over_five_ranks() {
    let model = ModelSpec { kv_heads: 12, ffn: 36, ..model() };
    same_as_one_rank::<f64>(&model, &split(&model, 5), 1e-10);
    same_as_one_rank::<f32>(&model, &split(&model, 5), 1e-4);
}

#[test]
fn units_that_are_not_contiguous_tied() {
    let model = ModelSpec { tie_embeddings: true, ..model() };
    same_as_one_rank::<f64>(&model, &scattered(&model, 4), 1e-10);
    same_as_one_rank::<f32>(&model, &scattered(&model, 4), 1e-4);
}

#[test]
fn a_rank_without_any_unit_and_more_ranks_than_units() {
    let mut owned = split(&model(), 2);
    owned.insert(1, Owned::new());
    same_as_one_rank::<f64>(&model(), &owned, 1e-10);
    same_as_one_rank::<f64>(&model(), &split(&model(), 7), 1e-10);
}

#[test]
fn first_weights_do_not_depend_on_the_layout() {
    let whole = Shard::<f32>::init(&model(), 42, &everything(&model()));
    for owned in [split(&model(), 5), scattered(&model(), 3)].concat() {
        let shard = Shard::<f32>::init(&model(), 42, &owned);
        for (&axis, units) in &owned {
            for unit in units.iter() {
                assert_eq!(shard.digest(axis, unit), whole.digest(axis, unit), "{axis} {unit}");
            }
        }
        assert_eq!(shard.replicated_digest(), whole.replicated_digest());
    }
    let (a, b) = (whole.digest(Axis::attn(0), 0), whole.digest(Axis::attn(0), 1));
    let other_layer = whole.digest(Axis::attn(1), 0);
    let other_seed = Shard::<f32>::init(&model(), 43, &everything(&model())).digest(Axis::attn(0), 0);
    assert!(a != b && a != other_layer && a != other_seed);
}

#[test]
fn a_batch_without_samples_exchanges_nothing() {
    let mut shards: Vec<_> =
        split(&model(), 2).iter().map(|owned| Shard::<f32>::init(&model(), 1, owned)).collect();
    let empty = Batch { seq_len: 7, ..Batch::default() };
    let results = together(&mut shards, |shard, rank| {
        let loss = shard.forward_backward(&empty, 1.0, rank).expect("nothing to do");
        (loss, rank.exchanges)
    });
    assert_eq!(results, [(0.0, 0), (0.0, 0)]);
}

#[test]
fn bad_batches_are_refused() {
    let mut shard = Shard::<f32>::init(&model(), 1, &everything(&model()));
    let mut short = batch(&model(), 2, 1);
    short.tokens.pop();
    let error = shard.forward_backward(&short, 1.0, &mut Alone).unwrap_err();
    assert!(matches!(error, StepError::Batch(BatchError::Length { got: 15, expected: 16, .. })));
    let mut strange = batch(&model(), 2, 1);
    strange.tokens[9] = 24;
    let error = shard.forward_backward(&strange, 1.0, &mut Alone).unwrap_err();
    assert!(matches!(error, StepError::Batch(BatchError::Token { token: 24, position: 9, vocab: 24 })));
}

#[test]
fn a_peer_that_leaves_is_an_error_and_the_shard_goes_on() {
    let owned = split(&model(), 2);
    let whole = lively::<f64>(&model());
    let received = State::of(&[whole]);
    let build = |owned| received.build(&model(), owned);
    let mut shards: Vec<_> = owned.iter().map(build).collect();
    let digest = shards[0].digest(Axis::ffn(1), 0);
    let batch = batch(&model(), 2, 9);

    let mut ranks = group::<f64>(2);
    let (mut leaving, mut staying) = (ranks.remove(1), ranks.remove(0));
    let (leaver, stayer) = (shards.remove(1), &mut shards[0]);
    let error = thread::scope(|scope| {
        let batch = &batch;
        // It takes part in the first exchange (the embeddings), then is gone.
        scope.spawn(move || {
            use reknit_model::TensorParallel;
            let mut values = vec![0.0; batch.samples * batch.seq_len * 16];
            leaving.all_reduce_sum(&mut values).expect("both are there");
            drop((leaving, leaver));
        });
        stayer.forward_backward(batch, 1.0, &mut staying).unwrap_err()
    });
    assert!(matches!(error, StepError::Parallel(Left(1))));
    assert_eq!(staying.exchanges, 2);
    assert_eq!(stayer.digest(Axis::ffn(1), 0), digest);

    // The same shard in a new group: right again once its gradients are zeroed.
    shards.push(build(&owned[1]));
    shards[0].zero_gradients();
    let losses = together(&mut shards, |shard, rank| shard.forward_backward(&batch, 1.0, rank).unwrap());
    let mut single = lively::<f64>(&model());
    let expected = single.forward_backward(&batch, 1.0, &mut Alone).unwrap();
    assert!((losses[0] / expected - 1.0).abs() < 1e-12);
    let all = shards[0].gradient_norm_squared(true) + shards[1].gradient_norm_squared(false);
    assert!((all / single.gradient_norm_squared(true) - 1.0).abs() < 1e-10);
}
