//! The number of threads changes no bit.

use crate::support::{State, batch, lively, model, scattered, together};
use reknit_layout::Step;
use reknit_layout::job::{ModelSpec, OptimizerSpec};
use reknit_model::{Real, Shard, Team};

const OPTIMIZER: OptimizerSpec = OptimizerSpec {
    lr: 1e-2,
    warmup_steps: 2,
    decay_steps: 50,
    min_lr: 1e-3,
    betas: [0.9, 0.95],
    eps: 1e-8,
    weight_decay: 0.1,
    grad_clip: 1.0,
};

/// Losses and the state of all ranks after three steps, each of two micro-batches.
fn trained<T: Real>(model: &ModelSpec, threads: usize) -> (Vec<u64>, Vec<u8>) {
    let received = State::of(&[lively::<T>(model)]);
    let mut shards: Vec<Shard<T>> =
        scattered(model, 2).iter().map(|owned| received.build(model, owned)).collect();
    for shard in &mut shards {
        shard.set_team(Team::new(threads).expect("threads"));
    }
    let mut losses = Vec::new();
    for step in 1..=3 {
        let sums = together(&mut shards, |shard, rank| {
            shard.zero_gradients();
            [2 * step, 2 * step + 1].map(|seed| {
                let batch = batch(model, 3, seed);
                shard.forward_backward(&batch, 0.01, rank).expect("whole group").to_bits()
            })
        });
        losses.extend(sums.into_iter().flatten());
        let norm =
            shards.iter().enumerate().map(|(rank, shard)| shard.gradient_norm_squared(rank == 0)).sum();
        shards.iter_mut().for_each(|shard| shard.apply(Step(step), &OPTIMIZER, norm));
    }
    let mut state = Vec::new();
    for shard in &shards {
        for (&axis, units) in shard.owned() {
            shard.export_units(axis, units, &mut state).expect("owned");
        }
        shard.export_replicated(&mut state);
    }
    (losses, state)
}

#[test]
fn any_number_of_threads_computes_the_same_bits() {
    // Wide enough that products, rows and ranges are cut.
    let wide = ModelSpec {
        hidden: 144,
        ffn: 330,
        ffn_block: 55,
        vocab: 312,
        vocab_block: 26,
        seq_len: 90,
        ..model()
    };
    for model in [model(), wide] {
        let expected = trained::<f32>(&model, 1);
        for threads in [2, 3, 5] {
            assert!(trained::<f32>(&model, threads) == expected, "{threads} threads");
        }
        assert!(trained::<f64>(&model, 4) == trained::<f64>(&model, 1));
    }
}
