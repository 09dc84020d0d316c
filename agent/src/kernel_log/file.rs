//! A regular file in place of the device: followed as it grows, is cut off or replaced.

use super::record::{self, TEXT_LIMIT};
use super::{Cursor, Ended, Follower, LogStart};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::read;
use std::convert::Infallible;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// A look at the file without being told that it changed: some file systems do not tell.
const LOOK: Duration = Duration::from_secs(1);
/// Where changes cannot be told of at all.
const LOOK_UNTOLD: Duration = Duration::from_millis(250);

pub(super) fn follow(log: &Follower, start: &mut LogStart, opened: &mut bool) -> Result<Infallible, Ended> {
    let mut file = File::open(&log.path)?;
    // Before the first look, so that no change after it is missed.
    let changes = watch(&log.path);
    let metadata = file.metadata()?;
    let inode = metadata.ino();
    let offset = match start {
        LogStart::Beginning => 0,
        LogStart::End => metadata.len(),
        LogStart::After(Cursor::File { inode: of, offset }) if *of == inode && *offset <= metadata.len() => {
            *offset
        }
        LogStart::After(Cursor::File { .. } | Cursor::Device { .. }) => 0,
    };
    file.seek(SeekFrom::Start(offset))?;
    *start = LogStart::After(Cursor::File { inode, offset });
    log.opened(opened)?;
    let mut lines = Lines::at(offset);
    let mut live = false;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let length = match file.read(&mut buffer) {
            Ok(length) => length,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e.into()),
        };
        for line in lines.take(&buffer[..length]) {
            let cursor = Cursor::File { inode, offset: line.end };
            log.pass(record::parse(&line.bytes), cursor, start)?;
        }
        if length > 0 {
            continue;
        }
        if file.metadata()?.len() < lines.offset {
            return Err(Ended::Replaced);
        }
        match fs::metadata(&log.path) {
            Ok(now) if now.ino() != inode => return Err(Ended::Replaced),
            Ok(_) => {}
            // It may be moved away; what is written to it meanwhile is still read.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e.into()),
        }
        log.caught_up(&mut live)?;
        match &changes {
            Ok(changes) => {
                log.wait(Some(changes.as_fd()), Some(LOOK))?;
                // What changed does not matter: the file is looked at.
                let _nothing_yet = read(changes, &mut buffer[..]);
            }
            Err(_) => log.wait(None, Some(LOOK_UNTOLD))?,
        }
    }
}

/// Becomes readable when the file or its place in the folder changes.
fn watch(path: &Path) -> io::Result<OwnedFd> {
    let changes = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
    inotify::add_watch(&changes, path, WatchFlags::MODIFY | WatchFlags::ATTRIB)?;
    let real = path.canonicalize()?;
    if let Some(folder) = real.parent() {
        inotify::add_watch(&changes, folder, WatchFlags::CREATE | WatchFlags::MOVED_TO)?;
    }
    Ok(changes)
}

/// A whole line, or its beginning where it is too long.
pub(super) struct Line {
    pub(super) bytes: Vec<u8>,
    /// The offset just after it.
    pub(super) end: u64,
}

/// Makes lines of what is read.
pub(super) struct Lines {
    /// Of the next byte.
    offset: u64,
    partial: Vec<u8>,
}

impl Lines {
    pub(super) const fn at(offset: u64) -> Self {
        Self { offset, partial: Vec::new() }
    }

    /// The lines that end within `bytes`. What follows the last one is kept for the next time.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Vec<Line> {
        let mut lines = Vec::new();
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.offset += piece.len() as u64;
            let room = TEXT_LIMIT.saturating_sub(self.partial.len());
            self.partial.extend_from_slice(&piece[..piece.len().min(room)]);
            if piece.ends_with(b"\n") {
                lines.push(Line { bytes: std::mem::take(&mut self.partial), end: self.offset });
            }
        }
        lines
    }
}
