//! Processes of the lab, and what is done to them.

use crate::lab::{LIMIT, eventually};
use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use std::os::fd::OwnedFd;
use std::process::Child;

pub fn signal(pid: u32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(pid as i32).context("a pid is positive")?;
    Ok(kill_process(pid, signal)?)
}

/// kill -9, and waits until the kernel says that it is gone.
pub async fn kill_now(pid: u32) -> Result<()> {
    let handle = pidfd(pid)?;
    signal(pid, Signal::KILL)?;
    tokio::task::spawn_blocking(move || wait_for_end(&handle)).await?
}

/// SIGSTOP, and waits until the kernel says that it is stopped.
pub async fn freeze(pid: u32) -> Result<()> {
    signal(pid, Signal::STOP)?;
    eventually("the process to be stopped", async || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
        Ok(state == Some('T'))
    })
    .await
}

fn pidfd(pid: u32) -> Result<OwnedFd> {
    let number = Pid::from_raw(pid as i32).context("a pid is positive")?;
    pidfd_open(number, PidfdFlags::empty()).with_context(|| format!("process {pid}"))
}

fn wait_for_end(process: &OwnedFd) -> Result<()> {
    let mut poll = [PollFd::new(process, PollFlags::IN)];
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    ensure!(rustix::event::poll(&mut poll, Some(&limit))? == 1, "a process does not end within {LIMIT:?}");
    Ok(())
}

/// Guards against a number that another process has taken over.
pub(crate) fn is_worker(pid: u32) -> bool {
    let exe = std::fs::read_link(format!("/proc/{pid}/exe"));
    exe.is_ok_and(|exe| {
        exe.file_name().is_some_and(|name| name.to_string_lossy().starts_with("reknit-worker"))
    })
}

pub(crate) fn wait_limited(child: &mut Child) -> Result<std::process::ExitStatus> {
    wait_for_end(&pidfd(child.id())?)?;
    Ok(child.wait()?)
}
