//! One worker process, held by its pidfd: a number may be another process tomorrow, a pidfd never is.

use super::logs::LogTo;
use super::readiness::readable;
use super::record::Started;
use super::{Exit, WorkerId, environment, proc};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, pidfd_send_signal, waitid,
};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// What is the same for every worker of the node.
#[derive(Debug, Clone)]
pub(crate) struct WorkerSpec {
    pub(crate) binary: PathBuf,
    pub(crate) daemons: String,
    pub(crate) node: String,
    pub(crate) data_ip: IpAddr,
    pub(crate) threads: u32,
    pub(crate) logs: LogTo,
}

#[derive(Debug)]
pub(super) struct Process {
    pid: Pid,
    started: Started,
    pidfd: Arc<OwnedFd>,
    adopted: bool,
    /// Where it writes, if into a file of its own.
    log: Option<PathBuf>,
}

impl Process {
    /// Starts the worker in a process group of its own, so that neither Ctrl-C nor the agent's end reaches it.
    pub(super) fn spawn(spec: &WorkerSpec, worker: &WorkerId, index: u32, spawn: &str) -> io::Result<Self> {
        let output = spec.logs.open(worker, index);
        let mut command = Command::new(&spec.binary);
        command
            .args(["--daemon", &spec.daemons])
            .args(["--job", &worker.job])
            .args(["--gpu", &worker.key.gpu.0])
            .args(["--node", &spec.node])
            .args(["--incarnation", &worker.key.incarnation.to_string()])
            .args(["--data-ip", &spec.data_ip.to_string()])
            .args(["--threads", &spec.threads.to_string()])
            .env_clear()
            .envs(environment::of_worker(std::env::vars_os(), spec, worker, index, spawn))
            .stdin(Stdio::null())
            .stdout(output.stdout)
            .stderr(output.stderr)
            .process_group(0);
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
        let start_time = proc::stat(child.id()).map_or(0, |stat| stat.start_time);
        let started = Started { pid: child.id(), start_time };
        Ok(Self { pid, started, pidfd, adopted: false, log: output.file })
    }

    /// The recorded process, if it still runs.
    pub(super) fn adopt(started: Started) -> io::Result<Option<Self>> {
        let pid = pid_of(started.pid)?;
        let Some(pidfd) = open(pid)? else {
            return Ok(None);
        };
        // Looked at after the pidfd was opened: what matches now is what the pidfd holds.
        let same = proc::stat(started.pid).is_some_and(|stat| stat.start_time == started.start_time);
        let pidfd = Arc::new(pidfd);
        Ok(same.then_some(Self { pid, started, pidfd, adopted: true, log: None }))
    }

    /// The process of a spawn that the agent did not live to note.
    pub(super) fn of_spawn(spawn: &str) -> Option<Started> {
        Self::find_spawn(spawn).or_else(|| {
            // A program that is just being started has no environment for some microseconds.
            thread::sleep(Duration::from_millis(5));
            Self::find_spawn(spawn)
        })
    }

    fn find_spawn(spawn: &str) -> Option<Started> {
        proc::pids().into_iter().find_map(|pid| {
            let stat = proc::stat(pid)?;
            let leader = stat.group == pid && proc::is_of_spawn(pid, spawn);
            leader.then_some(Started { pid, start_time: stat.start_time })
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.started.pid
    }

    pub(super) fn started(&self) -> Started {
        self.started
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

pub(super) fn pid_of(number: u32) -> io::Result<Pid> {
    i32::try_from(number)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// `None` when the process is gone.
pub(super) fn open(pid: Pid) -> io::Result<Option<OwnedFd>> {
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(rustix::io::Errno::SRCH) => Ok(None),
        Err(e) => Err(e.into()),
    }
}
