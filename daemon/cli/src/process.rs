//! Processes held by pidfd: signalled and awaited without ever meeting another process of the same number.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Any process of this machine.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    fd: Arc<OwnedFd>,
    ended: watch::Receiver<bool>,
}

impl Process {
    /// `NotFound` when there is no such process.
    pub(crate) fn open(pid: u32) -> io::Result<Self> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let number = number.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let fd = pidfd_open(number, PidfdFlags::empty()).map_err(|error| match error {
            Errno::SRCH => io::ErrorKind::NotFound.into(),
            other => io::Error::from(other),
        })?;
        let fd = Arc::new(fd);
        let (sender, ended) = watch::channel(false);
        // A thread that sleeps in the kernel until the process ends; it ends then, or with us.
        let watched = Arc::clone(&fd);
        std::thread::Builder::new().name(format!("pid-{pid}")).spawn(move || {
            while poll(&mut [PollFd::new(&watched, PollFlags::IN)], None) == Err(Errno::INTR) {}
            sender.send_replace(true);
        })?;
        Ok(Self { pid, fd, ended })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// The program it runs.
    pub(crate) fn program(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/{}/exe", self.pid))
    }

    /// How long ago it was started, to the hundredth of a second.
    pub(crate) fn age(&self) -> io::Result<Duration> {
        let [started] = self.times([19])?;
        let uptime = std::fs::read_to_string("/proc/uptime")?;
        let uptime = uptime.split(' ').next().and_then(|text| text.parse().ok());
        let uptime: f64 = uptime.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(Duration::from_secs_f64((uptime - started).max(0.0)))
    }

    /// What its threads have computed, in the kernel too, to the hundredth of a second.
    pub(crate) fn processor_time(&self) -> io::Result<Duration> {
        let [user, system] = self.times([11, 12])?;
        Ok(Duration::from_secs_f64(user + system))
    }

    /// Times in seconds out of `/proc/PID/stat`, by their places after the name.
    fn times<const N: usize>(&self, places: [usize; N]) -> io::Result<[f64; N]> {
        let broken = || io::Error::from(io::ErrorKind::InvalidData);
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid))?;
        // The name in brackets may hold anything.
        let (_, fields) = stat.rsplit_once(')').ok_or_else(broken)?;
        let fields: Vec<_> = fields.split_whitespace().collect();
        let mut times = [0.0; N];
        for (time, place) in times.iter_mut().zip(places) {
            let ticks: u64 = fields.get(place).and_then(|text| text.parse().ok()).ok_or_else(broken)?;
            *time = ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
        }
        Ok(times)
    }

    /// Signals it; a process that is gone already is no error.
    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.fd, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until it has ended.
    pub(crate) async fn exited(&self) {
        // The sender is dropped only after it said so.
        let _ = self.ended.clone().wait_for(|ended| *ended).await;
    }

    pub(crate) fn has_exited(&self) -> bool {
        *self.ended.borrow()
    }

    /// True when it ended within `limit`.
    pub(crate) async fn exited_within(&self, limit: Duration) -> bool {
        tokio::time::timeout(limit, self.exited()).await.is_ok()
    }
}

/// A process of our own. It gets SIGTERM when we die, however we die.
#[derive(Debug)]
pub(crate) struct Child {
    name: String,
    process: Process,
    child: std::process::Child,
    log: PathBuf,
}

impl Child {
    /// Starts `program` in a process group of its own, so that Ctrl-C reaches only us, with its output in `log`.
    ///
    /// Must be called from the main thread: Linux ties the death signal to the thread that started the child.
    pub(crate) fn start(
        name: &str,
        program: &Path,
        args: &[OsString],
        env: &[(&str, OsString)],
        log: &Path,
    ) -> io::Result<Self> {
        let output = File::create(log)?;
        let mut command = Command::new(std::env::current_exe()?);
        // What configures the user's own daemon and agents is not meant for this one.
        for (key, _) in std::env::vars_os() {
            if key.as_encoded_bytes().starts_with(b"REKNIT") {
                command.env_remove(key);
            }
        }
        let child = command
            .args(["launch", "--parent", &std::process::id().to_string(), "--"])
            .arg(program)
            .args(args)
            .env("NO_COLOR", "1")
            .envs(env.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()?;
        let process = Process::open(child.id())?;
        Ok(Self { name: name.to_owned(), process, child, log: log.to_owned() })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    /// Its status, once it has ended.
    pub(crate) fn status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// SIGTERM, and SIGKILL when it is still there after `limit`. Returns once it is gone.
    pub(crate) async fn stop(&mut self, limit: Duration) {
        let _ = self.process.signal(Signal::TERM);
        if !self.process.exited_within(limit).await {
            self.kill();
        }
        let _ = self.child.wait();
    }

    /// SIGKILL, and reaps it.
    pub(crate) fn kill(&mut self) {
        let _ = self.process.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

impl Drop for Child {
    /// Only a child that nobody stopped is still there: leave it the chance to stop what it started itself.
    fn drop(&mut self) {
        let _ = self.process.signal(Signal::TERM);
    }
}

/// Becomes `program` after asking the kernel for SIGTERM at the death of `parent`: the setting survives exec.
/// Returns only when that failed.
pub(crate) fn launch(parent: u32, program: &OsString, args: &[OsString]) -> io::Error {
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::TERM)) {
        return error.into();
    }
    // The parent may have died before the request: then no signal would ever come.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    if now != Some(parent) {
        return io::Error::other("the process that started it is gone");
    }
    Command::new(program).args(args).exec()
}

/// The last `count` lines of a file; empty when it cannot be read.
pub(crate) fn tail(file: &Path, count: usize) -> Vec<String> {
    let text = std::fs::read(file).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    let from = lines.len().saturating_sub(count);
    lines[from..].iter().map(|line| (*line).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_killed_process_is_seen_to_end() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        assert!(!process.exited_within(Duration::from_millis(20)).await);
        process.signal(Signal::KILL).unwrap();
        assert!(process.exited_within(Duration::from_secs(5)).await);
        child.wait().unwrap();
        assert!(process.signal(Signal::KILL).is_ok(), "gone is no error");
    }

    #[tokio::test]
    async fn the_age_of_a_process() {
        let start = std::time::Instant::now();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        assert!(!process.exited_within(Duration::from_millis(200)).await);
        let age = process.age().unwrap();
        assert!(age >= Duration::from_millis(180), "{age:?}");
        assert!(age <= start.elapsed() + Duration::from_millis(20), "{age:?}");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn what_a_process_has_computed() {
        let own = Process::open(std::process::id()).unwrap();
        let start = std::time::Instant::now();
        let before = own.processor_time().unwrap();
        let mut now = before;
        while now < before + Duration::from_millis(50) && start.elapsed() < Duration::from_secs(60) {
            now = own.processor_time().unwrap();
        }
        let computed = now - before;
        assert!(computed >= Duration::from_millis(50), "{computed:?} of {:?}", start.elapsed());
    }

    #[tokio::test]
    async fn no_such_process() {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let error = Process::open(child.id()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn tail_of_a_log() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "a\nb\nc\n").unwrap();
        assert_eq!(tail(file.path(), 2), ["b", "c"]);
        assert!(tail(Path::new("/nowhere"), 2).is_empty());
    }
}
