//! One message on its way, from or to this rank.

use super::frame::{Frame, HEADER, SEGMENT, Stamp};
use super::link::{Link, LinkError};
use super::memory::{Lending, Memory};
use super::program::{OpCode, Space, Transfer};

/// What stops a transfer for good.
#[derive(Debug)]
pub(super) enum TransferError {
    Link(LinkError),
    Mismatch(String),
    /// The peer has left in order but is still needed.
    Retired,
    /// This rank lends no more memory.
    NotLent,
}

impl From<LinkError> for TransferError {
    fn from(error: LinkError) -> Self {
        TransferError::Link(error)
    }
}

#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) transfer: Transfer,
    stamp: Stamp,
    epoch: u64,
    /// Of the segment that is next, once there was an attempt to send it.
    header: Option<[u8; HEADER]>,
    header_left: usize,
    sent: usize,
    segment_end: usize,
    total: usize,
}

impl Outgoing {
    pub(super) fn new(transfer: Transfer, stamp: Stamp, epoch: u64) -> Outgoing {
        Outgoing {
            transfer,
            stamp,
            epoch,
            header: None,
            header_left: HEADER,
            sent: 0,
            segment_end: SEGMENT.min(transfer.span.len),
            total: transfer.span.len,
        }
    }

    pub(super) fn done(&self) -> bool {
        self.header_left == 0 && self.sent == self.total
    }

    /// A segment was begun and must be finished before anything else can be said on this link.
    pub(super) fn mid_segment(&self) -> bool {
        let at_start = self.header_left == HEADER;
        let at_end = self.header_left == 0 && self.sent == self.segment_end;
        !at_start && !at_end
    }

    /// Goes on without what is lent, as far as the segment that was begun.
    pub(super) fn keep(&mut self, memory: &mut Memory, lent: Lending<'_, '_>) {
        if self.transfer.span.space == Space::Lent {
            let kept = memory.keep(lent, &self.transfer, self.sent, self.segment_end);
            self.transfer.span = kept;
            (self.sent, self.segment_end) = (0, kept.len);
        }
        self.total = self.segment_end;
    }

    /// One write at most. True when something moved.
    pub(super) fn push(
        &mut self,
        link: &mut Link,
        memory: &Memory,
        lent: Lending<'_, '_>,
    ) -> Result<bool, TransferError> {
        if self.done() {
            return Ok(false);
        }
        let header = self.header(link, memory);
        let head = &header[HEADER - self.header_left..];
        let body = memory.outgoing(lent, &self.transfer, self.sent, self.segment_end);
        if body.is_empty() && self.sent < self.segment_end {
            return Err(TransferError::NotLent);
        }
        let count = link.write(head, body)?;
        let of_header = count.min(self.header_left);
        self.header_left -= of_header;
        self.sent += count - of_header;
        if self.header_left == 0 && self.sent == self.segment_end && self.sent < self.total {
            self.segment_end = self.total.min(self.sent + SEGMENT);
            self.header_left = HEADER;
            self.header = None;
        }
        Ok(count > 0)
    }

    /// Lent memory is asked for in order and once: whoever lends it sums it, as [`crate::Lent`] says.
    fn header(&mut self, link: &Link, memory: &Memory) -> [u8; HEADER] {
        *self.header.get_or_insert_with(|| {
            let body = || &memory.bytes(self.transfer.span)[self.sent..self.segment_end];
            let summed = link.sums() && self.transfer.span.space != Space::Lent;
            let sum = summed.then(|| crc32fast::hash(body()));
            Frame::Data(self.stamp, sum).encode(self.epoch)
        })
    }
}

#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) transfer: Transfer,
    expected: Stamp,
    got: usize,
    pub(super) done: bool,
}

impl Incoming {
    pub(super) fn new(transfer: Transfer, expected: Stamp) -> Incoming {
        Incoming { transfer, expected, got: 0, done: false }
    }

    /// One read of payload at most. True when something moved.
    pub(super) fn pull(
        &mut self,
        link: &mut Link,
        memory: &mut Memory,
        lent: Lending<'_, '_>,
    ) -> Result<bool, TransferError> {
        if self.done {
            return Ok(false);
        }
        let total = self.transfer.span.len;
        let mut moved = false;
        if !link.in_segment() {
            let Some(stamp) = link.peek()? else {
                if link.retired() {
                    return Err(TransferError::Retired);
                }
                return Ok(false);
            };
            if stamp != self.expected {
                return Err(TransferError::Mismatch(self.difference(&stamp)));
            }
            link.open_segment();
            moved = true;
        }
        if link.in_segment() {
            let into = memory.incoming(lent, &self.transfer, self.got);
            if into.is_empty() {
                return Err(TransferError::NotLent);
            }
            let count = link.read(into)?;
            self.got += count;
            moved |= count > 0;
        }
        self.done = self.got == total && !link.in_segment();
        Ok(moved)
    }

    fn difference(&self, stamp: &Stamp) -> String {
        let describe = |stamp: &Stamp| {
            format!(
                "{} number {} round {} with {} bytes (digest {:016x})",
                OpCode::name(stamp.code),
                stamp.sequence,
                stamp.round,
                stamp.length,
                stamp.digest
            )
        };
        format!(
            "it sent {}, expected {}; every rank must submit the same operations in the same order",
            describe(stamp),
            describe(&self.expected)
        )
    }
}
