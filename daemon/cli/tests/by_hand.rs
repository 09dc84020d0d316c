//! Runs docs/by-hand.md: every command in it, in one shell, each block when the cluster stands as the text says.
//! Needs all programs in one folder: `cargo build --workspace` first.

#![allow(clippy::unwrap_used)] // A failed set-up fails the test.

use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const TEXT: &str = include_str!("../../../docs/by-hand.md");
const ADDRESS: &str = "127.0.0.1:7400";
const PROGRAMS: &str = "$PWD/target/release";
/// For everything that is awaited.
const LIMIT: Duration = Duration::from_secs(60);
const DONE: &str = "---- done: ";

/// The fenced commands of the document, in its order.
fn blocks() -> Vec<String> {
    let fenced = TEXT.split("```sh\n").skip(1);
    fenced.map(|text| text.split_once("```").unwrap().0.to_owned()).collect()
}

/// A shell that is given one block after the other. What it started is asked to end when it is dropped.
struct Shell {
    bash: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    address: String,
}

impl Shell {
    fn start(dir: &Path) -> Self {
        // The port was just free and is not listened on.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new("bash");
        command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).env("TMPDIR", dir);
        for (key, _) in std::env::vars_os().filter(|(key, _)| key.as_encoded_bytes().starts_with(b"REKNIT")) {
            command.env_remove(key);
        }
        let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut bash = pipes.spawn().unwrap();
        let input = bash.stdin.take().unwrap();
        let output = BufReader::new(bash.stdout.take().unwrap()).lines();
        Self { bash, input, output, address: format!("127.0.0.1:{port}") }
    }

    /// Runs a block as it stands, with this test's programs and port; what it printed.
    #[track_caller]
    fn run(&mut self, block: &str) -> String {
        let programs = Path::new(env!("CARGO_BIN_EXE_reknit")).parent().unwrap().to_str().unwrap();
        let block = block.replace(ADDRESS, &self.address).replace(PROGRAMS, programs);
        // Any command that fails sets the status, not only the last one.
        writeln!(self.input, "failed=0; trap failed=1 ERR\n{block}\necho \"{DONE}$failed\"").unwrap();
        let mut said = String::new();
        for line in self.output.by_ref().map(Result::unwrap) {
            if let Some(failed) = line.strip_prefix(DONE) {
                assert_eq!(failed, "0", "{block}\n{said}");
                return said;
            }
            said += &format!("{line}\n");
        }
        panic!("the shell ended in\n{block}\n{said}");
    }

    /// Asks the daemon until it answers as the document promises: with a line that has all of `words`.
    #[track_caller]
    fn until(&self, args: &[&str], lines: usize, words: &[&str]) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let mut command = Command::new(env!("CARGO_BIN_EXE_reknit"));
            let output =
                command.args(args).args(["--daemon", &format!("http://{}", self.address)]).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let fit = text.lines().filter(|line| words.iter().all(|word| line.contains(word)));
            if fit.count() == lines {
                return;
            }
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(Instant::now() < deadline, "not {lines} lines with {words:?}:\n{text}{error}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    #[track_caller]
    fn until_running(&self, degrees: &str) {
        self.until(&["job", "show", "by-hand"], 1, &["by-hand", "Running", degrees]);
    }

    /// Until the job trains again after such a fault.
    #[track_caller]
    fn until_recovered(&self, kind: &str, degrees: &str) {
        self.until(&["incidents", "by-hand"], 1, &[kind, " recovered "]);
        let degrees = format!("\"degrees_after\":{degrees}");
        self.until(&["incidents", "by-hand", "--format", "json"], 1, &[kind, &degrees]);
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let group = Pid::from_child(&self.bash);
        let _ = kill_process_group(group, Signal::TERM);
        let _ = self.bash.wait();
    }
}

#[test]
fn the_commands_of_the_document_do_what_it_says() {
    let dir = tempfile::tempdir().unwrap();
    let mut shell = Shell::start(dir.path());
    let mut blocks = blocks().into_iter();
    let mut run = |shell: &mut Shell, command: &str| {
        let block = blocks.next().unwrap();
        assert!(block.contains(command), "{command} does not come here:\n{block}");
        (shell.run(&block), blocks.len())
    };
    run(&mut shell, "mktemp");
    run(&mut shell, "reknit-agent");
    shell.until(&["node", "list"], 8, &["connected", "healthy"]);
    let (nodes, _) = run(&mut shell, "reknit node list");
    assert!(nodes.contains("node-1/3"), "{nodes}");
    run(&mut shell, "reknit job submit");
    shell.until_running("[4, 4]");
    let (job, _) = run(&mut shell, "reknit job show");
    assert!(job.contains("1.0.2"), "{job}");
    run(&mut shell, "kill -9");
    shell.until_recovered("worker_killed", "[4,3]");
    shell.until_running("[4, 4]");
    let (incidents, _) = run(&mut shell, "reknit incidents");
    assert!(incidents.contains("worker_killed"), "{incidents}");
    assert!(incidents.contains("\nSEEN BY ") && incidents.contains("\nreshard "), "{incidents}");
    run(&mut shell, "lost=true");
    shell.until_recovered("gpu_lost", "[3,4]");
    run(&mut shell, "lost=false");
    shell.until_running("[4, 4]");
    run(&mut shell, "reknit gpu drain node-0/1");
    shell.until_running("[3, 4]");
    // Not in the document.
    let drained = shell.run("reknit gpu show node-0/1");
    assert!(drained.contains("by an operator") && drained.contains("healthy"), "{drained}");
    run(&mut shell, "reknit gpu restore node-0/1");
    let back = shell.run("reknit gpu show node-0/1 --format json");
    assert!(back.contains("\"drained_by\":\"\""), "{back}");
    shell.until_running("[4, 4]");
    run(&mut shell, "reknit node quiesce node-1");
    shell.until(&["node", "list"], 4, &["node-1", "quiesced", "unknown"]);
    shell.until(&["node", "list"], 1, &["node-1: quiesced for another", "quiesced by an operator"]);
    run(&mut shell, "reknit node resume node-1");
    shell.until(&["node", "list"], 8, &["connected", "healthy"]);
    shell.until_running("[4, 4]");
    // Not in the document: a place names a GPU too, also while nobody is there.
    shell.run("reknit gpu drain 1.0.1");
    shell.until_running("[4, 3]");
    shell.run("reknit gpu restore 1.0.1");
    shell.until_running("[4, 4]");
    let (_, left) = run(&mut shell, "reknit job stop");
    assert_eq!(left, 0, "blocks that this test does not know");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "files are left");
}
