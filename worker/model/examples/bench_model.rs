//! Tokens a second of one rank and one thread: forward, backward and optimizer.

use reknit_layout::job::{Dtype, ModelKind, ModelSpec, OptimizerSpec};
use reknit_layout::{Step, Units};
use reknit_model::{Alone, Batch, Shard};
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("layers hidden heads  ffn vocab  seq batch    Mparam  best ms  tokens/s   GFLOP/s");
    for (layers, hidden, heads, ffn, seq_len, samples) in
        [(4, 192, 12, 768, 64, 8), (4, 192, 12, 768, 128, 8), (4, 256, 8, 1024, 128, 8)]
    {
        let model = ModelSpec {
            kind: ModelKind::Decoder,
            layers,
            hidden,
            heads,
            kv_heads: heads,
            head_dim: None,
            ffn,
            ffn_block: 64,
            vocab: 256,
            vocab_block: 16,
            seq_len,
            tie_embeddings: false,
            dtype: Dtype::F32,
        };
        run(&model, samples)?;
    }
    Ok(())
}

fn run(model: &ModelSpec, samples: usize) -> Result<(), Box<dyn std::error::Error>> {
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
    let seq_len = model.seq_len as usize;
    let tokens = samples * seq_len;
    let batch = Batch {
        tokens: (0..samples * (seq_len + 1)).map(|i| (i * i % 251) as u32).collect(),
        samples,
        seq_len,
        ..Batch::default()
    };
    let mut best = Duration::MAX;
    let begin = Instant::now();
    let mut step = 0;
    while step < 5 || begin.elapsed() < Duration::from_secs(5) {
        step += 1;
        let start = Instant::now();
        shard.zero_gradients();
        shard.forward_backward(&batch, 1.0 / tokens as f64, &mut Alone)?;
        let norm = shard.gradient_norm_squared(true);
        shard.apply(Step(step), &optimizer, norm);
        best = best.min(start.elapsed());
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
        "{:6} {:6} {:5} {:4} {:5} {:4} {samples:5} {:9.2} {:8.1} {:9.0} {:9.1}",
        model.layers,
        model.hidden,
        model.heads,
        model.ffn,
        model.vocab,
        seq_len,
        (matrices + model.replicated_params()) as f64 / 1e6,
        seconds * 1e3,
        tokens as f64 / seconds,
        flops as f64 / seconds / 1e9,
    );
    Ok(())
}
