//! Ends what a worker has started and left running.

use super::proc;
use super::process::{open, pid_of};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};
use std::os::fd::{AsFd, OwnedFd};
use tracing::{info, warn};

/// Somebody who starts others faster than they are found is given up.
const PASSES: u32 = 20;
/// For a killed process to be gone.
const EXIT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// How to know what a worker has started: its process group, or its mark where a process left the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Traces {
    pub(super) pid: u32,
    pub(super) start_time: u64,
    pub(super) spawn: String,
}

impl Traces {
    /// Kills them through pidfds, until there are none. The worker itself must have ended.
    pub(super) fn kill_all(&self) {
        for _ in 0..PASSES {
            let found = self.find();
            if found.is_empty() {
                return;
            }
            info!(leader = self.pid, ?found, "what a worker left running is killed");
            let killed: Vec<_> = found.into_iter().filter_map(|pid| self.kill(pid)).collect();
            for pidfd in &killed {
                // One that takes longer is found again.
                let _late = poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&EXIT));
            }
        }
        warn!(
            leader = self.pid,
            "some of what a worker left running cannot be killed: look at the kernel log"
        );
    }

    fn find(&self) -> Vec<u32> {
        // While anyone is left in the group, nobody else can get its number. Somebody has: it is another group now.
        let reused = proc::stat(self.pid).is_some();
        let own = |pid: &u32| *pid != self.pid && self.is_of_worker(*pid, reused);
        proc::pids().into_iter().filter(own).collect()
    }

    fn is_of_worker(&self, pid: u32, reused: bool) -> bool {
        let Some(stat) = proc::stat(pid) else {
            return false;
        };
        let in_group = stat.group == self.pid && !reused;
        stat.start_time >= self.start_time && (in_group || proc::is_of_spawn(pid, &self.spawn))
    }

    fn kill(&self, pid: u32) -> Option<OwnedFd> {
        let pidfd = pid_of(pid).and_then(open).ok().flatten()?;
        // Looked at again: what matches now is what the pidfd holds.
        let reused = proc::stat(self.pid).is_some();
        if !self.is_of_worker(pid, reused) {
            return None;
        }
        let _gone = pidfd_send_signal(pidfd.as_fd(), Signal::KILL);
        Some(pidfd)
    }
}
