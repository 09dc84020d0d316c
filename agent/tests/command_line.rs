//! What the agent says to bad input, and how it ends.

#![allow(clippy::unwrap_used)]

mod harness;

use harness::Node;
use std::io::Read;
use std::process::{Command, Stdio};

fn run(command: &mut Command) -> (Option<i32>, String) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    let told: Vec<&str> = stderr.lines().filter(|l| l.starts_with("reknit-agent:")).collect();
    (output.status.code(), told.join("\n"))
}

fn bare() -> Command {
    Command::new(env!("CARGO_BIN_EXE_reknit-agent"))
}

#[test]
fn bad_configuration_exits_64_with_one_line() {
    let node = Node::new(1);
    let good = "http://127.0.0.1:1";
    let refused = |command: &mut Command, word: &str| {
        let (code, told) = run(command);
        assert_eq!(code, Some(64), "{told}");
        assert_eq!(told.lines().count(), 1, "{told}");
        assert!(told.contains(word), "{told} does not name {word}");
    };
    refused(&mut bare(), "--daemon");
    refused(bare().args(["--daemon", good]), "--node");
    refused(&mut node.command("not an address"), "not an address");
    refused(&mut node.command("127.0.0.1:7400"), "127.0.0.1:7400");
    refused(node.command(good).args(["--colour", "red"]), "--colour");
    refused(node.command(good).args(["--log", "loud"]), "loud");
    refused(node.command(good).args(["--data-ip", "0.0.0.0"]), "--data-ip");
    let somewhere = |flag: &str, path: &str| {
        let mut command = bare();
        command.args(["--daemon", good, "--node", "n0", flag, path]);
        command.arg(if flag == "--state-dir" { "--worker-binary" } else { "--state-dir" });
        command.arg(if flag == "--state-dir" {
            node.worker.clone()
        } else {
            node.folder.path().join("other")
        });
        command
    };
    refused(&mut somewhere("--state-dir", "/proc/nothing"), "/proc/nothing");
    refused(&mut somewhere("--worker-binary", "/no/worker"), "/no/worker");
}

#[test]
fn what_the_agents_variables_say_is_nothing_to_its_other_commands() {
    let variables = [
        ("REKNIT_DAEMON", "http://127.0.0.1:1"),
        ("REKNIT_NODE", "n0"),
        ("REKNIT_STATE_DIR", "/no"),
        ("REKNIT_LOG", "json"),
        ("REKNIT_KMSG", "/no"),
        ("REKNIT_KEEP_WORKERS", "1"),
    ];
    for (variable, value) in variables {
        let out = bare().env(variable, value).args(["policy", "explain", "79"]).output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{variable}: {}", String::from_utf8_lossy(&out.stderr));
        let mut look = bare();
        look.env(variable, value).args(["check", "--for", "100ms", "--nvml-library", "/no/lib.so"]);
        assert_eq!(look.output().unwrap().status.code(), Some(3), "{variable}");
    }
}

#[test]
fn a_pipe_or_an_endless_file_is_no_policy() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in [pipe.to_str().unwrap(), "/dev/zero", folder.path().to_str().unwrap()] {
        let (code, told) = run(bare().args(["policy", "check", path]));
        assert_eq!(code, Some(65), "{told}");
        assert!(told.contains("it is no file"), "{told}");
    }
}

#[tokio::test]
async fn two_agents_do_not_share_a_state_folder() {
    let (mut daemon, node) = (harness::Daemon::start().await, Node::new(1));
    let agent = node.start(&daemon);
    daemon.session().await;
    let (code, told) = run(&mut node.command("http://127.0.0.1:1"));
    assert_eq!(code, Some(64));
    assert!(told.contains("another agent"), "{told}");
    drop(agent);
}

#[tokio::test]
async fn a_json_log_is_json_on_every_line() {
    let (mut daemon, node) = (harness::Daemon::start().await, Node::new(1));
    let address = format!("http://{}", daemon.address);
    let mut command = node.command(&address);
    command.args(["--log", "json"]).stderr(Stdio::piped());
    let mut agent = harness::RunningAgent(command.spawn().unwrap());
    let mut session = daemon.session().await;
    node.xid(0, 79);
    session.health().await;
    agent.terminate();
    assert_eq!(agent.exit_code(harness::PATIENCE), Some(0));
    let mut log = String::new();
    agent.0.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(log.contains("XID 79"), "{log}");
    for line in log.lines() {
        assert!(line.starts_with('{') && line.ends_with('}'), "{line}");
    }
}
