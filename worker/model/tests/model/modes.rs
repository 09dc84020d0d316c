//! Dropout, recomputation and bf16.

use crate::support::{Owned, State, batch, everything, lively, model, scattered, together};
use reknit_layout::Step;
use reknit_layout::job::{Dtype, ModelSpec, OptimizerSpec};
use reknit_model::{Alone, Batch, Real, Shard, Team};

fn with_weights_of<T: Real>(model: &ModelSpec, source: &Shard<T>, owned: &[Owned]) -> Vec<Shard<T>> {
    let received = State::of(std::slice::from_ref(source));
    owned.iter().map(|owned| received.build(model, owned)).collect()
}

/// Bits of the loss and of all gradients after one pass of a group.
fn pass<T: Real + Into<f64>>(shards: &mut [Shard<T>], batch: &Batch) -> (Vec<u64>, Vec<u64>) {
    let losses =
        together(shards, |shard, rank| shard.forward_backward(batch, 0.3, rank).expect("whole group"));
    let mut gradients = Vec::new();
    for shard in shards.iter() {
        let mut values = shard.replicated_gradients().to_vec();
        values.extend(shard.owned().keys().flat_map(|axis| shard.gradients(*axis)));
        gradients.extend(values.into_iter().map(|value| value.into().to_bits()));
    }
    (losses.into_iter().map(f64::to_bits).collect(), gradients)
}

#[test]
fn recomputation_changes_no_bit() {
    for (dropout, dtype) in [(0.0, Dtype::F32), (0.2, Dtype::F32), (0.2, Dtype::Bf16)] {
        let kept = ModelSpec { dropout, dtype, layers: 3, ..model() };
        let again = ModelSpec { recompute: true, ..kept.clone() };
        let source = lively::<f32>(&kept);
        let owned = scattered(&kept, 2);
        let mut shards = with_weights_of(&kept, &source, &owned);
        let mut recomputing = with_weights_of(&again, &source, &owned);
        for seed in 1..=2 {
            let batch = batch(&kept, 3, seed);
            assert!(pass(&mut shards, &batch) == pass(&mut recomputing, &batch), "{dropout} {dtype:?}");
        }
    }
}

#[test]
fn what_is_dropped_depends_on_seed_and_sample_and_on_nothing_else() {
    let model = ModelSpec { dropout: 0.4, ..model() };
    let source = lively::<f64>(&model);
    let mut alone = with_weights_of(&model, &source, &[everything(&model)]);
    let all = Batch { first_sample: 1000, ..batch(&model, 4, 1) };
    let loss = |shard: &mut Shard<f64>, batch: &Batch| shard.loss_only(batch, &mut Alone).expect("alone");
    let expected = loss(&mut alone[0], &all);
    // One sample at a time, each with its number; and in a group.
    let one_by_one: f64 = (0..4)
        .map(|sample| {
            let tokens = all.tokens.chunks(all.seq_len + 1).nth(sample).expect("four").to_vec();
            let first_sample = all.first_sample + sample as u64;
            loss(&mut alone[0], &Batch { tokens, samples: 1, first_sample, ..all.clone() })
        })
        .sum();
    assert!((one_by_one / expected - 1.0).abs() < 1e-12);
    let mut group = with_weights_of(&model, &source, &scattered(&model, 3));
    let losses = together(&mut group, |shard, rank| shard.loss_only(&all, rank).expect("whole group"));
    assert!((losses[2] / expected - 1.0).abs() < 1e-12);
    alone[0].set_team(Team::new(3).expect("threads"));
    assert_eq!(loss(&mut alone[0], &all).to_bits(), expected.to_bits());
    // Other numbers drop other values.
    let mut others = [Batch { first_sample: 1001, ..all.clone() }, Batch { seed: 2, ..all.clone() }]
        .map(|batch| loss(&mut alone[0], &batch))
        .to_vec();
    let none = ModelSpec { dropout: 0.0, ..model };
    others.push(loss(&mut with_weights_of(&none, &source, &[everything(&none)])[0], &all));
    assert!(others.iter().all(|other| (other / expected - 1.0).abs() > 1e-4), "{others:?} {expected}");
}

/// Rounds the weights of every matrix to bf16, in another way than the crate does.
fn rounded(model: &ModelSpec, shard: &Shard<f32>) -> Shard<f32> {
    let mut received = State::default();
    for (&axis, units) in shard.owned() {
        let unit_len = Shard::<f32>::unit_len(model, axis.family);
        let mut bytes = Vec::new();
        shard.export_units(axis, units, &mut bytes).expect("owned");
        for unit in bytemuck::cast_slice_mut::<u8, f32>(&mut bytes).chunks_mut(3 * unit_len) {
            for weight in &mut unit[..unit_len] {
                // Adding this much leaves eight bits of the mantissa.
                let much = *weight * 65536.0;
                *weight = (*weight + much) - much;
            }
        }
        received.add_units(axis, units.clone(), bytes);
    }
    let mut bytes = Vec::new();
    shard.export_replicated(&mut bytes);
    received.set_replicated(bytes);
    received.build(model, shard.owned())
}

#[test]
fn bf16_computes_with_rounded_matrices_and_keeps_the_others() {
    for tie_embeddings in [false, true] {
        let single = ModelSpec { dtype: Dtype::F32, tie_embeddings, ..model() };
        let half = ModelSpec { dtype: Dtype::Bf16, ..single.clone() };
        let source = lively::<f32>(&single);
        let mut shards = with_weights_of(&half, &source, &[everything(&half)]);
        let mut expected = [rounded(&single, &source)];
        let batch = batch(&half, 3, 1);
        let got = pass(&mut shards, &batch);
        assert!(got == pass(&mut expected, &batch));
        let mut not_rounded = with_weights_of(&single, &source, &[everything(&single)]);
        assert!(got != pass(&mut not_rounded, &batch));
        // What is moved is what was given.
        for (&axis, units) in source.owned() {
            for unit in units.iter() {
                assert_eq!(shards[0].digest(axis, unit), source.digest(axis, unit));
            }
        }
    }
}

/// Steps too small for bf16's eight bits add up all the same, in the weights that are kept.
#[test]
fn bf16_learns_as_f32_does() {
    let optimizer = OptimizerSpec {
        lr: 2e-3,
        warmup_steps: 5,
        decay_steps: 0,
        min_lr: 0.0,
        betas: [0.9, 0.95],
        eps: 1e-8,
        weight_decay: 0.01,
        grad_clip: 1.0,
    };
    let curve = |dtype: Dtype| -> Vec<f64> {
        let model = ModelSpec { hidden: 32, dtype, ..model() };
        let mut shard = Shard::<f32>::init(&model, 1, &everything(&model));
        let batch = batch(&model, 4, 1);
        let tokens = (batch.samples * batch.seq_len) as f64;
        (1..=80)
            .map(|step| {
                shard.zero_gradients();
                let loss = shard.forward_backward(&batch, 1.0 / tokens, &mut Alone).expect("alone");
                let norm = shard.gradient_norm_squared(true);
                shard.apply(Step(step), &optimizer, norm);
                loss / tokens
            })
            .collect()
    };
    let (half, single) = (curve(Dtype::Bf16), curve(Dtype::F32));
    assert!(single[79] < 0.5 * single[0], "{} {}", single[0], single[79]);
    for (step, (half, single)) in half.iter().zip(&single).enumerate() {
        assert!((half / single - 1.0).abs() < 0.02, "step {}: {half} instead of {single}", step + 1);
    }
    assert!(half != single);
}
