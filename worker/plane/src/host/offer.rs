//! Two ranks of one node that have proven themselves pass each other a window, or say that they have none.

use super::ring::{CAPACITY, Ring};
use super::window::{NoWindow, OwnWindow, PeerWindow};
use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::warn;

/// The marker, whether a window comes with it, nothing, and the ring's capacity.
pub(super) const OFFER: usize = 16;
const MARKER: [u8; 7] = *b"window\0";

/// Whether a plane makes windows.
#[derive(Debug)]
pub(super) struct Windows {
    wanted: AtomicBool,
}

impl Windows {
    pub(super) fn new(wanted: bool) -> Windows {
        Windows { wanted: AtomicBool::new(wanted) }
    }

    fn create(&self) -> Option<(OwnWindow, OwnedFd)> {
        if !self.wanted.load(Ordering::Relaxed) {
            return None;
        }
        OwnWindow::create(CAPACITY).map_err(|errno| self.give_up(&errno)).ok()
    }

    /// From now on sockets carry all data. Said once.
    pub(super) fn give_up(&self, why: &dyn fmt::Display) {
        if self.wanted.swap(false, Ordering::Relaxed) {
            warn!(
                "data plane: no memory can be shared with the ranks of this node ({why}); their data goes over Unix \
                 sockets, which is slower. Allow memfd_create and at least {} KiB of shared memory per peer",
                CAPACITY >> 10
            );
        }
    }

    /// Makes a window if that is possible, and tells the peer. `None` when the peer cannot be told.
    pub(super) fn offer(&self, socket: &OwnedFd) -> Option<Offered> {
        let made = self.create();
        let mut bytes = [0; OFFER];
        bytes[..7].copy_from_slice(&MARKER);
        bytes[7] = made.is_some().into();
        bytes[8..].copy_from_slice(&(CAPACITY as u64).to_le_bytes());
        let files: Vec<_> = made.iter().map(|(_, file)| file.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return None;
        }
        let sent = sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
        // So short a message goes out at once and whole, or the socket is of no use.
        (sent == Ok(OFFER)).then(|| Offered {
            own: made.map(|(window, _)| window),
            heard: Vec::new(),
            file: None,
        })
    }
}

/// This rank's offer is out; the peer's comes in.
#[derive(Debug)]
pub(super) struct Offered {
    own: Option<OwnWindow>,
    heard: Vec<u8>,
    file: Option<OwnedFd>,
}

#[derive(Debug)]
pub(super) enum Answer {
    /// Not all of it is there.
    Wait,
    /// The peer is gone.
    End,
    /// `None` when one of the two has no window.
    Agreed(Option<Ring>),
    /// The peer's offer is no good.
    Bad(String),
}

impl Offered {
    pub(super) fn answer(&mut self, socket: &OwnedFd, windows: &Windows) -> Answer {
        while self.heard.len() < OFFER {
            match self.hear(socket) {
                Ok(0) => return Answer::End,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Answer::Wait,
                Err(_) => return Answer::End,
            }
        }
        let capacity = (CAPACITY as u64).to_le_bytes();
        if self.heard[..7] != MARKER || self.heard[8..] != capacity {
            return Answer::Bad("it offered something that is not a shared window of this version".into());
        }
        match (self.own.take(), self.file.take()) {
            _ if self.heard[7] == 0 => Answer::Agreed(None),
            (None, _) => Answer::Agreed(None),
            // Something between the two takes descriptors away: this join fails, and the next one goes without.
            (Some(_), None) => {
                let why = "its shared window came without a descriptor";
                windows.give_up(&why);
                Answer::Bad(why.into())
            }
            (Some(own), Some(file)) => match PeerWindow::open(&file, CAPACITY) {
                Ok(peer) => Answer::Agreed(Some(Ring::new(own, peer))),
                Err(why @ (NoWindow::Unsealed | NoWindow::Size { .. })) => {
                    Answer::Bad(format!("its shared window cannot be trusted: {why}"))
                }
                // The peer counts on it already: as above.
                Err(NoWindow::System(errno)) => {
                    windows.give_up(&errno);
                    Answer::Bad(format!("its shared window cannot be mapped: {errno}"))
                }
            },
        }
    }

    fn hear(&mut self, socket: &OwnedFd) -> Result<usize, Errno> {
        let mut bytes = [0; OFFER];
        let room = &mut bytes[..OFFER - self.heard.len()];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let count = recvmsg(socket, &mut [IoSliceMut::new(room)], &mut control, flags)?.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.file = files.last().or(self.file.take());
            }
        }
        self.heard.extend(&bytes[..count]);
        Ok(count)
    }
}
