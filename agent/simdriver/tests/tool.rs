//! The command-line tool.

#![allow(clippy::unwrap_used)]

use reknit_simdriver::state::{EventKind, LinksDown, RecoveryAction, State, Throttle};
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

    assert_eq!(
        run(&["set", file, "all", "temperature=70", r#"throttle=["hw_thermal","sw_power_cap"]"#]),
        done
    );
    assert_eq!(run(&["set", file, "node", "driver_version=570.1", "wait_error=999"]), done);
    assert_eq!(
        run(&["set", file, "0", "recovery_action=drain_p2p", "nvlink_down=[2]", "name=Two words"]),
        done
    );
    assert_eq!(run(&["set", file, "1", "fabric_route_unhealthy=true", "recovery_action=1"]), done);
    assert_eq!(run(&["event", file, "1", "recovery_action"]), done);
    let state = State::load(&path).unwrap();
    assert!(state.gpus.iter().all(|gpu| gpu.temperature == 70 && gpu.throttle == Throttle(0x44)));
    assert_eq!((state.driver_version.as_str(), state.wait_error), ("570.1", Some(999)));
    assert_eq!(state.gpus[0].recovery_action, RecoveryAction::DrainP2p);
    assert_eq!((state.gpus[0].name.as_str(), state.gpus[0].fabric.as_ref()), ("Two words", None));
    assert_eq!(state.gpus[0].nvlink_down, LinksDown::These(vec![2]));
    let fabric = state.gpus[1].fabric.as_ref().unwrap();
    assert!(fabric.route_unhealthy && !fabric.bandwidth_degraded);
    let last = state.events.last().unwrap();
    assert_eq!((last.sequence, last.kind, last.data), (2, EventKind::RecoveryAction, 1));

    for bad in [
        &["set", file, "1", "colour=red"][..],
        &["set", file, "1", "lost=maybe"],
        &["set", file, "9", "lost=true"],
        &["set", file, "1"],
        &["set", file, "all", "temperature=50", "lost=7"],
        &["set", file, "everyone", "lost=true"],
        &["set", file, "node", "lost=true"],
        &["set", file, "node", "gpus=[]"],
        &["set", file, "0", "throttle=hot"],
        &["set", file, "0", "recovery_action=8"],
        &["set", file, "0", "hangs=[\"nvmlDeviceGetEverything\"]"],
        &["event", file, "1", "recovery_action", "--kmsg", file],
        &["event", file, "1", "xid=79", "--log-only"],
        &["event", file, "9", "xid=79", "--kmsg", file],
        &["event", file, "1", "79"],
        &["show", "/nonexistent/state.json"],
        &["frobnicate"],
        &[],
    ] {
        let (code, stdout, stderr) = run(bad);
        assert_eq!((code, stdout.as_str()), (64, ""), "{bad:?}");
        assert_eq!(stderr.lines().count(), 1, "{bad:?}: {stderr}");
    }
    assert_eq!(State::load(&path).unwrap(), state, "a refused change changes nothing");
    let (_, _, stderr) = run(&["show", "/nonexistent/state.json"]);
    assert_eq!(stderr.matches("os error").count(), 1, "{stderr}");
}

#[test]
fn the_kernel_log_tells_of_an_xid() {
    let folder = tempfile::tempdir().unwrap();
    let (path, log) = (folder.path().join("state.json"), folder.path().join("kmsg"));
    let mut state = State::healthy("n7", 2);
    state.gpus[1].pci_bus_id = "00000000:3B:00.0".to_owned();
    state.save(&path).unwrap();
    let event = |gpu: &str, arguments: &[&str]| {
        let tool = Command::new(env!("CARGO_BIN_EXE_reknit-simdriver"))
            .arg("event")
            .args([path.as_os_str(), gpu.as_ref()])
            .args(arguments)
            .arg("--kmsg")
            .arg(&log)
            .status();
        assert!(tool.unwrap().success());
    };
    event("1", &["xid=79"]);
    event("0", &["xid=94", "--message", "Contained: SM\n\\(0x1)", "--log-only"]);
    event("1", &["xid=145", "--message", "RLW_CTRL Nonfatal XC0 i0 Link 04 (0x00000001)"]);
    let text = std::fs::read_to_string(&log).unwrap();
    let records: Vec<(&str, &str)> = text.lines().map(|line| line.split_once(';').unwrap()).collect();
    let expected = [
        "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:01:00): 94, pid='<unknown>', name=<unknown>, Contained: SM\\x0a\\x5c(0x1)",
        "NVRM: Xid (PCI:0000:3b:00): 145, RLW_CTRL Nonfatal XC0 i0 Link 04 (0x00000001)",
    ];
    assert_eq!(records.iter().map(|(_, text)| *text).collect::<Vec<_>>(), expected);
    let mut before = 0;
    for (place, (head, _)) in records.iter().enumerate() {
        let parts: Vec<&str> = head.split(',').collect();
        let [level, sequence, microseconds, flags] = parts[..] else { panic!("{head}") };
        assert_eq!((level, sequence, flags), ("4", place.to_string().as_str(), "-"));
        let at: u64 = microseconds.parse().unwrap();
        assert!(at > 0 && at >= before, "{head}");
        before = at;
    }
    let raised: Vec<u64> = State::load(&path).unwrap().events.iter().map(|event| event.data).collect();
    assert_eq!(raised, [79, 145], "the second is in the log alone");
}
