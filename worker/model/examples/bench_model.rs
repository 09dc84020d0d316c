//! Tokens a second of one rank: forward, backward and optimizer.
//!
//! `bench_model [small|big] [threads]`; without arguments both shapes with 1 and 2 threads.

use reknit_layout::job::{Dtype, ModelKind, ModelSpec, OptimizerSpec};
use reknit_layout::{Step, Units};
use reknit_model::{Alone, Batch, Shard, Team};
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let shape = arguments.first();
    let threads: Vec<usize> = match arguments.get(1) {
        Some(threads) => vec![threads.parse()?],
        None => vec![1, 2],
    };
    println!("layers hidden heads  seq batch threads    Mparam  best ms   cpu ms  tokens/s   GFLOP/s");
    for (name, layers, hidden, seq_len, samples) in [("small", 4, 256, 128, 8), ("big", 6, 512, 256, 4)] {
        if shape.is_some_and(|shape| shape != name) {
            continue;
        }
        let model = ModelSpec {
            kind: ModelKind::Decoder,
            layers,
            hidden,
            heads: 8,
            kv_heads: 8,
            head_dim: None,
            ffn: hidden / 4 * 11,
            ffn_block: 32,
            vocab: 256,
            vocab_block: 16,
            seq_len,
            tie_embeddings: false,
            dtype: Dtype::F32,
            dropout: 0.0,
            recompute: false,
        };
        for &threads in &threads {
            run(&model, samples, threads)?;
        }
    }
    Ok(())
}

/// What all threads of this process have computed so far.
fn processor_time() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanoseconds = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanoseconds.sum())
}

fn run(model: &ModelSpec, samples: usize, threads: usize) -> Result<(), Box<dyn std::error::Error>> {
    let optimizer = OptimizerSpec {
        lr: 1e-3,
        warmup_steps: 10,
        decay_steps: 1000,
        min_lr: 1e-4,
        betas: [0.9, 0.95],
        eps: 1e-8,
        weight_decay: 0.1,
        grad_clip: 1.0,
    };
    let axes = model.axes().into_iter();
    let owned = axes.map(|axis| (axis, Units::range(0, model.units(axis.family)))).collect();
    let mut shard = Shard::<f32>::init(model, 1, &owned);
    shard.set_team(Team::new(threads)?);
    let seq_len = model.seq_len as usize;
    let tokens = samples * seq_len;
    let batch = Batch {
        tokens: (0..samples * (seq_len + 1)).map(|i| (i * i % 251) as u32).collect(),
        samples,
        seq_len,
        ..Batch::default()
    };
    let (mut best, mut least) = (Duration::MAX, Duration::MAX);
    let begin = Instant::now();
    let mut step = 0;
    while step < 5 || begin.elapsed() < Duration::from_secs(5) {
        step += 1;
        let (start, computed) = (Instant::now(), processor_time());
        shard.zero_gradients();
        shard.forward_backward(&batch, 1.0 / tokens as f64, &mut Alone)?;
        let norm = shard.gradient_norm_squared(true);
        shard.apply(Step(step), &optimizer, norm);
        best = best.min(start.elapsed());
        least = least.min(processor_time() - computed);
    }
    let matrices: u64 = model
        .axes()
        .iter()
        .map(|axis| u64::from(model.units(axis.family)) * model.unit_params(axis.family))
        .sum();
    // Multiply-adds of the matrices three times over (the embedding is looked up), and of causal attention.
    let embedding = u64::from(model.vocab * model.hidden);
    let attention = u64::from(model.layers) * u64::from(model.heads * model.head_dim()) * seq_len as u64;
    let flops = 6 * (matrices - embedding + attention) * tokens as u64;
    let seconds = best.as_secs_f64();
    println!(
        "{:6} {:6} {:5} {:4} {samples:5} {threads:7} {:9.2} {:8.1} {:8.1} {:9.0} {:9.1}",
        model.layers,
        model.hidden,
        model.heads,
        model.seq_len,
        (matrices + model.replicated_params()) as f64 / 1e6,
        seconds * 1e3,
        least.as_secs_f64() * 1e3,
        tokens as f64 / seconds,
        flops as f64 / seconds / 1e9,
    );
    Ok(())
}
