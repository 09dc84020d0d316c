//! A named pipe in place of the device: lines, as they come.

use super::file::Lines;
use super::{Cursor, Ended, Follower, LogStart, record};
use rustix::fs::{Mode, OFlags, fstat, open};
use rustix::io::{Errno, read};
use std::convert::Infallible;
use std::os::fd::AsFd;

pub(super) fn follow(log: &Follower, start: &mut LogStart, opened: &mut bool) -> Result<Infallible, Ended> {
    // Also for writing, so that the pipe does not end with its writers.
    let pipe = open(&log.path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
    let inode = fstat(&pipe)?.st_ino;
    log.opened(opened)?;
    let mut lines = Lines::at(0);
    log.caught_up(&mut false)?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        match read(&pipe, &mut buffer[..]) {
            Ok(length) => {
                for line in lines.take(&buffer[..length]) {
                    let cursor = Cursor::File { inode, offset: line.end };
                    log.pass(record::parse(&line.bytes), cursor, start)?;
                }
            }
            Err(Errno::AGAIN) => log.wait(Some(pipe.as_fd()), None)?,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}
