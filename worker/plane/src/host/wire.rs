//! How bytes get to a peer and from it: a socket, with shared memory beside it where the two ranks have some.

use super::ring::Ring;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg, sockopt};
use std::io::IoSlice;
use std::os::fd::OwnedFd;

/// What ends a connection, as far as this rank can see.
#[derive(Debug)]
pub(super) enum WireError {
    Closed,
    Broken(Errno),
    Garbage(String),
}

/// Never blocks. Readiness of the socket is edge-triggered: a flag stays up until the socket says that it would block.
#[derive(Debug)]
pub(super) struct Wire {
    socket: OwnedFd,
    /// Carries all data if there is one. Then the socket only wakes up and, by its end, tells of the peer's.
    ring: Option<Ring>,
    readable: bool,
    writable: bool,
    /// The peer has hung up: a short read may be followed by the end without another event.
    hung_up: bool,
}

impl Wire {
    /// Takes a connected, non-blocking socket.
    pub(super) fn new(socket: OwnedFd, ring: Option<Ring>) -> Wire {
        Wire { socket, ring, readable: true, writable: true, hung_up: false }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// The peer runs on the same machine.
    pub(super) fn is_local(&self) -> bool {
        sockopt::socket_domain(&self.socket) == Ok(AddressFamily::UNIX)
    }

    pub(super) fn ring(&mut self) -> Option<&mut Ring> {
        self.ring.as_mut()
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
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<usize, WireError> {
        let Some(ring) = &mut self.ring else {
            return receive(&self.socket, into, &mut self.readable, self.hung_up);
        };
        let garbage = |error| WireError::Garbage(format!("{error}"));
        let count = ring.read(into, &self.socket).map_err(garbage)?;
        if count > 0 || !self.readable {
            return Ok(count);
        }
        loop {
            match receive(&self.socket, &mut [0; 64], &mut self.readable, self.hung_up) {
                // Calls to wake up.
                Ok(1..) => {}
                Ok(0) => return Ok(0),
                // What it wrote before its end is still there.
                Err(end) => match ring.read(into, &self.socket).map_err(garbage)? {
                    0 => return Err(end),
                    count => return Ok(count),
                },
            }
        }
    }

    /// Writes from two pieces in turn. Zero when there is no room.
    pub(super) fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize, WireError> {
        match &mut self.ring {
            None => self.send(head, body),
            Some(ring) => {
                let mut count = 0;
                for piece in [head, body] {
                    let written = ring.write(piece, &self.socket);
                    let written = written.map_err(|error| WireError::Garbage(error.to_string()))?;
                    count += written;
                    if written < piece.len() {
                        break;
                    }
                }
                // Nobody will ever make room.
                if count == 0 && self.hung_up {
                    return Err(WireError::Closed);
                }
                Ok(count)
            }
        }
    }

    fn send(&mut self, head: &[u8], body: &[u8]) -> Result<usize, WireError> {
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
                    return Err(WireError::Broken(errno));
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
) -> Result<usize, WireError> {
    if !*readable {
        return Ok(0);
    }
    let wanted = into.len();
    loop {
        match recv(socket, &mut *into, RecvFlags::empty()) {
            Ok((0, _)) => return Err(WireError::Closed),
            Ok((count, _)) => {
                *readable = count == wanted || hung_up;
                return Ok(count);
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                *readable = false;
                return Ok(0);
            }
            Err(errno) => return Err(WireError::Broken(errno)),
        }
    }
}
