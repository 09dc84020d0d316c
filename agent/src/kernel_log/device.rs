//! /dev/kmsg: each read gives one record.

use super::record::{self, TEXT_LIMIT};
use super::{Cursor, Ended, Follower, LogStart, boot_id};
use rustix::fs::{Mode, OFlags, SeekFrom, open, seek};
use rustix::io::{Errno, read};
use std::convert::Infallible;
use std::io;
use std::os::fd::AsFd;
use tracing::warn;

pub(super) fn follow(log: &Follower, start: &mut LogStart, opened: &mut bool) -> Result<Infallible, Ended> {
    let device = open(&log.path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
    let boot = boot_id();
    let mut seen = None;
    let mut live = false;
    match start {
        LogStart::Beginning => {}
        LogStart::End => {
            seek(&device, SeekFrom::End(0))?;
        }
        LogStart::After(Cursor::Device { boot: of, sequence }) if *of == boot && !boot.is_empty() => {
            seen = Some(*sequence);
        }
        LogStart::After(Cursor::Device { .. } | Cursor::File { .. }) => {}
    }
    // Room for a record with all that follows its first line.
    let mut buffer = vec![0; 2 * TEXT_LIMIT];
    loop {
        let read = read(&device, &mut buffer[..]);
        match read {
            Ok(0) => return Err(Ended::Lost(io::Error::other("it is no kernel log"))),
            Ok(length) => {
                let record = record::parse(&buffer[..length]);
                // Other devices can be read, too.
                let Some(sequence) = record.sequence else {
                    return Err(Ended::Lost(io::Error::other("it is no kernel log")));
                };
                log.opened(opened)?;
                if seen.is_some_and(|seen| sequence <= seen) {
                    continue;
                }
                log.pass(record, Cursor::Device { boot: boot.clone(), sequence }, start)?;
            }
            Err(Errno::AGAIN) => {
                log.opened(opened)?;
                log.caught_up(&mut live)?;
                log.wait(Some(device.as_fd()), None)?;
            }
            // The kernel wrote faster than this reads: the next read goes on with the oldest it has.
            Err(Errno::PIPE) => warn!("the kernel log ran over: some of its lines are lost"),
            // A record longer than any should be. The kernel has passed over it.
            Err(Errno::INVAL | Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}
