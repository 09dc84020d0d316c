//! One probe process, from its start until its exit is seen.

use super::ProbeSpec;
use crate::config::RunArguments;
use crate::probe::protocol::{GpuIdentity, ProbeLine, ProbeOrder};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::io;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::{info, warn};

/// The program that runs now, also when its file was replaced by an upgrade.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// For the probe to take an order.
const ORDER_LIMIT: Duration = Duration::from_secs(1);
/// From SIGTERM to SIGKILL, and from there to giving up on it.
const END_LIMIT: Duration = Duration::from_secs(1);
const KILL_LIMIT: Duration = Duration::from_millis(200);
/// No line is nearly as long.
const LINE_LIMIT: u64 = 1 << 20;

/// A running probe.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    input: BufReader<OwnedReadHalf>,
    output: OwnedWriteHalf,
    /// What came of the next line so far.
    partial: Vec<u8>,
}

/// Why no line can be had.
#[derive(Debug)]
pub(super) enum LineError {
    Broken(io::Error),
    Nonsense(serde_json::Error),
}

impl Process {
    pub(super) async fn start(spec: &ProbeSpec, known: &[GpuIdentity]) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let ours = StdUnixStream::from(ours);
        ours.set_nonblocking(true)?;
        let (input, output) = UnixStream::from_std(ours)?.into_split();
        let mut command = Command::new(OWN_PROGRAM);
        RunArguments::variables().iter().for_each(|variable| {
            command.env_remove(variable);
        });
        let child = command
            .arg0("reknit-agent")
            .arg("probe")
            .arg("--nvml-library")
            .arg(&spec.library)
            .arg("--interval-ms")
            .arg(spec.interval.as_millis().to_string())
            .arg("--log")
            .arg(spec.log.name())
            .args(spec.quiet.then_some("--quiet"))
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            // A terminal's Ctrl-C is for the agent, which ends the probe itself.
            .process_group(0)
            .spawn()?;
        info!(pid = child.id(), "probe started");
        let mut process = Self { child, input: BufReader::new(input), output, partial: Vec::new() };
        process.order(&ProbeOrder::Expect { gpus: known.to_vec() }).await?;
        Ok(process)
    }

    pub(super) async fn order(&mut self, order: &ProbeOrder) -> io::Result<()> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        timeout(ORDER_LIMIT, self.output.write_all(&line)).await?
    }

    /// The next line, or `None` when the probe is gone. Nothing is lost when the wait is given up.
    pub(super) async fn line(&mut self) -> Result<Option<ProbeLine>, LineError> {
        let room = LINE_LIMIT.saturating_sub(self.partial.len() as u64);
        let mut input = (&mut self.input).take(room);
        input.read_until(b'\n', &mut self.partial).await.map_err(LineError::Broken)?;
        let line = std::mem::take(&mut self.partial);
        if line.is_empty() {
            return Ok(None);
        }
        serde_json::from_slice(&line).map(Some).map_err(LineError::Nonsense)
    }
}

/// Probes that were told to end and have not: a process stuck in the driver cannot be killed.
#[derive(Debug, Default)]
pub(super) struct Abandoned {
    pids: BTreeSet<u32>,
    exits: JoinSet<u32>,
}

impl Abandoned {
    /// Ends a probe and waits a little for its exit.
    pub(super) async fn end(&mut self, probe: Process) {
        let Process { mut child, input, output, partial: _ } = probe;
        // None where its exit was seen.
        let Some(pid) = child.id() else {
            return;
        };
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            let _gone_already = kill_process(pid, Signal::TERM);
        }
        // Closed only now: the end of its socket is an order to end too, but one that it must be able to read.
        drop((input, output));
        if timeout(END_LIMIT, child.wait()).await.is_ok() {
            return;
        }
        let _gone_already = child.start_kill();
        if timeout(KILL_LIMIT, child.wait()).await.is_ok() {
            warn!(pid, "the probe had to be killed");
            return;
        }
        warn!(pid, "the probe hangs in the driver and cannot be killed: it is left alone");
        self.pids.insert(pid);
        self.exits.spawn(async move {
            let _exit = child.wait().await;
            pid
        });
    }

    /// Waits until one of them has ended after all.
    pub(super) async fn one_gone(&mut self) {
        if let Some(Ok(pid)) = self.exits.join_next().await {
            info!(pid, "a probe that was left alone has ended");
            self.pids.remove(&pid);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pids.is_empty()
    }

    pub(super) fn count(&self) -> usize {
        self.pids.len()
    }

    pub(super) const fn pids(&self) -> &BTreeSet<u32> {
        &self.pids
    }
}
