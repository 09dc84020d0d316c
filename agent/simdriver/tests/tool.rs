//! The command-line tool.

#![allow(clippy::unwrap_used)]

use reknit_simdriver::state::{EventKind, State};
use std::path::Path;
use std::process::Command;

#[test]
fn the_tool_does_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.json");
    let file = path.to_str().unwrap();
    let run = |arguments: &[&str]| {
        let tool = env!("CARGO_BIN_EXE_reknit-simdriver");
        let output = Command::new(tool).args(arguments).output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), stdout, stderr)
    };
    let done = (0, String::new(), String::new());
    assert_eq!(run(&["init", "--gpus", "2", "--node", "n7", file]), done);
    assert_eq!(run(&["set", file, "1", "lost=true", "power_mw=5"]), done);
    assert_eq!(run(&["event", file, "1", "xid=79"]), done);
    let state = State::load(&path).unwrap();
    assert_eq!((state.node.as_str(), state.gpus.len()), ("n7", 2));
    assert!(state.gpus[1].lost && !state.gpus[0].lost);
    assert_eq!((state.events[0].kind, state.events[0].data), (EventKind::Xid, 79));
    let (code, shown, _) = run(&["show", file]);
    assert_eq!(code, 0);
    assert_eq!(serde_json::from_str::<State>(&shown).unwrap(), state);
    let (code, printed, _) = run(&["library"]);
    assert_eq!(code, 0);
    assert!(Path::new(printed.trim()).exists());

    for bad in [
        &["set", file, "1", "colour=red"][..],
        &["set", file, "1", "lost=maybe"],
        &["set", file, "9", "lost=true"],
        &["set", file, "1"],
        &["event", file, "1", "79"],
        &["show", "/nonexistent/state.json"],
        &["frobnicate"],
        &[],
    ] {
        let (code, stdout, stderr) = run(bad);
        assert_eq!((code, stdout.as_str()), (64, ""), "{bad:?}");
        assert_eq!(stderr.lines().count(), 1, "{bad:?}: {stderr}");
    }
    let (_, _, stderr) = run(&["show", "/nonexistent/state.json"]);
    assert_eq!(stderr.matches("os error").count(), 1, "{stderr}");
}
