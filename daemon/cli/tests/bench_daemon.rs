//! The daemon's bench on a small fleet: every figure is of something that happened.

use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    let reknit = Command::new(env!("CARGO_BIN_EXE_reknit")).args(["bench", "daemon"]).args(args).output();
    reknit.expect("reknit runs")
}

#[test]
fn a_small_fleet_halts_and_resumes_twice() {
    let size = ["--agents", "20", "--workers", "64", "--share", "8", "--seconds", "1", "--step-ms", "200"];
    let output = bench(&[&size[..], &["--format", "json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let figures: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON value");
    assert_eq!((figures["agents"].as_u64(), figures["connections"].as_u64()), (Some(20), Some(28)));
    assert!(figures["load"]["agent_reports_per_s"].as_f64() > Some(10.0), "{figures}");
    assert!(figures["rss_bytes"].as_u64() > Some(1 << 20), "{figures}");
    for recovery in ["loss", "returns"] {
        let recovery = &figures[recovery];
        // Without the one that was killed, or is not back yet.
        assert_eq!(recovery["halted"].as_u64(), Some(63), "{figures}");
        assert!(recovery["prepare_bytes"].as_u64() > Some(100), "{figures}");
        let resumed = recovery["resumed_ms"]["max"].as_f64();
        assert!(resumed >= recovery["halt_ms"]["p50"].as_f64() && resumed > Some(0.0), "{figures}");
    }
}

#[test]
fn sizes_that_make_no_job_are_refused() {
    for (args, told) in [
        (["--workers", "13", "--agents", "8"], "--workers 13: allowed are multiples of 4"),
        (["--workers", "128", "--agents", "1"], "--agents 1: 128 workers need 2 nodes of 64 GPUs"),
    ] {
        let output = bench(&args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(64) && error.contains(told), "{error}");
    }
}
