//! The job that most tests train: small, over real text.

use std::path::Path;

/// What is trained on: these tests, as they were built.
pub const TEXT: &str =
    concat!(include_str!("lab.rs"), include_str!("watch.rs"), include_str!("../process/recovery.rs"));

/// How the test's job differs from the usual one.
#[derive(Debug, Clone, Copy)]
pub struct TestJob {
    pub steps: u64,
    pub tensor: u32,
    pub data: u32,
    pub min_tensor: u32,
    /// Samples of a step: more make it longer.
    pub batch: u32,
    pub dtype: &'static str,
    /// Lines of the table `[recovery]`.
    pub recovery: &'static str,
    /// Lines of the table `[checkpoint]`; its `dir` is a folder `checkpoints` beside the text.
    pub checkpoint: &'static str,
}

impl Default for TestJob {
    fn default() -> Self {
        Self {
            steps: 100_000,
            tensor: 4,
            data: 2,
            min_tensor: 2,
            batch: 8,
            dtype: "f32",
            recovery: "",
            checkpoint: "",
        }
    }
}

impl TestJob {
    /// The job file, for the text at `text`.
    pub fn toml(&self, text: &Path) -> String {
        let Self { steps, tensor, data, min_tensor, batch, dtype, recovery, checkpoint } = self;
        let checkpoints = text.with_file_name("checkpoints");
        let dir = if checkpoint.is_empty() { String::new() } else { checkpoints.display().to_string() };
        format!(
            r#"
name = "test"
[model]
kind = "decoder"
layers = 2
hidden = 96
heads = 12
kv_heads = 12
head_dim = 8
ffn = 192
ffn_block = 16
vocab = 256
vocab_block = 16
seq_len = 32
dtype = "{dtype}"
[parallel]
data = {data}
tensor = {tensor}
min_tensor = {min_tensor}
[batch]
global = {batch}
micro = 4
[optimizer]
lr = 1e-3
warmup_steps = 10
decay_steps = 1000
min_lr = 1e-4
betas = [0.9, 0.95]
eps = 1e-8
weight_decay = 0.1
grad_clip = 1.0
[data]
files = ["{}"]
[recovery]
{recovery}
[checkpoint]
dir = "{dir}"
{checkpoint}
[run]
steps = {steps}
seed = 5
"#,
            text.display()
        )
    }
}
