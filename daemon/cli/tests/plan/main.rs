//! `reknit plan` and `reknit bench planner` as one meets them: what they print, what they refuse, and whether a plan is
//! right by rules that share no code with the planner.

#![allow(clippy::unwrap_used)] // A failed set-up fails the test.

mod chained;
mod checker;
mod golden;
mod printed;
mod random;
mod refused;

use std::path::Path;
use std::process::{Command, Output};

/// In the folder of the data files.
fn reknit(args: &[&str]) -> Output {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/plan/data");
    reknit_in(Path::new(data), args)
}

fn reknit_in(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_reknit")).args(args).current_dir(folder).output().unwrap()
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

#[test]
fn the_benchmark_prints_its_figures() {
    let output = reknit(&["bench", "planner", "--gpus", "128", "--runs", "3", "--format", "json"]);
    assert_eq!(text(output.stderr), "");
    let printed = text(output.stdout);
    let json: serde_json::Value = serde_json::from_str(&printed).unwrap();
    let keys = ["gpus", "replan_ms", "min", "median", "max", "contingency_ms", "bytes_planned"];
    let places: Vec<_> = keys.iter().map(|key| printed.find(&format!("\"{key}\":")).unwrap()).collect();
    assert!(places.is_sorted(), "{printed}");
    assert_eq!(json["gpus"], 128);
    let ms = |key: &str| json["replan_ms"][key].as_f64().unwrap();
    assert!(0.0 < ms("min") && ms("min") <= ms("median") && ms("median") <= ms("max"), "{printed}");
    assert!(json["contingency_ms"].as_f64().unwrap() > 0.0);
    // An eighth of a stage: 10 of 80 layers, 8 of 64 heads and 28 of 224 blocks, at least; 12 bytes a parameter.
    let least = 12 * 10 * (8 * 4 * 128 * 8192 + 28 * 3 * 128 * 8192_u64);
    let bytes = json["bytes_planned"].as_u64().unwrap();
    assert!((least..=least + 12 * 126 * 128 * 8192).contains(&bytes), "{bytes}");

    let output = reknit(&["bench", "planner", "--gpus", "128", "--runs", "1"]);
    assert!(text(output.stdout).starts_with("GPUS  REPLAN MIN"));
}
