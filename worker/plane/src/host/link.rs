//! One rank's end of the connection to one peer. Never blocks.

use super::frame::{Cause, Frame, HEADER, SEGMENT, Stamp};
use crate::PlaneError;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use std::io::IoSlice;
use std::os::fd::OwnedFd;

/// Bytes read ahead: enough for a small message and its header in one call.
const STAGE: usize = 16 << 10;

/// Why a connection is of no use any more.
#[derive(Debug)]
pub(super) enum LinkError {
    Closed,
    Broken(Errno),
    /// The peer said so.
    Left(Cause),
    Garbage(String),
}

impl LinkError {
    /// What this rank, `me`, makes of the end of its connection to `peer`. Who leaves because of a death is not the one
    /// to blame for it.
    pub(super) fn blame(self, group: &str, me: usize, peer: usize) -> PlaneError {
        let (rank, detail) = match self {
            LinkError::Closed => (peer, "its connection ended".into()),
            LinkError::Broken(errno) => (peer, format!("its connection broke: {errno}")),
            LinkError::Garbage(detail) => (peer, detail),
            LinkError::Left(Cause::LostPeer(dead)) if dead != me => {
                (dead, format!("rank {peer} lost it and left the group"))
            }
            LinkError::Left(cause) => {
                let detail = cause.to_string();
                return PlaneError::PeerLeft { group: group.to_owned(), rank: peer, detail };
            }
        };
        PlaneError::PeerLost { group: group.to_owned(), rank, detail }
    }
}

/// Readiness is edge-triggered: a flag stays up until the socket says that it would block.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    epoch: u64,
    readable: bool,
    writable: bool,
    /// The peer has hung up: a short read may be followed by the end without another event.
    hung_up: bool,
    staged: Box<[u8]>,
    start: usize,
    end: usize,
    /// A header that was read and whose operation has not come yet.
    next: Option<Stamp>,
    /// Bytes of the current segment still to be read.
    segment: usize,
    retired: bool,
}

impl Link {
    /// Takes a connected, non-blocking socket.
    pub(super) fn new(socket: OwnedFd, epoch: u64) -> Link {
        Link {
            socket,
            epoch,
            readable: true,
            writable: true,
            hung_up: false,
            staged: vec![0; STAGE].into_boxed_slice(),
            start: 0,
            end: 0,
            next: None,
            segment: 0,
            retired: false,
        }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    pub(super) fn notice(&mut self, readable: bool, writable: bool, hung_up: bool) {
        self.readable |= readable || hung_up;
        self.writable |= writable || hung_up;
        self.hung_up |= hung_up;
    }

    /// The peer said goodbye: it sends nothing any more.
    pub(super) fn retired(&self) -> bool {
        self.retired
    }

    /// The header of the next segment, once it is there. The segment stays until [`Link::open_segment`].
    pub(super) fn peek(&mut self) -> Result<Option<Stamp>, LinkError> {
        while self.next.is_none() && self.segment == 0 && !self.retired {
            if self.end - self.start < HEADER {
                if !self.fill()? {
                    return Ok(None);
                }
                continue;
            }
            let mut header = [0; HEADER];
            header.copy_from_slice(&self.staged[self.start..self.start + HEADER]);
            self.start += HEADER;
            match Frame::decode(&header, self.epoch).map_err(LinkError::Garbage)? {
                Frame::Data(stamp) => self.next = Some(stamp),
                Frame::Goodbye => self.retired = true,
                Frame::Abort(cause) => return Err(LinkError::Left(cause)),
            }
        }
        Ok(self.next)
    }

    /// Accepts the segment whose header was peeked at; `done` bytes of its message came before.
    pub(super) fn open_segment(&mut self, length: usize, done: usize) {
        self.next = None;
        self.segment = SEGMENT.min(length - done);
    }

    pub(super) fn in_segment(&self) -> bool {
        self.segment > 0
    }

    /// Reads more of the current segment to the start of `into`, which is at least as long as what is left of it.
    /// Zero when nothing is there yet.
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkError> {
        let into = &mut into[..self.segment];
        if self.start == self.end && into.len() < STAGE && !self.fill()? {
            return Ok(0);
        }
        let count = if self.start < self.end {
            let count = into.len().min(self.end - self.start);
            into[..count].copy_from_slice(&self.staged[self.start..self.start + count]);
            self.start += count;
            count
        } else {
            receive(&self.socket, into, &mut self.readable, self.hung_up)?
        };
        self.segment -= count;
        Ok(count)
    }

    /// Reads ahead. False when nothing is there yet.
    fn fill(&mut self) -> Result<bool, LinkError> {
        self.staged.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let room = &mut self.staged[self.end..];
        let count = receive(&self.socket, room, &mut self.readable, self.hung_up)?;
        self.end += count;
        Ok(count > 0)
    }

    /// Writes from two pieces in turn. Zero when the socket is full.
    pub(super) fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize, LinkError> {
        if !self.writable {
            return Ok(0);
        }
        let pieces = [IoSlice::new(head), IoSlice::new(body)];
        loop {
            let mut control = SendAncillaryBuffer::default();
            match sendmsg(&self.socket, &pieces, &mut control, SendFlags::NOSIGNAL) {
                Ok(count) => {
                    self.writable = count == head.len() + body.len();
                    return Ok(count);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.writable = false;
                    return Ok(0);
                }
                Err(error) => {
                    self.writable = false;
                    return Err(self.last_words(error));
                }
            }
        }
    }

    /// A peer that gave up may have said why before its end of the connection closed.
    fn last_words(&mut self, error: Errno) -> LinkError {
        self.readable = true;
        match self.peek() {
            Err(said) => said,
            Ok(_) => LinkError::Broken(error),
        }
    }

    /// Throws away what arrives. True when the peer has closed.
    pub(super) fn drain(&mut self, junk: &mut [u8]) -> bool {
        while self.readable {
            if receive(&self.socket, junk, &mut self.readable, self.hung_up).is_err() {
                return true;
            }
        }
        false
    }
}

/// Zero when the socket is empty; the end of the stream is an error.
fn receive(
    socket: &OwnedFd,
    into: &mut [u8],
    readable: &mut bool,
    hung_up: bool,
) -> Result<usize, LinkError> {
    if !*readable {
        return Ok(0);
    }
    let wanted = into.len();
    loop {
        match recv(socket, &mut *into, RecvFlags::empty()) {
            Ok((0, _)) => return Err(LinkError::Closed),
            Ok((count, _)) => {
                *readable = count == wanted || hung_up;
                return Ok(count);
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                *readable = false;
                return Ok(0);
            }
            Err(error) => return Err(LinkError::Broken(error)),
        }
    }
}
