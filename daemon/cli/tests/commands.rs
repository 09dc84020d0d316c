//! The command line as an operator meets it: exit statuses, one-line errors, and nothing left behind.
//! Needs the daemon in the same folder: `cargo build --workspace` first.

#![allow(clippy::unwrap_used)] // A failed set-up fails the test.
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn reknit(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_reknit"));
    command.args(args).env_remove("REKNIT_DAEMON").output().unwrap()
}

/// The status and the error, which must be one line.
#[track_caller]
fn refused(args: &[&str]) -> (i32, String) {
    let output = reknit(args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    assert!(output.stdout.is_empty());
    (output.status.code().unwrap(), error)
}

#[test]
fn too_few_steps_for_the_faults() {
    let (status, error) = refused(&["demo", "--steps", "5"]);
    assert_eq!(status, 64);
    assert!(error.contains("--steps 5"), "{error}");
}

#[test]
fn data_that_cannot_be_read() {
    let (status, error) = refused(&["demo", "--data", "/nowhere/text"]);
    assert_eq!(status, 64);
    assert!(error.contains("/nowhere/text"), "{error}");
}

#[test]
fn a_job_file_with_an_unknown_key() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = String::from_utf8(reknit(&["job", "example"]).stdout).unwrap();
    std::fs::write(file.path(), format!("colour = \"red\"\n{text}")).unwrap();
    let (status, error) = refused(&["job", "submit", file.path().to_str().unwrap()]);
    assert_eq!(status, 64);
    assert!(error.contains("colour") && error.contains(file.path().to_str().unwrap()), "{error}");
}

#[test]
fn the_example_is_a_valid_job_file() {
    let output = reknit(&["job", "example"]);
    assert!(output.status.success());
    reknit_layout::JobSpec::parse(&String::from_utf8(output.stdout).unwrap(), "example").unwrap();
}

#[test]
fn no_daemon() {
    // The port was just free and is not listened on.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("http://127.0.0.1:{port}");
    for command in [&["job", "list"][..], &["node", "list"], &["incidents", "a"], &["events"]] {
        let (status, error) = refused(&[command, &["--daemon", &address]].concat());
        assert_eq!(status, 69);
        assert!(error.contains(&address) && error.contains("reknitd"), "{error}");
    }
}

/// A daemon without nodes, which ends with the test.
struct Daemon {
    process: Child,
    address: String,
    _dir: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ready = dir.path().join("ready");
        let program = Path::new(env!("CARGO_BIN_EXE_reknit")).with_file_name("reknitd");
        let mut command = Command::new(program);
        command.args(["--listen", "127.0.0.1:0", "--state-dir"]).arg(dir.path().join("state"));
        command.arg("--ready-file").arg(&ready).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().expect("run `cargo build --workspace` first");
        let mut daemon = Self { process, address: String::new(), _dir: dir };
        let deadline = Instant::now() + Duration::from_secs(20);
        while daemon.address.is_empty() {
            assert!(Instant::now() < deadline && daemon.process.try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(5));
            let address = std::fs::read_to_string(&ready).unwrap_or_default();
            if !address.is_empty() {
                daemon.address = format!("http://{address}");
            }
        }
        daemon
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn the_daemon_that_leads_is_shown_and_that_none_does_is_a_failure() {
    let daemon = Daemon::start();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let nobody = format!("http://127.0.0.1:{port}");
    let both = format!("{nobody},{}", daemon.address);
    let shown = reknit(&["daemon", "list", "--format", "json", "--daemon", &both]);
    assert!(shown.status.success(), "{shown:?}");
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!((&shown[0]["daemon"], &shown[0]["role"]), (&nobody.as_str().into(), &serde_json::Value::Null));
    assert_eq!(
        (&shown[1]["leader"], &shown[1]["role"]),
        (&daemon.address.as_str().into(), &"leading".into())
    );
    let output = reknit(&["daemon", "list", "--daemon", &nobody]);
    assert_eq!(output.status.code(), Some(69));
    assert!(String::from_utf8_lossy(&output.stdout).contains("no answer"), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("no daemon leads"), "{output:?}");
}

#[test]
fn a_stopped_daemon_is_not_told_to_be_started() {
    let daemon = Daemon::start();
    rustix::process::kill_process(Pid::from_child(&daemon.process), rustix::process::Signal::STOP).unwrap();
    let (status, error) = refused(&["job", "list", "--daemon", &daemon.address]);
    assert_eq!(status, 69);
    assert!(error.contains("may be stopped") && !error.contains("start reknitd"), "{error}");
}

#[test]
fn what_is_not_there_is_told_with_the_command_that_lists_what_is() {
    let daemon = Daemon::start();
    for (command, name, list) in [
        (&["job", "show"][..], "nojob", "reknit job list"),
        (&["job", "stop"], "nojob", "reknit job list"),
        (&["incidents"], "nojob", "reknit job list"),
        (&["events"], "nojob", "reknit job list"),
        (&["gpu", "drain"], "GPU-no", "reknit node list"),
        (&["gpu", "show"], "GPU-no", "reknit node list"),
        (&["gpu", "show"], "0.0.1", "reknit node list"),
        (&["gpu", "restore"], "node-7/1", "reknit node list"),
        (&["gpu", "drain"], "0.0.1", "reknit node list"),
        (&["node", "quiesce"], "node-7", "reknit node list"),
        (&["node", "resume"], "node-7", "reknit node list"),
        (&["node", "probe"], "node-7", "reknit node list"),
    ] {
        let (status, error) = refused(&[command, &[name, "--daemon", &daemon.address]].concat());
        assert_eq!(status, 1, "{error}");
        assert!(error.contains(name) && error.contains(list), "{error}");
    }
}

#[test]
fn a_power_limit_for_a_gpu_that_is_not_there() {
    let daemon = Daemon::start();
    let (status, error) = refused(&["gpu", "power", "node-7/1", "300", "--daemon", &daemon.address]);
    assert_eq!(status, 1, "{error}");
    assert!(error.contains("node-7/1") && error.contains("reknit node list"), "{error}");
}

#[test]
fn no_address_of_a_daemon() {
    for address in ["127.0.0.1:1", "nonsense"] {
        let (status, error) = refused(&["job", "list", "--daemon", address]);
        assert_eq!(status, 64);
        assert!(error.contains(address) && error.contains("http://HOST:PORT"), "{error}");
    }
}

#[test]
fn wrong_usage() {
    for (args, named) in [
        (&["no-such-command"][..], "no-such-command"),
        (&["demo", "--stps", "50"], "--steps"),
        (&["demo", "--steps", "many"], "many"),
        (&["job", "list", "--format", "xml"], "json"),
        (&["job", "submit"], "<FILE>"),
        (&["node", "quiesce", "n", "--for", "0s"], "from 1s to 168h"),
        (&["node", "quiesce", "n", "--for", "30days"], "from 1s to 168h"),
        (&["events", "--kind", "health,helth"], "incident"),
        (&["gpu", "power", "n/0", "many"], "watts"),
    ] {
        let (status, error) = refused(args);
        assert_eq!(status, 64);
        assert!(error.contains(named), "{error}");
    }
    let output = reknit(&[]);
    assert_eq!(output.status.code(), Some(64));
    assert!(String::from_utf8(output.stderr).unwrap().contains("Commands:"));
    assert_eq!(reknit(&["--help"]).status.code(), Some(0));
}

#[test]
fn the_help_of_the_demo_names_its_least_figures() {
    let help = String::from_utf8(reknit(&["demo", "--help"]).stdout).unwrap();
    assert!(help.contains("at least 40") && help.contains("at least 16 KiB"), "{help}");
}

#[test]
fn a_launched_program_ends_with_its_parent() {
    let reknit = env!("CARGO_BIN_EXE_reknit");
    let script = format!("'{reknit}' launch --parent $$ -- sleep 600 & echo $!; wait");
    let mut parent = Command::new("sh").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(parent.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let pid: i32 = line.trim().parse().unwrap();
    let child = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    let program = || std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    while !program().ends_with("sleep") {
        std::thread::yield_now();
        assert!(
            poll(&mut [PollFd::new(&child, PollFlags::IN)], Some(&limit(0))).unwrap() == 0,
            "it ended early"
        );
    }
    parent.kill().unwrap();
    parent.wait().unwrap();
    let ended = poll(&mut [PollFd::new(&child, PollFlags::IN)], Some(&limit(10))).unwrap();
    assert_eq!(ended, 1, "the program outlived its parent");
}

#[test]
fn a_program_is_not_launched_for_a_parent_that_is_gone() {
    let output = reknit(&["launch", "--parent", "1", "--", "sleep", "600"]);
    assert_eq!(output.status.code(), Some(1));
}

fn limit(seconds: i64) -> rustix::event::Timespec {
    rustix::event::Timespec { tv_sec: seconds, tv_nsec: 0 }
}
