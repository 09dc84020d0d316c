//! The demo as a whole, with real processes. Needs all programs in one folder: `cargo build --workspace` first.

#![allow(clippy::unwrap_used)] // A failed set-up fails the test.

use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// What the user has set for a real cluster must not reach the demo's. Its temporary folder lies under `dir`.
fn surroundings<'a>(command: &'a mut Command, dir: &Path) -> &'a mut Command {
    command.env("TMPDIR", dir).env("REKNIT_DAEMON", "http://192.0.2.1:1").env("REKNIT_NODE", "elsewhere")
}

/// `make demo` with the programs of this build in place of a new one.
fn make_demo(dir: &Path, args: &str) -> Output {
    let target = tempfile::tempdir().unwrap();
    let programs = Path::new(env!("CARGO_BIN_EXE_reknit")).parent().unwrap();
    std::os::unix::fs::symlink(programs, target.path().join("release")).unwrap();
    let mut command = Command::new("make");
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    command.args(["demo", "CARGO=true", &format!("ARGS={args}")]).env("CARGO_TARGET_DIR", target.path());
    // Those of the make that runs this test.
    command.env_remove("MAKEFLAGS").env_remove("MAKELEVEL");
    surroundings(&mut command, dir).output().unwrap()
}

/// Processes that were started with `dir` on their command line or in their environment. Ended ones have neither.
fn processes_of(dir: &Path) -> Vec<String> {
    let needle = dir.to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    processes
        .filter(|process| {
            ["cmdline", "environ"].iter().any(|file| {
                let text = std::fs::read(process.path().join(file)).unwrap_or_default();
                String::from_utf8_lossy(&text).contains(needle)
            })
        })
        .map(|process| process.file_name().to_string_lossy().into_owned())
        .collect()
}

#[track_caller]
fn nothing_is_left(dir: &Path) {
    assert_eq!(processes_of(dir), Vec::<String>::new());
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0, "files are left in {}", dir.display());
}

#[test]
fn two_faults_heal_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let output = make_demo(dir.path(), "--steps 40 --format json");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    let summary: serde_json::Value = serde_json::from_str(&text).unwrap();
    let faults = summary["faults"].as_array().unwrap();
    let kinds: Vec<_> = faults.iter().map(|fault| fault["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["worker_killed", "gpu_lost"]);
    for fault in faults {
        assert!(fault["steps_lost"].as_u64().unwrap() <= 1, "{text}");
        assert_eq!((&fault["samples_lost"], &fault["samples_repeated"]), (&0.into(), &0.into()), "{text}");
        assert!(fault["recovery_ms"]["total"].as_f64().unwrap() > 0.0, "{text}");
    }
    let degrees = serde_json::json!([[4, 4], [4, 3], [4, 4], [3, 4], [4, 4]]);
    assert_eq!(summary["degrees_seen"], degrees);
    assert_eq!((&summary["steps"], &summary["checkpoint_loads"]), (&40.into(), &0.into()));
    assert!(summary["loss_last"].as_f64().unwrap() < summary["loss_first"].as_f64().unwrap());
    nothing_is_left(dir.path());
}

#[test]
fn ctrl_c_stops_everything() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_reknit"));
    command.args(["demo", "--steps", "40", "--plain"]).stdout(Stdio::piped());
    let mut child = surroundings(&mut command, dir.path()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let pid = Pid::from_child(&child);
    let mut lines = lines.map(Result::unwrap);
    lines.find(|line| line.contains("step 1/")).unwrap();
    // Daemon, 2 agents and 8 workers at least.
    assert!(processes_of(dir.path()).len() >= 11);
    kill_process(pid, Signal::INT).unwrap();
    lines.for_each(drop);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    nothing_is_left(dir.path());
}
