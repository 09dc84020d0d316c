//! The kernel log: where the NVIDIA driver says more of an XID error than NVML does.
//!
//! A thread of its own, as neither /dev/kmsg nor files fit the runtime; it sleeps until there is something to
//! read. Files and named pipes serve in place of the device.

mod device;
mod file;
mod pipe;
mod record;
#[cfg(test)]
mod tests;
pub(crate) mod xid_line;

use crate::files;
use record::Record;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;
use tokio::sync::mpsc;
use tracing::warn;

/// A log that cannot be read is tried again this often.
const RETRY: Duration = Duration::from_secs(3);

/// What the log tells. Only of the NVIDIA driver's error lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LogNews {
    /// From now on lines are seen, older ones first.
    Opened,
    /// Lines that follow are written as they are seen.
    CaughtUp,
    Line {
        /// Reading goes on after this line from here.
        cursor: Cursor,
        /// Microseconds since the boot, where the line says so.
        at_us: Option<u64>,
        text: String,
    },
    /// No line is seen until `Opened`.
    Unreadable { why: String },
}

/// A place in the log, just after a line, that outlives the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Cursor {
    Device {
        /// The kernel's name for this boot: each begins to count anew.
        boot: String,
        sequence: u64,
    },
    File {
        inode: u64,
        offset: u64,
    },
}

/// Where to begin. A cursor of another boot or file means the beginning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LogStart {
    Beginning,
    End,
    After(Cursor),
}

/// The thread that reads. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct KernelLog {
    _stop: UnixStream,
}

impl KernelLog {
    /// Begins to read `path`, /dev/kmsg or a stand-in. What is wrong with it is news, not an error.
    pub(crate) fn start(path: PathBuf, start: LogStart, news: mpsc::Sender<LogNews>) -> io::Result<Self> {
        let (ours, stop) = UnixStream::pair()?;
        let follower = Follower { path, news, stop };
        thread::Builder::new().name("kernel-log".to_owned()).spawn(move || follower.run(start))?;
        Ok(Self { _stop: ours })
    }
}

/// Why reading ended.
enum Ended {
    /// Nobody listens.
    Stopped,
    Lost(io::Error),
    /// There is another file at this path, or the file begins anew.
    Replaced,
}

impl From<io::Error> for Ended {
    fn from(e: io::Error) -> Self {
        Self::Lost(e)
    }
}

impl From<rustix::io::Errno> for Ended {
    fn from(e: rustix::io::Errno) -> Self {
        Self::Lost(e.into())
    }
}

struct Follower {
    path: PathBuf,
    news: mpsc::Sender<LogNews>,
    stop: UnixStream,
}

impl Follower {
    fn run(&self, mut start: LogStart) {
        let mut told_unreadable = false;
        loop {
            let mut opened = false;
            let ended = self.follow(&mut start, &mut opened);
            if opened {
                told_unreadable = false;
            }
            match ended {
                Ended::Stopped => return,
                Ended::Replaced => {
                    start = LogStart::Beginning;
                    continue;
                }
                Ended::Lost(e) => {
                    if e.kind() == io::ErrorKind::NotFound {
                        // Whatever it holds when it comes is new.
                        start = LogStart::Beginning;
                    }
                    if !told_unreadable {
                        told_unreadable = true;
                        if self.tell(LogNews::Unreadable { why: self.advice(&e) }).is_err() {
                            return;
                        }
                    }
                }
            }
            if self.wait(None, Some(RETRY)).is_err() {
                return;
            }
        }
    }

    /// Reads until it ends, and keeps in `start` where to go on.
    fn follow(&self, start: &mut LogStart, opened: &mut bool) -> Ended {
        let kind = match fs::metadata(&self.path) {
            Ok(metadata) => metadata.file_type(),
            Err(e) => return Ended::Lost(e),
        };
        let ended = if kind.is_char_device() {
            device::follow(self, start, opened)
        } else if kind.is_fifo() {
            pipe::follow(self, start, opened)
        } else if kind.is_file() {
            file::follow(self, start, opened)
        } else {
            Err(Ended::Lost(io::Error::other("it is no log")))
        };
        match ended {
            Ok(never) => match never {},
            Err(ended) => ended,
        }
    }

    fn advice(&self, e: &io::Error) -> String {
        let path = self.path.display();
        format!(
            "cannot read the kernel log {path}: {e}; run the agent as root or give it CAP_SYSLOG, or give \
             another path with --kmsg"
        )
    }

    /// Told once.
    fn opened(&self, opened: &mut bool) -> Result<(), Ended> {
        if *opened {
            return Ok(());
        }
        *opened = true;
        self.tell(LogNews::Opened)
    }

    /// There is nothing to read at the moment. Told once.
    fn caught_up(&self, live: &mut bool) -> Result<(), Ended> {
        if *live {
            return Ok(());
        }
        *live = true;
        self.tell(LogNews::CaughtUp)
    }

    /// Passes a record on if it matters, and keeps in `start` where to go on.
    fn pass(&self, record: Record, cursor: Cursor, start: &mut LogStart) -> Result<(), Ended> {
        *start = LogStart::After(cursor.clone());
        if record::matters(&record) {
            self.tell(LogNews::Line { cursor, at_us: record.at_us, text: record.text })?;
        }
        Ok(())
    }

    fn tell(&self, news: LogNews) -> Result<(), Ended> {
        self.news.blocking_send(news).map_err(|_| Ended::Stopped)
    }

    /// Until `fd` is readable, but no longer than `limit`.
    fn wait(&self, fd: Option<BorrowedFd<'_>>, limit: Option<Duration>) -> Result<(), Ended> {
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let mut fds = vec![PollFd::new(&self.stop, PollFlags::IN)];
        fds.extend(fd.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        // Nobody writes to it: it is readable only when its other end is closed.
        if fds.first().is_some_and(|stop| !stop.revents().is_empty()) {
            return Err(Ended::Stopped);
        }
        Ok(())
    }
}

fn boot_id() -> String {
    files::boot_id().unwrap_or_else(|error| {
        warn!(%error, "this boot has no name: after a restart the kernel log is read from its beginning");
        String::new()
    })
}
