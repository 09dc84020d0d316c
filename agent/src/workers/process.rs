//! One worker process, held by its pidfd: a number may be another process tomorrow, a pidfd never is.

use super::readiness::readable;
use super::record::Record;
use super::{Exit, WorkerId};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, pidfd_send_signal, waitid,
};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

/// Where workers write what they say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LogTo {
    /// One file per worker in this folder.
    Folder(PathBuf),
    /// The agent's own output.
    Inherit,
}

/// What is the same for every worker of the node.
#[derive(Debug, Clone)]
pub(crate) struct WorkerSpec {
    pub(crate) binary: PathBuf,
    pub(crate) daemon: String,
    pub(crate) node: String,
    pub(crate) data_ip: IpAddr,
    pub(crate) logs: LogTo,
}

#[derive(Debug)]
pub(super) struct Process {
    pid: Pid,
    start_time: u64,
    pidfd: Arc<OwnedFd>,
    adopted: bool,
    /// Where it writes, if into a file of its own.
    log: Option<PathBuf>,
}

impl Process {
    /// Starts the worker in a process group of its own, so that neither Ctrl-C nor the agent's end reaches it.
    pub(super) fn spawn(spec: &WorkerSpec, worker: &WorkerId, index: u32) -> io::Result<Self> {
        let mut command = Command::new(&spec.binary);
        command
            .args(["--daemon", &spec.daemon])
            .args(["--job", &worker.job])
            .args(["--gpu", &worker.key.gpu.0])
            .args(["--node", &spec.node])
            .args(["--incarnation", &worker.key.incarnation.to_string()])
            .args(["--data-ip", &spec.data_ip.to_string()])
            .env("CUDA_VISIBLE_DEVICES", &worker.key.gpu.0)
            .stdin(Stdio::null())
            .process_group(0);
        let log = match &spec.logs {
            LogTo::Folder(folder) => {
                let path = folder.join(log_name(worker, index));
                let log = File::create(&path)?;
                command.stdout(log.try_clone()?).stderr(log);
                Some(path)
            }
            LogTo::Inherit => None,
        };
        let mut child = command.spawn()?;
        let pid = pid_of(child.id())?;
        // Nothing else reaps children here, so the number is still this child's.
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Arc::new(pidfd),
            Err(e) => {
                child.kill()?;
                child.wait()?;
                return Err(e.into());
            }
        };
        let start_time = start_time(pid).unwrap_or(0);
        Ok(Self { pid, start_time, pidfd, adopted: false, log })
    }

    /// The recorded process, if it still runs.
    pub(super) fn adopt(record: &Record) -> io::Result<Option<Self>> {
        let pid = pid_of(record.pid)?;
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Arc::new(pidfd),
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        // Looked at after the pidfd was opened: what matches now is what the pidfd holds.
        let same = start_time(pid) == Some(record.start_time);
        Ok(same.then_some(Self { pid, start_time: record.start_time, pidfd, adopted: true, log: None }))
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    pub(super) fn record(&self, worker: WorkerId) -> Record {
        Record { worker, pid: self.pid(), start_time: self.start_time }
    }

    pub(super) fn signal(&self, signal: Signal) {
        // Fails only when the process is gone, and then its end is on its way.
        let _gone = pidfd_send_signal(self.pidfd.as_fd(), signal);
    }

    /// Waits for the end and tells how it came.
    pub(super) fn end(&self) -> io::Result<impl Future<Output = Exit> + Send + 'static> {
        let watched = readable(self.pidfd.clone())?;
        let (pid, adopted, log) = (self.pid, self.adopted, self.log.clone());
        Ok(async move {
            // A pidfd is readable once, for good, when its process has ended.
            let _error_is_an_end_too = watched.readable().await;
            if adopted {
                return Exit::Adopted;
            }
            // What the worker left running goes with it, while its number is still taken.
            let _gone = kill_process_group(pid, Signal::KILL);
            match waitid(WaitId::PidFd(watched.get_ref().as_fd()), WaitIdOptions::EXITED) {
                Ok(Some(status)) => match (status.terminating_signal(), status.exit_status()) {
                    (Some(signal), _) => Exit::Signal(signal),
                    (None, Some(0)) => Exit::Status { status: 0, last_words: None },
                    (None, Some(status)) => {
                        Exit::Status { status, last_words: log.and_then(|log| last_words(&log)) }
                    }
                    (None, None) => Exit::Adopted,
                },
                Ok(None) | Err(_) => Exit::Adopted,
            }
        })
    }
}

/// The last line of a log, without what a terminal would act on. `None` when there is none that can be read.
fn last_words(log: &Path) -> Option<String> {
    const TAIL: u64 = 4096;
    const LONGEST: usize = 300;
    let mut file = File::open(log).ok()?;
    let start = file.metadata().ok()?.len().saturating_sub(TAIL);
    file.seek(SeekFrom::Start(start)).ok()?;
    let mut tail = Vec::new();
    file.take(TAIL).read_to_end(&mut tail).ok()?;
    let tail = String::from_utf8_lossy(&tail);
    let line = tail.lines().rev().find(|line| !line.trim().is_empty())?;
    Some(line.chars().filter(|c| !c.is_control()).take(LONGEST).collect())
}

fn pid_of(number: u32) -> io::Result<Pid> {
    i32::try_from(number)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// When the process started, in clock ticks since boot. `None` if there is none, or only its remains.
fn start_time(pid: Pid) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The program's name may hold anything, so fields are counted from its closing parenthesis.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    // The state is field 3, the start time field 22.
    fields.nth(18)?.parse().ok()
}

fn log_name(worker: &WorkerId, index: u32) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let job = worker.job.replace(|c| !plain(c), "_");
    format!("{job}-gpu{index}-{}.log", worker.key.incarnation)
}
