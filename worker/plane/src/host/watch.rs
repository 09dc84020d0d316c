//! The thread of a plane that waits for the end of its peers' signs of life.

use super::life::{Sign, wait};
use super::room::Room;
use super::work::lock;
use rustix::io::Errno;
use rustix::thread::ClockId;
use rustix::thread::futex::{self, WaitFlags, WaitvFlags};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// As many futexes as the kernel waits for at once, without the watch's own. What is beyond is found out by the end of
/// the sockets.
const MOST: usize = 127;

#[derive(Debug)]
struct Watched {
    room: Weak<Room>,
    rank: usize,
    sign: Arc<Sign>,
}

#[derive(Debug, Default)]
pub(super) struct Watch {
    watched: Mutex<Vec<Watched>>,
    /// Counts the changes of what is watched.
    changes: AtomicU32,
    stopping: AtomicBool,
}

impl Watch {
    pub(super) fn add(&self, room: &Arc<Room>, signs: Vec<(usize, Arc<Sign>)>) {
        if signs.is_empty() {
            return;
        }
        let room = Arc::downgrade(room);
        let signs = signs.into_iter();
        lock(&self.watched).extend(signs.map(|(rank, sign)| Watched {
            room: Weak::clone(&room),
            rank,
            sign,
        }));
        self.change();
    }

    /// The room is closed: nothing of it needs to be watched any more.
    pub(super) fn forget(&self, room: &Arc<Room>) {
        lock(&self.watched).retain(|watched| !std::ptr::eq(watched.room.as_ptr(), Arc::as_ptr(room)));
        self.change();
    }

    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.change();
    }

    fn change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        // The one thread of this watch, if it sleeps. It cannot fail on a futex of this process.
        let _ = futex::wake(&self.changes, futex::Flags::PRIVATE, 1);
    }

    /// Runs until [`Watch::stop`], or at once to its end where the kernel is too old (before Linux 5.16).
    pub(super) fn run(&self) {
        while !self.stopping.load(Ordering::Relaxed) {
            let changes = self.changes.load(Ordering::Acquire);
            let (dead, signs) = self.look();
            for Watched { room, rank, .. } in dead {
                if let Some(room) = room.upgrade() {
                    room.lose(rank);
                }
            }
            let own = wait(&self.changes, changes, WaitFlags::SIZE_U32 | WaitFlags::PRIVATE);
            let mut waits = vec![own];
            waits.extend(signs.iter().map(|sign| sign.wait()));
            match futex::waitv(&waits, WaitvFlags::empty(), None, ClockId::Monotonic) {
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }

    /// Takes out who has died; the others' signs, as far as they can be waited for.
    fn look(&self) -> (Vec<Watched>, Vec<Arc<Sign>>) {
        let mut watched = lock(&self.watched);
        let dead = watched.extract_if(.., |watched| watched.sign.is_over()).collect();
        (dead, watched.iter().take(MOST).map(|watched| Arc::clone(&watched.sign)).collect())
    }
}
