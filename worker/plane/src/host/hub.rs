//! Where the threads of a plane meet: its groups, and what wakes the engine.

use super::HostError;
use super::room::Room;
use super::watch::Watch;
use super::work::lock;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Epoll's word for the hub itself; every other word is a group's number.
pub(super) const WAKE: u64 = u64::MAX;

/// The plane takes no groups any more.
#[derive(Debug)]
pub(super) struct Ended;

#[derive(Debug)]
pub(super) struct Hub {
    /// `None` once the engine has ended.
    rooms: Mutex<Option<BTreeMap<u64, Arc<Room>>>>,
    /// Readable when a group that nobody drives has something to do.
    pub(super) epoll: OwnedFd,
    wake: OwnedFd,
    ids: AtomicU64,
    start: Instant,
    /// When the engine looks at all deadlines, in nanoseconds since the start. It moves to a later time only when it
    /// has passed, so that operations which end in time do not wake the engine.
    alarm: AtomicU64,
    stopping: AtomicBool,
    pub(super) watch: Watch,
}

impl Hub {
    pub(super) fn new() -> Result<Hub, HostError> {
        let failed = |errno| HostError::system("create an epoll instance", errno);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let wake = bell()?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, &wake, data, epoll::EventFlags::IN).map_err(failed)?;
        Ok(Hub {
            rooms: Mutex::new(Some(BTreeMap::new())),
            epoll,
            wake,
            ids: AtomicU64::new(0),
            start: Instant::now(),
            alarm: AtomicU64::new(u64::MAX),
            stopping: AtomicBool::new(false),
            watch: Watch::default(),
        })
    }

    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn open(&self, room: &Arc<Room>) -> Result<(), Ended> {
        let mut rooms = lock(&self.rooms);
        let Some(rooms) = rooms.as_mut().filter(|_| !self.stopping()) else {
            return Err(Ended);
        };
        rooms.insert(room.shared.id, Arc::clone(room));
        let data = epoll::EventData::new_u64(room.shared.id);
        if let Err(errno) = epoll::add(&self.epoll, &room.epoll, data, epoll::EventFlags::IN) {
            room.shared.fail(room.shared.io(format!("cannot watch the group: {errno}")));
        }
        self.watch.add(room, room.signs());
        Ok(())
    }

    pub(super) fn room(&self, id: u64) -> Option<Arc<Room>> {
        lock(&self.rooms).as_ref()?.get(&id).cloned()
    }

    pub(super) fn rooms(&self) -> Vec<Arc<Room>> {
        lock(&self.rooms).iter().flat_map(BTreeMap::values).cloned().collect()
    }

    pub(super) fn close(&self, id: u64) {
        if let Some(rooms) = lock(&self.rooms).as_mut()
            && let Some(room) = rooms.remove(&id)
        {
            // What remains of it is closed together with the room.
            let _ = epoll::delete(&self.epoll, &room.epoll);
            self.watch.forget(&room);
        }
    }

    /// The groups that are left, and none after them.
    pub(super) fn end(&self) -> BTreeMap<u64, Arc<Room>> {
        lock(&self.rooms).take().unwrap_or_default()
    }

    /// Whether the engine hears of the group's events, or its driver alone.
    pub(super) fn watch(&self, room: &Room, watched: bool) -> Result<(), Errno> {
        let flags = if watched { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        epoll::modify(&self.epoll, &room.epoll, epoll::EventData::new_u64(room.shared.id), flags)
    }

    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.watch.stop();
        ring(&self.wake);
    }

    pub(super) fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// The engine is to look at the deadlines at this time at the latest.
    pub(super) fn alarm(&self, at: Instant) {
        let at = u64::try_from(at.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX);
        if self.alarm.fetch_min(at, Ordering::Relaxed) > at {
            ring(&self.wake);
        }
    }

    /// How long the engine may sleep for all it knows. `None` when nothing is going to be late.
    pub(super) fn patience(&self, now: Instant) -> Option<Duration> {
        let alarm = self.alarm.load(Ordering::Relaxed);
        let at = Duration::from_nanos(alarm);
        (alarm != u64::MAX).then(|| at.saturating_sub(now.saturating_duration_since(self.start)))
    }

    /// Whether the deadlines are to be looked at, and set the next alarm.
    pub(super) fn alarmed(&self, now: Instant) -> bool {
        let due = self.patience(now) == Some(Duration::ZERO);
        if due {
            self.alarm.store(u64::MAX, Ordering::Relaxed);
        }
        due
    }

    /// The engine has heard that it was woken.
    pub(super) fn hush(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }
}

/// A descriptor that is readable once it was rung.
pub(super) fn bell() -> Result<OwnedFd, HostError> {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
        .map_err(|errno| HostError::system("create an event descriptor", errno))
}

/// Fails only when the counter is full, and then the reader is awake anyway.
pub(super) fn ring(eventfd: &OwnedFd) {
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

/// A timeout as the system calls want it.
pub(super) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
