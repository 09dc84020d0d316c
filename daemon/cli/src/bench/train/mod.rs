//! `reknit bench train`: tokens a second of the trainer alone. No daemon, no agent, no text: forward, backward and
//! optimizer, in one process with some threads, or as a tensor-parallel group of ranks over the host data plane.

mod member;
mod trainer;

use super::job::count;
use crate::failure::Failure;
use crate::output::{Format, Progress, print_lines};
use crate::table::Table;
use reknit_layout::job::{Dtype, ModelKind, ModelSpec};
use serde::Serialize;
use std::time::Duration;
use trainer::{Setting, Timed};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Shape {
    /// 3.3 million parameters: 4 layers of 256, 8 samples of 128 tokens.
    Small,
    /// 19.5 million parameters: 6 layers of 512, 4 samples of 256 tokens.
    Big,
}

impl Shape {
    fn model(self) -> ModelSpec {
        let (layers, hidden, seq_len) = match self {
            Self::Small => (4, 256, 128),
            Self::Big => (6, 512, 256),
        };
        ModelSpec {
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
        }
    }

    fn samples(self) -> usize {
        match self {
            Self::Small => 8,
            Self::Big => 4,
        }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct TrainArgs {
    #[arg(long, value_enum, value_delimiter = ',', value_name = "SHAPE,...", default_value = "small,big")]
    shape: Vec<Shape>,
    /// Threads of each rank.
    #[arg(long, value_delimiter = ',', value_name = "N,...", default_value = "1,2", value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: Vec<u32>,
    /// Ranks of the tensor-parallel group.
    #[arg(long, value_delimiter = ',', value_name = "T,...", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=8))]
    tensor: Vec<u32>,
    /// How long each point is measured.
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Debug, Serialize)]
struct Point {
    shape: Shape,
    threads: u32,
    tensor: u32,
    params: u64,
    #[serde(flatten)]
    timed: Timed,
}

pub(crate) fn run(args: &TrainArgs) -> Result<(), Failure> {
    let progress = Progress::default();
    let mut points = Vec::new();
    for &shape in &args.shape {
        for &tensor in &args.tensor {
            for &threads in &args.threads {
                progress.show(&format!("{shape:?}: {tensor} ranks of {threads} threads"));
                let model = shape.model();
                let params = count(&model);
                let (samples, time) = (shape.samples(), Duration::from_secs(args.seconds));
                let timed = trainer::time(&Setting { model, samples, threads, tensor, time })?;
                points.push(Point { shape, threads, tensor, params, timed });
            }
        }
    }
    drop(progress);
    match args.format {
        Format::Json => print_lines(&[serde_json::json!({ "points": points }).to_string()]),
        Format::Table => print_lines(&table(&points).lines()),
    }
}

fn table(points: &[Point]) -> Table {
    let mut table =
        Table::new(["SHAPE", "RANKS", "THREADS", "MPARAM", "STEP MS", "BEST", "TOKENS/S", "BEST"]);
    for Point { shape, threads, tensor, params, timed } in points {
        table.row([
            format!("{shape:?}").to_lowercase(),
            tensor.to_string(),
            threads.to_string(),
            format!("{:.1}", *params as f64 / 1e6),
            format!("{:.1}", timed.step_ms.median),
            format!("{:.1}", timed.step_ms.best),
            format!("{:.0}", timed.tokens_per_s.median),
            format!("{:.0}", timed.tokens_per_s.best),
        ]);
    }
    table
}
