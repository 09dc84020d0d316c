//! One rank's end of the connection to one peer: frames over a wire. Never blocks.

use super::frame::{Cause, Frame, HEADER, SEGMENT, Stamp};
use super::wire::Wire;
use crate::PlaneError;
use crc32fast::Hasher;
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
    /// A header that was read and whose operation has not come yet, and the checksum of its segment.
    next: Option<(Stamp, Option<u32>)>,
    /// What the current segment's checksum shall be, and what it is so far.
    sum: Option<(u32, Hasher)>,
    /// Bytes of the current segment still to be read.
    segment: usize,
    /// Bytes of the current message in the segments after that.
    left: usize,
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
            sum: None,
            segment: 0,
            left: 0,
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
                Frame::Data(stamp, sum) => self.next = Some((stamp, sum)),
                Frame::Goodbye => self.retired = true,
                Frame::Abort(cause) => return Err(LinkError::Left(cause)),
            }
        }
        Ok(self.next.map(|(stamp, _)| stamp))
    }

    /// Accepts the segment whose header was peeked at.
    pub(super) fn open_segment(&mut self) {
        if let Some((stamp, sum)) = self.next.take() {
            self.sum = sum.map(|sum| (sum, Hasher::new()));
            let left = if self.left > 0 { self.left } else { stamp.length as usize };
            self.segment = SEGMENT.min(left);
            self.left = left - self.segment;
        }
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
        if let Some((_, found)) = &mut self.sum {
            found.update(&into[..count]);
        }
        if self.segment == 0
            && let Some((sent, found)) = self.sum.take()
            && sent != found.finalize()
        {
            return Err(LinkError::Garbage("it sent data that was damaged on its way".into()));
        }
        Ok(count)
    }

    /// Whether what is written needs a checksum: memory that is shared has no way on which it could be damaged.
    pub(super) fn sums(&self) -> bool {
        !self.wire.is_shared()
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

    /// A peer that gave up may have said why before its end of the connection closed, behind what nobody wants any more.
    fn last_words(&mut self, error: LinkError) -> LinkError {
        self.wire.look_again();
        let mut junk = [0; STAGE];
        loop {
            match self.peek() {
                Err(said) => return said,
                Ok(Some(_)) => self.open_segment(),
                Ok(None) if self.in_segment() && matches!(self.read(&mut junk), Ok(1..)) => {}
                Ok(None) => return error,
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_last_word_is_heard_behind_what_was_not_read() {
        const LEN: usize = 3 * STAGE;
        type Before = fn(&mut Link);
        let half_read: Before = |link| {
            link.open_segment();
            assert_eq!(link.read(&mut [0; 10]).unwrap(), 10);
        };
        let second_segment: Before = |link| link.left = LEN;
        for (length, before) in [(LEN, half_read), (LEN, |_| {}), (SEGMENT + LEN, second_segment)] {
            let (near, mut far) = UnixStream::pair().unwrap();
            near.set_nonblocking(true).unwrap();
            let stamp = Stamp { code: 1, round: 0, sequence: 0, digest: 0, length: length as u64 };
            far.write_all(&Frame::Data(stamp, None).encode(3)).unwrap();
            far.write_all(&[7; LEN]).unwrap();
            far.write_all(&Frame::Abort(Cause::LostPeer(2)).encode(3)).unwrap();
            drop(far);

            let mut link = Link::new(Wire::new(near.into(), None), 3);
            assert_eq!(link.peek().unwrap(), Some(stamp));
            before(&mut link);
            let error = link.write(&[0; HEADER], &[]).unwrap_err();
            assert!(matches!(error, LinkError::Left(Cause::LostPeer(2))), "{error:?}");
        }
    }
}
