//! The model learns, and learns the same each time.

use crate::support::{State, everything, model, scattered, split, together};
use reknit_layout::Step;
use reknit_layout::job::{ModelSpec, OptimizerSpec};
use reknit_model::{Batch, Real, Shard};

const TEXT: &[u8] = b"the quick brown fox jumps over the lazy dog. ";
const OPTIMIZER: OptimizerSpec = OptimizerSpec {
    lr: 1e-2,
    warmup_steps: 10,
    decay_steps: 150,
    min_lr: 1e-3,
    betas: [0.9, 0.95],
    eps: 1e-8,
    weight_decay: 0.01,
    grad_clip: 1.0,
};

fn reader() -> ModelSpec {
    ModelSpec { hidden: 24, vocab: 128, vocab_block: 16, seq_len: 16, ..model() }
}

/// Mean loss of each step. The same samples whatever the number of ranks.
fn train<T: Real>(shards: &mut [Shard<T>], steps: std::ops::RangeInclusive<u64>) -> Vec<f64> {
    let (samples, seq_len) = (4, 16);
    steps
        .map(|step| {
            let texts = (0..samples).flat_map(|sample| {
                let start = (step as usize * samples + sample) * 7;
                TEXT.iter().cycle().skip(start % TEXT.len()).take(seq_len + 1)
            });
            let batch = Batch {
                tokens: texts.map(|&byte| u32::from(byte)).collect(),
                samples,
                seq_len,
                seed: 1,
                first_sample: (step - 1) * samples as u64,
            };
            let tokens = (samples * seq_len) as f64;
            let losses = together(shards, |shard, rank| {
                shard.zero_gradients();
                shard.forward_backward(&batch, 1.0 / tokens, rank).expect("whole group")
            });
            let norms = shards.iter().enumerate().map(|(rank, shard)| shard.gradient_norm_squared(rank == 0));
            let norm = norms.sum();
            for shard in shards.iter_mut() {
                shard.apply(Step(step), &OPTIMIZER, norm);
            }
            losses[0] / tokens
        })
        .collect()
}

#[test]
fn the_loss_falls_on_a_repeated_text() {
    let model = reader();
    let mut shards = vec![Shard::<f32>::init(&model, 1, &everything(&model))];
    let losses = train(&mut shards, 1..=150);
    let first = losses[0];
    assert!((first - 128_f64.ln()).abs() < 0.1, "untrained: {first}");
    let last = losses[140..].iter().sum::<f64>() / 10.0;
    assert!(last < 0.4, "after 150 steps: {last}");
}

#[test]
fn two_runs_are_bit_equal() {
    let model = reader();
    let run = || {
        let mut shards: Vec<_> =
            split(&model, 3).iter().map(|owned| Shard::<f32>::init(&model, 1, owned)).collect();
        let losses = train(&mut shards, 1..=10);
        let mut digests = Vec::new();
        for shard in &shards {
            digests.push(shard.replicated_digest());
            for (&axis, units) in shard.owned() {
                digests.extend(
                    units.iter().map(|unit| format!("{:016x}", shard.digest(axis, unit).expect("owned"))),
                );
            }
        }
        (losses.into_iter().map(f64::to_bits).collect::<Vec<_>>(), digests)
    };
    let (first, second) = (run(), run());
    assert_eq!(first, second);
    // REPLICATED: the three ranks agree.
    let of_ranks: Vec<_> = first.1.iter().filter(|digest| **digest == first.1[0]).collect();
    assert_eq!(of_ranks.len(), 3);
}

/// The curve with ranks lost and regained on the way is the curve of one rank.
fn curve_under_reshards<T: Real>(tolerance: f64) {
    let model = reader();
    let mut single = vec![Shard::<T>::init(&model, 1, &everything(&model))];
    let expected = train(&mut single, 1..=40);
    let mut shards: Vec<_> =
        split(&model, 4).iter().map(|owned| Shard::<T>::init(&model, 1, owned)).collect();
    let mut losses = train(&mut shards, 1..=15);
    for (owned, steps) in [(scattered(&model, 3), 16..=25), (split(&model, 4), 26..=40)] {
        let received = State::of(&shards);
        shards = owned.iter().map(|owned| received.build(&model, owned)).collect();
        losses.extend(train(&mut shards, steps));
    }
    for (step, (got, expected)) in losses.iter().zip(&expected).enumerate() {
        assert!((got / expected - 1.0).abs() < tolerance, "step {}: {got} instead of {expected}", step + 1);
    }
}

#[test]
fn the_loss_curve_does_not_depend_on_reshards() {
    curve_under_reshards::<f64>(1e-10);
    curve_under_reshards::<f32>(1e-4);
}
