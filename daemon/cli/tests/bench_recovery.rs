//! `reknit bench recovery` with real processes. Needs all programs in one folder: `cargo build --workspace` first.

#![allow(clippy::unwrap_used)] // A failed set-up fails the test.

use serde_json::Value;
use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_reknit"));
    command.args(["bench", "recovery", "--format", "json"]).args(args);
    command.output().unwrap()
}

fn figures(args: &[&str]) -> Value {
    let output = bench(&[&["--params", "1m"], args].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn positive(figures: &Value, path: &str) -> f64 {
    let value = figures.pointer(path).and_then(Value::as_f64).unwrap_or(f64::NAN);
    assert!(value > 0.0, "{path} in {figures}");
    value
}

#[test]
fn killed_workers_come_back_and_nothing_is_lost() {
    let figures = figures(&["--repeats", "2"]);
    assert_eq!(figures["signal"], "kill");
    assert_eq!((&figures["losses"], &figures["named"]), (&2.into(), &2.into()));
    assert_eq!((&figures["samples_lost"], &figures["samples_repeated"]), (&0.into(), &0.into()));
    assert!(figures["steps_lost_max"].as_u64().unwrap() <= 1, "{figures}");
    let step = positive(&figures, "/step_ms/median");
    let least = positive(&figures, "/kill_to_commit_ms/min");
    let median = positive(&figures, "/kill_to_commit_ms/median");
    assert!(least <= median && median <= positive(&figures, "/kill_to_commit_ms/max"), "{figures}");
    // A step must be made after the loss.
    assert!(least > step / 4.0, "{figures}");
    for path in ["/reshard_gb_s", "/phases_ms/total"] {
        positive(&figures, path);
    }
    // The kernel tells the start of a process in hundredths of a second: less than that is none.
    let startup = figures.pointer("/startup_ms/median").and_then(Value::as_f64).unwrap_or(f64::NAN);
    assert!((0.0..10_000.0).contains(&startup), "{figures}");
    // It is whole again after the step without the lost worker.
    let rejoin = positive(&figures, "/rejoin_ms/max");
    assert!(positive(&figures, "/whole_again_ms/max") + 0.01 > least + rejoin, "{figures}");
    assert!(figures["bytes_moved"].as_u64().unwrap() > 1_000_000, "{figures}");
    let params = figures["job"]["params"].as_u64().unwrap();
    assert!((700_000..1_400_000).contains(&params), "{params}");
}

#[test]
fn a_frozen_worker_is_named() {
    let figures = figures(&["--repeats", "1", "--signal", "stop"]);
    assert_eq!((&figures["losses"], &figures["named"]), (&1.into(), &1.into()));
    positive(&figures, "/frozen_to_commit_ms/median");
    assert!(figures.get("kill_to_commit_ms").is_none(), "{figures}");
}

#[test]
fn one_that_leaves_does_not_come_back() {
    let figures = figures(&["--leave"]);
    assert_eq!(figures["rejoin_ms"], Value::Null);
    assert_eq!(figures["throughput"]["workers_percent"], 75.0);
    positive(&figures, "/throughput/kept_percent");
    let lost = positive(&figures, "/throughput/lost_cores");
    assert!(positive(&figures, "/throughput/stand_in_cores") <= lost * 1.05 + 0.01, "{figures}");
}

#[test]
fn refused() {
    for (args, text) in [
        (["--leave", "--repeats", "3"].as_slice(), "--repeats 1"),
        (&["--data", "1"], "2..=8"),
        (&["--params", "ten"], "10m"),
    ] {
        let output = bench(args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(64), "{error}");
        assert!(error.contains(text), "{error}");
    }
}
