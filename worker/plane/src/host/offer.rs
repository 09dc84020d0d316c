//! Two ranks of one node that have proven themselves pass each other a window, or say that they have none.

use super::life::{Life, Sign};
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
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::warn;

/// The marker, whether a window comes with it, the ring's capacity, and which sign of life is the peer's.
pub(super) const OFFER: usize = 24;
const MARKER: [u8; 7] = *b"window\0";
const NO_SIGN: u64 = u64::MAX;

/// What two ranks that share memory have of each other.
#[derive(Debug)]
pub(super) struct Near {
    pub(super) ring: Ring,
    /// The peer's.
    pub(super) sign: Option<Arc<Sign>>,
    /// This rank's, for this peer.
    _given: Option<Given>,
}

#[derive(Debug)]
struct Given {
    life: Arc<Life>,
    slot: usize,
}

impl Drop for Given {
    fn drop(&mut self) {
        self.life.take_back(self.slot);
    }
}

/// Whether a plane makes windows.
#[derive(Debug)]
pub(super) struct Windows {
    wanted: AtomicBool,
    /// Without it, deaths are seen later.
    life: Option<Arc<Life>>,
}

impl Windows {
    pub(super) fn new(wanted: bool, life: Option<Arc<Life>>) -> Windows {
        Windows { wanted: AtomicBool::new(wanted), life }
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
        let life = self.life.as_ref().filter(|_| made.is_some());
        let given = life.and_then(|life| Some(Given { slot: life.give()?, life: Arc::clone(life) }));
        let slot = given.as_ref().map_or(NO_SIGN, |given| given.slot as u64);
        let mut bytes = [0; OFFER];
        bytes[..7].copy_from_slice(&MARKER);
        bytes[7] = made.is_some().into();
        bytes[8..16].copy_from_slice(&(CAPACITY as u64).to_le_bytes());
        bytes[16..].copy_from_slice(&slot.to_le_bytes());
        let mut files: Vec<_> = made.iter().map(|(_, file)| file.as_fd()).collect();
        files.extend(given.as_ref().map(|given| given.life.file()));
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return None;
        }
        let sent = sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
        // So short a message goes out at once and whole, or the socket is of no use.
        (sent == Ok(OFFER)).then(|| Offered {
            own: made.map(|(window, _)| window),
            given,
            heard: Vec::new(),
            files: Vec::new(),
        })
    }
}

/// This rank's offer is out; the peer's comes in.
#[derive(Debug)]
pub(super) struct Offered {
    own: Option<OwnWindow>,
    given: Option<Given>,
    heard: Vec<u8>,
    files: Vec<OwnedFd>,
}

#[derive(Debug)]
pub(super) enum Answer {
    /// Not all of it is there.
    Wait,
    /// The peer is gone.
    End,
    /// `None` when one of the two has no window.
    Agreed(Option<Box<Near>>),
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
        if self.heard[..7] != MARKER || self.heard[8..16] != capacity {
            return Answer::Bad("it offered something that is not a shared window of this version".into());
        }
        let mut files = self.files.drain(..);
        match (self.own.take(), files.next()) {
            _ if self.heard[7] == 0 => Answer::Agreed(None),
            (None, _) => Answer::Agreed(None),
            // Something between the two takes descriptors away: this join fails, and the next one goes without.
            (Some(_), None) => {
                let why = "its shared window came without a descriptor";
                windows.give_up(&why);
                Answer::Bad(why.into())
            }
            (Some(own), Some(file)) => match PeerWindow::open(&file, CAPACITY) {
                Ok(peer) => {
                    let mut slot = [0; 8];
                    slot.copy_from_slice(&self.heard[16..]);
                    let slot = usize::try_from(u64::from_le_bytes(slot)).ok();
                    let sign = slot.zip(files.next()).and_then(|(slot, file)| Sign::open(file, slot));
                    let (ring, sign, _given) = (Ring::new(own, peer), sign.map(Arc::new), self.given.take());
                    Answer::Agreed(Some(Box::new(Near { ring, sign, _given })))
                }
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
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let count = recvmsg(socket, &mut [IoSliceMut::new(room)], &mut control, flags)?.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files);
            }
        }
        self.heard.extend(&bytes[..count]);
        Ok(count)
    }
}
