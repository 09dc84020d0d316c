//! How bytes get to a peer and from it: a socket, with shared memory beside it where the two ranks have some.

use super::life::Sign;
use super::link::LinkError;
use super::offer::Near;
use super::ring::Ring;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg, sockopt};
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Never blocks. Readiness of the socket is edge-triggered: a flag stays up until the socket says that it would block.
#[derive(Debug)]
pub(super) struct Wire {
    socket: OwnedFd,
    /// Its ring carries all data if there is one. Then the socket only wakes up and, by its end, tells of the peer's.
    near: Option<Box<Near>>,
    readable: bool,
    writable: bool,
    /// The peer has hung up: a short read may be followed by the end without another event.
    hung_up: bool,
    /// The peer's sign of life is over. What it has said before still counts.
    died: bool,
}

impl Wire {
    /// Takes a connected, non-blocking socket.
    pub(super) fn new(socket: OwnedFd, near: Option<Box<Near>>) -> Wire {
        Wire { socket, near, readable: true, writable: true, hung_up: false, died: false }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// The peer runs on the same machine.
    pub(super) fn is_local(&self) -> bool {
        sockopt::socket_domain(&self.socket) == Ok(AddressFamily::UNIX)
    }

    /// Data goes through memory that both ranks have, and not through the socket.
    pub(super) fn is_shared(&self) -> bool {
        self.near.is_some()
    }

    pub(super) fn ring(&mut self) -> Option<&mut Ring> {
        self.near.as_mut().map(|near| &mut near.ring)
    }

    pub(super) fn sign(&self) -> Option<&Arc<Sign>> {
        self.near.as_ref()?.sign.as_ref()
    }

    pub(super) fn lose(&mut self) {
        self.died = true;
        self.hung_up = true;
        self.readable = true;
    }

    pub(super) fn notice(&mut self, readable: bool, writable: bool, hung_up: bool) {
        self.readable |= readable || hung_up;
        self.writable |= writable || hung_up;
        self.hung_up |= hung_up;
    }

    /// A write failed: what the peer said before may be there to be read.
    pub(super) fn look_again(&mut self) {
        self.readable = true;
    }

    /// Zero when nothing is there yet; the end of the stream is an error.
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkError> {
        let Some(Near { ring, .. }) = self.near.as_deref_mut() else {
            return receive(&self.socket, into, &mut self.readable, self.hung_up);
        };
        let garbage = |error| LinkError::Garbage(format!("{error}"));
        let count = ring.read(into, &self.socket).map_err(garbage)?;
        if count > 0 || !self.readable {
            return Ok(count);
        }
        loop {
            let end = match receive(&self.socket, &mut [0; 64], &mut self.readable, self.hung_up) {
                // Calls to wake up.
                Ok(1..) => continue,
                Ok(0) if !self.died => return Ok(0),
                Ok(0) => LinkError::Died,
                Err(end) => end,
            };
            // What it wrote before its end is still there.
            return match ring.read(into, &self.socket).map_err(garbage)? {
                0 => Err(end),
                count => Ok(count),
            };
        }
    }

    /// Writes from two pieces in turn. Zero when there is no room.
    pub(super) fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize, LinkError> {
        match self.near.as_deref_mut() {
            None => self.send(head, body),
            Some(Near { ring, .. }) => {
                let mut count = 0;
                for piece in [head, body] {
                    let written = ring.write(piece, &self.socket);
                    let written = written.map_err(|error| LinkError::Garbage(error.to_string()))?;
                    count += written;
                    if written < piece.len() {
                        break;
                    }
                }
                // Nobody will ever make room.
                if count == 0 && self.hung_up {
                    return Err(LinkError::Closed);
                }
                Ok(count)
            }
        }
    }

    fn send(&mut self, head: &[u8], body: &[u8]) -> Result<usize, LinkError> {
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
                Err(errno) => {
                    self.writable = false;
                    return Err(LinkError::Broken(errno));
                }
            }
        }
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
            Err(errno) => return Err(LinkError::Broken(errno)),
        }
    }
}
