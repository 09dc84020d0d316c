//! One rank's end of the connection to one peer: frames over a wire. Never blocks.

use super::frame::{Cause, Frame, HEADER, SEGMENT, Stamp};
use super::wire::Wire;
use crate::PlaneError;
use rustix::io::Errno;

/// Bytes read ahead: enough for a small message and its header in one call.
const STAGE: usize = 16 << 10;

/// Why a connection is of no use any more.
#[derive(Debug)]
pub(super) enum LinkError {
    Closed,
    /// The peer's process has come to its end.
    Died,
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
            LinkError::Died => (peer, "its process died".into()),
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

#[derive(Debug)]
pub(super) struct Link {
    pub(super) wire: Wire,
    epoch: u64,
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
    pub(super) fn new(wire: Wire, epoch: u64) -> Link {
        Link {
            wire,
            epoch,
            staged: vec![0; STAGE].into_boxed_slice(),
            start: 0,
            end: 0,
            next: None,
            segment: 0,
            retired: false,
        }
    }

    /// The peer said goodbye: it sends nothing any more.
    pub(super) fn retired(&self) -> bool {
        self.retired
    }

    /// The next header was read and its operation has not come for it yet.
    pub(super) fn header_known(&self) -> bool {
        self.next.is_some()
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

    /// Reads more of the current segment to the start of `into`. Zero when nothing is there yet.
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkError> {
        let len = into.len().min(self.segment);
        let into = &mut into[..len];
        if self.start == self.end && self.segment < STAGE && !self.fill()? {
            return Ok(0);
        }
        let count = if self.start < self.end {
            let count = into.len().min(self.end - self.start);
            into[..count].copy_from_slice(&self.staged[self.start..self.start + count]);
            self.start += count;
            count
        } else {
            self.wire.read(into)?
        };
        self.segment -= count;
        Ok(count)
    }

    /// Reads ahead. False when nothing is there yet.
    fn fill(&mut self) -> Result<bool, LinkError> {
        self.staged.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let count = self.wire.read(&mut self.staged[self.end..])?;
        self.end += count;
        Ok(count > 0)
    }

    /// Writes from two pieces in turn. Zero when there is no room.
    pub(super) fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize, LinkError> {
        self.wire.write(head, body).map_err(|error| match error {
            LinkError::Closed | LinkError::Died | LinkError::Broken(_) => self.last_words(error),
            LinkError::Left(_) | LinkError::Garbage(_) => error,
        })
    }

    /// A peer that gave up may have said why before its end of the connection closed.
    fn last_words(&mut self, error: LinkError) -> LinkError {
        self.wire.look_again();
        match self.peek() {
            Err(said) => said,
            Ok(_) => error,
        }
    }

    /// Throws away what arrives. True when the peer has closed.
    pub(super) fn drain(&mut self, junk: &mut [u8]) -> bool {
        loop {
            match self.wire.read(junk) {
                Ok(0) => return false,
                Ok(1..) => {}
                Err(_) => return true,
            }
        }
    }
}
