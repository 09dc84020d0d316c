//! A stream of bytes to and from one peer of the same node, through shared memory.
//!
//! Each end owns one window: the ring it writes and its progress through the other's. A rank that runs out of data or
//! room says in its window what it waits for and sleeps; who brings that about wakes it, once, by a byte over the
//! socket that stands beside the windows.

use super::window::{OwnWindow, PeerWindow, Word};
use rustix::net::{SendFlags, send};
use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

/// Bytes of one direction: small enough to stay in a core's own cache together with what is copied.
pub(super) const CAPACITY: usize = 512 << 10;
/// Bytes copied before the other end is told: it can begin while the rest is still copied.
const QUANTUM: usize = 64 << 10;
const NEVER: u64 = u64::MAX;

#[derive(Debug)]
pub(super) struct Ring {
    own: OwnWindow,
    peer: PeerWindow,
    /// Bytes put into the own ring, and how many of them the peer is known to have taken.
    written: u64,
    released: u64,
    /// Bytes taken out of the peer's ring, and how many are known to be in it.
    taken: u64,
    arrived: u64,
    /// What this rank sleeps for, if anything.
    until_written: u64,
    until_taken: u64,
    /// What the peer was last woken for.
    woken_written: u64,
    woken_taken: u64,
}

/// The peer's window holds numbers that no rank would write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("its shared window makes no sense: {what} went from {from} to {to}")]
pub(super) struct Nonsense {
    what: &'static str,
    from: u64,
    to: u64,
}

impl Ring {
    pub(super) fn new(own: OwnWindow, peer: PeerWindow) -> Ring {
        Ring {
            own,
            peer,
            written: 0,
            released: 0,
            taken: 0,
            arrived: 0,
            until_written: NEVER,
            until_taken: NEVER,
            woken_written: NEVER,
            woken_taken: NEVER,
        }
    }

    /// For a test that writes what no rank would.
    #[cfg(test)]
    pub(super) fn into_own_window(self) -> OwnWindow {
        self.own
    }

    /// Writes as much as there is room for. Zero when the ring is full.
    pub(super) fn write(&mut self, bytes: &[u8], socket: &OwnedFd) -> Result<usize, Nonsense> {
        let mut done = 0;
        while done < bytes.len() {
            let room = self.room(bytes.len() - done)?;
            if room == 0 {
                break;
            }
            let piece = &bytes[done..][..room.min(QUANTUM).min(bytes.len() - done)];
            let count = self.own.put(self.written, piece);
            self.written += count as u64;
            done += count;
            self.own.set(Word::Written, self.written);
            self.tell_written(socket);
        }
        Ok(done)
    }

    /// Free bytes, as far as known; asks the peer's window only when that is less than `wanted`.
    fn room(&mut self, wanted: usize) -> Result<usize, Nonsense> {
        let free = |ring: &Ring| CAPACITY - (ring.written - ring.released) as usize;
        if free(self) < wanted.min(CAPACITY) {
            let released = self.peer.get(Word::Taken);
            if !(self.released..=self.written).contains(&released) {
                return Err(Nonsense { what: "what it has taken", from: self.released, to: released });
            }
            self.released = released;
        }
        Ok(free(self))
    }

    /// Reads as much as is there, up to the length of `into`. Zero when the ring is empty.
    pub(super) fn read(&mut self, into: &mut [u8], socket: &OwnedFd) -> Result<usize, Nonsense> {
        let past_cache = into.len() >= CAPACITY;
        let mut done = 0;
        while done < into.len() {
            let there = self.there(into.len() - done)?;
            if there == 0 {
                break;
            }
            let len = there.min(QUANTUM).min(into.len() - done);
            let count = self.peer.take(self.taken, &mut into[done..][..len], past_cache);
            self.taken += count as u64;
            done += count;
            self.own.set(Word::Taken, self.taken);
            self.tell_taken(socket);
        }
        Ok(done)
    }

    /// Bytes to read, as far as known; asks the peer's window only when that is less than `wanted`.
    fn there(&mut self, wanted: usize) -> Result<usize, Nonsense> {
        if ((self.arrived - self.taken) as usize) < wanted {
            let arrived = self.peer.get(Word::Written);
            let most = self.taken.saturating_add(CAPACITY as u64);
            if !(self.arrived..=most).contains(&arrived) {
                return Err(Nonsense { what: "what it has written", from: self.arrived, to: arrived });
            }
            self.arrived = arrived;
        }
        Ok((self.arrived - self.taken) as usize)
    }

    /// The fence orders this rank's word before its look at the peer's; the peer, about to sleep, does the reverse. So
    /// either it sees the word or this rank sees it sleep.
    fn tell_written(&mut self, socket: &OwnedFd) {
        fence(Ordering::SeqCst);
        let until = self.peer.get(Word::UntilWritten);
        if until != self.woken_written && self.written > until {
            self.woken_written = until;
            call(socket);
        }
    }

    fn tell_taken(&mut self, socket: &OwnedFd) {
        fence(Ordering::SeqCst);
        let until = self.peer.get(Word::UntilTaken);
        if until != self.woken_taken && self.taken >= until {
            self.woken_taken = until;
            call(socket);
        }
    }

    /// This rank is going to sleep until the peer has written more.
    pub(super) fn await_data(&mut self) {
        self.until_written = self.taken;
        self.own.set(Word::UntilWritten, self.until_written);
    }

    /// This rank is going to sleep until half of its full ring is free: less is not worth waking up for.
    pub(super) fn await_room(&mut self) {
        if self.written - self.released < CAPACITY as u64 {
            return;
        }
        self.until_taken = self.written - CAPACITY as u64 / 2;
        self.own.set(Word::UntilTaken, self.until_taken);
    }

    /// Whether what was to be slept for has happened already. To be asked after a fence.
    pub(super) fn has_come(&self) -> bool {
        (self.until_written != NEVER && self.peer.get(Word::Written) != self.until_written)
            || (self.until_taken != NEVER && self.peer.get(Word::Taken) >= self.until_taken)
    }

    pub(super) fn wake(&mut self) {
        if self.until_written != NEVER {
            self.until_written = NEVER;
            self.own.set(Word::UntilWritten, NEVER);
        }
        if self.until_taken != NEVER {
            self.until_taken = NEVER;
            self.own.set(Word::UntilTaken, NEVER);
        }
    }
}

/// A socket that is full of calls, or closed, wakes its reader anyway.
fn call(socket: &OwnedFd) {
    let _ = send(socket, &[0], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}
