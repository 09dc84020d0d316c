//! The loss against the model's formulas written out naively, token by token, over the whole matrices.

use crate::support::{batch, everything, lively, model};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use reknit_model::{Alone, Shard};

type Vector = Vec<f64>;

/// Rows of `hidden` values: the weights of a unit in the crate's order, or the norms.
fn rows(model: &ModelSpec, bytes: &[u8]) -> Vec<Vector> {
    let values: &[f64] = bytemuck::cast_slice(bytes);
    let weights = &values[..values.len() / 3];
    weights.chunks(model.hidden as usize).map(<[f64]>::to_vec).collect()
}

fn unit(model: &ModelSpec, shard: &Shard<f64>, axis: Axis, unit: u32) -> Vec<Vector> {
    let mut bytes = Vec::new();
    shard.export_units(axis, &Units::range(unit, unit + 1), &mut bytes).expect("owned");
    rows(model, &bytes)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn times(rows: &[Vector], x: &[f64]) -> Vector {
    rows.iter().map(|row| dot(row, x)).collect()
}

/// `out += factor * row`
fn add(out: &mut [f64], factor: f64, row: &[f64]) {
    for (out, x) in out.iter_mut().zip(row) {
        *out += factor * x;
    }
}

fn norm(x: &[f64], gain: &[f64]) -> Vector {
    let root = (dot(x, x) / x.len() as f64 + 1e-5).sqrt();
    x.iter().zip(gain).map(|(x, gain)| x / root * gain).collect()
}

fn softmax(x: &[f64]) -> Vector {
    let sum: f64 = x.iter().map(|x| x.exp()).sum();
    x.iter().map(|x| x.exp() / sum).collect()
}

fn rotate(head: &[f64], position: usize) -> Vector {
    let half = head.len() / 2;
    (0..head.len())
        .map(|i| {
            let frequency = 10000_f64.powf(-((i % half) as f64) / half as f64);
            let (sine, cosine) = (position as f64 * frequency).sin_cos();
            if i < half {
                head[i] * cosine - head[i + half] * sine
            } else {
                head[i] * cosine + head[i - half] * sine
            }
        })
        .collect()
}

/// Adds the attention of every position of one text to `out`.
fn attend(model: &ModelSpec, weights: &[Vector], normed: &[Vector], out: &mut [Vector]) {
    let (dim, queries) = (model.head_dim() as usize, (model.heads / model.kv_heads) as usize);
    let (inputs, outputs) = weights.split_at((queries + 2) * dim);
    let heads: Vec<&[Vector]> = inputs.chunks(dim).collect();
    let (key_rows, value_rows) = (heads[queries], heads[queries + 1]);
    let turned = |rows: &[Vector], position: usize| rotate(&times(rows, &normed[position]), position);
    for (now, out) in out.iter_mut().enumerate() {
        for query in 0..queries {
            let asked = turned(heads[query], now);
            let scores: Vector =
                (0..=now).map(|past| dot(&asked, &turned(key_rows, past)) / (dim as f64).sqrt()).collect();
            let mut mixed = vec![0.0; dim];
            for (past, weight) in softmax(&scores).into_iter().enumerate() {
                add(&mut mixed, weight, &times(value_rows, &normed[past]));
            }
            for (value, row) in mixed.iter().zip(&outputs[query * dim..]) {
                add(out, *value, row);
            }
        }
    }
}

fn feed_forward(model: &ModelSpec, weights: &[Vector], normed: &[Vector], out: &mut [Vector]) {
    let block = model.ffn_block as usize;
    for (x, out) in normed.iter().zip(out) {
        let projected = times(&weights[..2 * block], x);
        for column in 0..block {
            let (gate, up) = (projected[column], projected[block + column]);
            add(out, gate / (1.0 + (-gate).exp()) * up, &weights[2 * block + column]);
        }
    }
}

fn loss(model: &ModelSpec, shard: &Shard<f64>, text: &[u32]) -> f64 {
    let mut bytes = Vec::new();
    shard.export_replicated(&mut bytes);
    let gains = rows(model, &bytes);
    let vocab: Vec<_> =
        (0..model.units(Axis::vocab().family)).map(|u| unit(model, shard, Axis::vocab(), u)).collect();
    let block = model.vocab_block as usize;
    let embedding: Vec<Vector> = vocab.iter().flat_map(|rows| rows[..block].to_vec()).collect();
    let head: Vec<Vector> = vocab.iter().flat_map(|rows| rows[rows.len() - block..].to_vec()).collect();

    let inputs = &text[..text.len() - 1];
    let mut stream: Vec<Vector> = inputs.iter().map(|&token| embedding[token as usize].clone()).collect();
    for layer in 0..model.layers {
        for (axis, gain) in [(Axis::attn(layer), 2 * layer), (Axis::ffn(layer), 2 * layer + 1)] {
            let normed: Vec<Vector> = stream.iter().map(|x| norm(x, &gains[gain as usize])).collect();
            for number in 0..model.units(axis.family) {
                let weights = unit(model, shard, axis, number);
                if axis == Axis::attn(layer) {
                    attend(model, &weights, &normed, &mut stream);
                } else {
                    feed_forward(model, &weights, &normed, &mut stream);
                }
            }
        }
    }
    let of_token = |(x, &target): (&Vector, &u32)| {
        let logits = times(&head, &norm(x, &gains[2 * model.layers as usize]));
        -softmax(&logits)[target as usize].ln()
    };
    stream.iter().zip(&text[1..]).map(of_token).sum()
}

#[test]
fn the_loss_is_that_of_the_formulas() {
    for tie_embeddings in [false, true] {
        let model = ModelSpec { tie_embeddings, seq_len: 70, ..model() };
        let mut shard = lively::<f64>(&model);
        assert_eq!(shard.owned(), &everything(&model));
        let batch = batch(&model, 2, 21);
        let expected: f64 = batch.tokens.chunks(71).map(|text| loss(&model, &shard, text)).sum();
        let got = shard.loss_only(&batch, &mut Alone).unwrap();
        assert!((got / expected - 1.0).abs() < 1e-12, "{got} instead of {expected}");
    }
}
