//! Where workers write what they say.

use super::WorkerId;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tracing::warn;

/// Where journald takes the output of services.
pub(crate) const JOURNAL: &str = "/run/systemd/journal/stdout";
const IDENTIFIER: &str = "reknit-worker";
/// Log files kept of each GPU, the newest.
const KEPT: usize = 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LogTo {
    /// One file per worker in this folder.
    Folder(PathBuf),
    /// journald, through its socket: the lines need no agent.
    Journal(PathBuf),
    /// The agent's own output.
    Inherit,
}

/// A worker's output.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) stdout: Stdio,
    pub(super) stderr: Stdio,
    /// If it is a file of its own.
    pub(super) file: Option<PathBuf>,
}

impl LogTo {
    /// A worker is not kept from training by a full disk: it writes to the agent's output then.
    pub(super) fn open(&self, worker: &WorkerId, index: u32) -> Output {
        let opened = match self {
            Self::Folder(folder) => open_file(folder, worker, index),
            Self::Journal(socket) => open_journal(socket),
            Self::Inherit => Ok(inherited()),
        };
        opened.unwrap_or_else(|e| {
            warn!(%worker, %e, "its log cannot be opened; it writes to the agent's own output");
            inherited()
        })
    }
}

fn inherited() -> Output {
    Output { stdout: Stdio::inherit(), stderr: Stdio::inherit(), file: None }
}

fn open_file(folder: &Path, worker: &WorkerId, index: u32) -> io::Result<Output> {
    remove_old(folder, index);
    let path = folder.join(file_name(worker, index));
    let log = File::create(&path)?;
    Ok(Output { stdout: log.try_clone()?.into(), stderr: log.into(), file: Some(path) })
}

fn open_journal(socket: &Path) -> io::Result<Output> {
    let log = OwnedFd::from(connect_journal(socket)?);
    Ok(Output { stdout: log.try_clone()?.into(), stderr: log.into(), file: None })
}

/// Opens a stream as sd_journal_stream_fd(3) does: all that is written to it becomes lines of the journal.
pub(crate) fn connect_journal(socket: &Path) -> io::Result<UnixStream> {
    const INFO: u8 = 6;
    let mut stream = UnixStream::connect(socket)?;
    stream.shutdown(Shutdown::Read)?;
    // Identifier, unit, priority, whether lines carry their level, and whether to pass on to syslog, kmsg and console.
    let header = format!("{IDENTIFIER}\n\n{INFO}\n0\n0\n0\n0\n");
    stream.write_all(header.as_bytes())?;
    Ok(stream)
}

fn file_name(worker: &WorkerId, index: u32) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let job = worker.job.replace(|c| !plain(c), "_");
    format!("{job}-gpu{index}-{}.log", worker.key.incarnation)
}

/// Makes room for one more log of the GPU.
fn remove_old(folder: &Path, index: u32) {
    let of_gpu = |name: &str| {
        let (rest, incarnation) = name.strip_suffix(".log")?.rsplit_once('-')?;
        rest.ends_with(&format!("-gpu{index}")).then_some(incarnation.parse::<u64>().ok()).flatten()
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut logs: Vec<_> = entries
        .filter_map(|entry| {
            of_gpu(entry.file_name().to_str()?)?;
            Some((entry.metadata().ok()?.modified().ok()?, entry.path()))
        })
        .collect();
    logs.sort();
    let surplus = logs.len().saturating_sub(KEPT - 1);
    for (_, path) in logs.into_iter().take(surplus) {
        if let Err(e) = fs::remove_file(&path) {
            warn!(path = %path.display(), %e, "cannot remove an old log");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_layout::{GpuId, Incarnation, WorkerKey};
    use std::io::Read;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    fn worker(incarnation: u64) -> WorkerId {
        let key = WorkerKey { gpu: GpuId::from("GPU-0"), incarnation: Incarnation(incarnation) };
        WorkerId { job: "a/b".to_owned(), key }
    }

    #[test]
    fn the_journal_gets_its_header_and_then_the_lines() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("stdout");
        let listener = UnixListener::bind(&socket).unwrap();
        let output = LogTo::Journal(socket).open(&worker(1), 0);
        assert_eq!(output.file, None);
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2"]).stdout(output.stdout).stderr(output.stderr);
        assert!(command.status().unwrap().success());
        // Its copies of the socket.
        drop(command);
        let mut text = String::new();
        listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
        assert_eq!(text, "reknit-worker\n\n6\n0\n0\n0\n0\nout\nerr\n");
    }

    #[test]
    fn a_log_that_cannot_be_opened_keeps_no_worker_from_starting() {
        for to in [LogTo::Folder("/nowhere/logs".into()), LogTo::Journal("/nowhere/socket".into())] {
            assert_eq!(to.open(&worker(1), 0).file, None);
        }
    }

    #[test]
    fn only_the_newest_logs_of_each_gpu_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let to = LogTo::Folder(folder.path().to_owned());
        let stranger = folder.path().join("notes-gpu0-x.log");
        fs::write(&stranger, "").unwrap();
        for incarnation in 1..=KEPT as u64 + 5 {
            let (first, second) = (to.open(&worker(incarnation), 0), to.open(&worker(incarnation), 10));
            assert_ne!(first.file, second.file);
            // Files are told apart by their times.
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(incarnation);
            File::options().append(true).open(first.file.unwrap()).unwrap().set_modified(time).unwrap();
        }
        let exists = |name: &str| folder.path().join(name).exists();
        assert!(!exists("a_b-gpu0-5.log") && exists("a_b-gpu0-6.log") && exists("a_b-gpu0-25.log"));
        let names = fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.file_name());
        let of_first = names.filter(|name| name.to_str().unwrap().contains("-gpu0-")).count();
        assert_eq!(of_first, KEPT + 1, "and the stranger's");
        assert!(stranger.exists());
    }
}
