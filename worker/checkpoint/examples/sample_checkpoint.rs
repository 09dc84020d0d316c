//! `sample_checkpoint FOLDER`: writes the checkpoint of a small model into FOLDER/checkpoints, as four ranks do, and
//! what the model makes of some tokens into FOLDER/reference.json. For the check that other tools understand an export.

#![allow(clippy::unwrap_used, reason = "whoever runs it sees the panic")]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{job, snapshots, split, trained};
use reknit_checkpoint::Store;
use reknit_model::{Alone, Batch};
use std::path::PathBuf;

fn main() {
    let folder = PathBuf::from(std::env::args_os().nth(1).expect("a folder"));
    let job = job();
    let model = &job.model;
    let mut whole = trained::<f32>(model, 5);
    let store = Store::new(folder.join("checkpoints"));
    for (writer, snapshot) in snapshots(&job, &whole, &[split(model, 2), split(model, 2)], 5) {
        store.write(&snapshot, &writer, |_, _| {}).unwrap();
    }
    let (samples, seq_len) = (3, model.seq_len as usize);
    let tokens: Vec<u32> = (0..samples * (seq_len + 1)).map(|at| at as u32 * 7 % model.vocab).collect();
    let batch = Batch { tokens: tokens.clone(), samples, seq_len, first_sample: 0, seed: 0 };
    let loss = whole.forward_backward(&batch, 1.0, &mut Alone).unwrap() / (samples * seq_len) as f64;
    let reference = serde_json::json!({
        "heads": model.heads, "kv_heads": model.kv_heads, "layers": model.layers, "seq_len": seq_len,
        "tokens": tokens, "loss": loss,
    });
    std::fs::write(folder.join("reference.json"), reference.to_string()).unwrap();
}
