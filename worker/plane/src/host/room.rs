//! A group's place in its plane. Whoever holds its lock may move its data: the engine, or the thread that waits for an
//! operation and has nothing better to do (its *driver*), which saves the way through the engine and back.

use super::HostError;
use super::hub::{Hub, bell, ring, timespec};
use super::life::Sign;
use super::link::Link;
use super::meeting::{Meeting, Parting, Turn};
use super::memory::Lending;
use super::ring::Ring;
use super::running::Task;
use super::work::{End, Shared, Slot, lock};
use crate::{AbortReason, Buffer};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Epoll's word for the bell; every other word is a rank.
const BELL: u64 = u64::MAX;
/// Events taken per call.
const EVENTS: usize = 64;
/// How long a driver looks for news before it sleeps, if its node has a core for each rank: about what falling asleep
/// and waking up costs. It keeps the core: whoever yields it may not get it back for milliseconds.
const SPIN: Duration = Duration::from_micros(30);
/// How long a plane that is dropped goes on telling peers that it leaves.
const STOP_LINGER: Duration = Duration::from_millis(250);

/// What is left to do in a room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing until the next event.
    Idle,
    /// There may be more at once.
    More,
    /// Nothing ever again.
    Over,
}

#[derive(Debug)]
enum Phase {
    Open(Box<Meeting>),
    Parting(Box<Parting>),
    Over,
}

#[derive(Debug)]
struct Inside {
    phase: Phase,
    /// The engine does not hear of events: it would only get in the way of the driver.
    unwatched: bool,
    stopping: bool,
}

#[derive(Debug)]
pub(super) struct Room {
    pub(super) shared: Arc<Shared>,
    hub: Arc<Hub>,
    /// Submitted and not seen yet by who moves the data.
    inbox: Mutex<Vec<Task>>,
    inside: Mutex<Inside>,
    /// A waiting thread moves the data and hears of all events, or is about to: the engine leaves the group to it. Given up
    /// under the lock of what is inside, and taken without: whoever has that lock shall not keep it.
    driven: AtomicBool,
    spin: Duration,
    /// Readable when the bell was rung or a socket has news.
    pub(super) epoll: OwnedFd,
    bell: OwnedFd,
}

impl Room {
    pub(super) fn new(
        hub: &Arc<Hub>,
        shared: &Arc<Shared>,
        links: Vec<Option<Link>>,
    ) -> Result<Room, HostError> {
        use epoll::EventFlags as Flags;
        let failed = |errno| HostError::system("watch a group's sockets", errno);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let bell = bell()?;
        let meeting = Meeting::new(Arc::clone(shared), links);
        epoll::add(&epoll, &bell, epoll::EventData::new_u64(BELL), Flags::IN | Flags::ET).map_err(failed)?;
        for (rank, link) in meeting.links() {
            let flags = Flags::IN | Flags::OUT | Flags::RDHUP | Flags::ET;
            let data = epoll::EventData::new_u64(rank as u64);
            epoll::add(&epoll, link.wire.socket(), data, flags).map_err(failed)?;
        }
        // How many ranks of this group share this machine's cores.
        let neighbours = meeting.links().filter(|(_, link)| link.wire.is_local()).count();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = if neighbours < cores { SPIN } else { Duration::ZERO };
        Ok(Room {
            shared: Arc::clone(shared),
            hub: Arc::clone(hub),
            inbox: Mutex::default(),
            inside: Mutex::new(Inside {
                phase: Phase::Open(Box::new(meeting)),
                unwatched: false,
                stopping: false,
            }),
            driven: AtomicBool::new(false),
            spin,
            epoll,
            bell,
        })
    }

    /// Wakes whoever moves the data.
    pub(super) fn ring(&self) {
        ring(&self.bell);
    }

    /// Begins the operation as far as it goes at once, if nobody else moves the group's data just now.
    pub(super) fn submit(&self, task: Task) {
        self.hub.alarm(task.deadline);
        lock(&self.inbox).push(task);
        if let Ok(mut inside) = self.inside.try_lock()
            && !self.is_driven()
            && self.advance(&mut inside, None) == State::Idle
            && self.sleep(&mut inside)
        {
            return;
        }
        self.ring();
    }

    pub(super) fn retire(&self, told: Arc<Slot>) {
        match &mut lock(&self.inside).phase {
            Phase::Open(meeting) => meeting.retire(told),
            Phase::Parting(_) | Phase::Over => told.set(End::Done(Buffer::empty())),
        }
        self.ring();
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let inbox = lock(&self.inbox).iter().map(|task| task.deadline).min();
        let inside = lock(&self.inside).next_deadline();
        inbox.into_iter().chain(inside).min()
    }

    /// A turn by the engine.
    pub(super) fn serve(&self) -> State {
        let mut inside = lock(&self.inside);
        if self.is_driven() {
            self.unwatch(&mut inside);
            return State::Idle;
        }
        self.collect(&mut inside, &mut Vec::with_capacity(EVENTS));
        let state = self.advance(&mut inside, None);
        match state {
            State::Idle if !self.sleep(&mut inside) => State::More,
            // Who has begun to drive meanwhile goes on.
            State::More if self.is_driven() => State::Idle,
            State::Idle | State::More | State::Over => state,
        }
    }

    /// Moves the group's data until the operation of `slot` has ended, or `until`. False at once when another thread
    /// does it already.
    ///
    /// An operation with lent memory moves here only, and has ended when this returns true, whatever `until` says.
    pub(super) fn drive(&self, slot: &Slot, until: Instant, mut lent: Lending<'_, '_>) -> bool {
        if self.driven.swap(true, Ordering::Relaxed) {
            return false;
        }
        let _steps_back = Driver(self);
        let mut inside = lock(&self.inside);
        inside.wake();
        let mut events = Vec::with_capacity(EVENTS);
        let mut spin_until = None;
        let state = loop {
            let state = self.advance(&mut inside, lent.as_deref_mut());
            let now = Instant::now();
            if slot.is_set() || state == State::Over || (now >= until && lent.is_none()) {
                break state;
            }
            if state == State::More {
                spin_until = None;
            } else if now < *spin_until.get_or_insert(now + self.spin) {
                let look = inside.has_plain_sockets();
                if look {
                    self.unwatch(&mut inside);
                }
                drop(inside);
                std::hint::spin_loop();
                inside = lock(&self.inside);
                if look {
                    self.collect(&mut inside, &mut events);
                }
            } else {
                self.unwatch(&mut inside);
                if self.sleep(&mut inside) {
                    let until = inside.next_deadline().map_or(until, |next| next.min(until));
                    drop(inside);
                    self.wait(&mut events, until.saturating_duration_since(now));
                    inside = lock(&self.inside);
                    inside.notice(&events);
                }
                inside.wake();
                spin_until = None;
            }
        };
        self.step_back(&mut inside, state);
        true
    }

    /// The engine has the group again.
    fn step_back(&self, inside: &mut Inside, state: State) {
        self.driven.store(false, Ordering::Relaxed);
        if state == State::More || !self.sleep(inside) || state == State::Over {
            self.ring();
        }
        if std::mem::take(&mut inside.unwatched) {
            let _ = self.hub.watch(self, true);
        }
    }

    fn is_driven(&self) -> bool {
        self.driven.load(Ordering::Relaxed)
    }

    /// From now on until the driver is done. Only once it looks for events: an operation often ends before that, and each
    /// change costs a system call. Failing that, the engine gets in the way.
    fn unwatch(&self, inside: &mut Inside) {
        if !inside.unwatched {
            inside.unwatched = true;
            let _ = self.hub.watch(self, false);
        }
    }

    /// The sign of life of this rank is over.
    pub(super) fn lose(&self, rank: usize) {
        if let Some(link) = lock(&self.inside).link(rank) {
            link.wire.lose();
        }
        self.ring();
    }

    /// The signs of life of those that give one.
    pub(super) fn signs(&self) -> Vec<(usize, Arc<Sign>)> {
        match &lock(&self.inside).phase {
            Phase::Open(meeting) => meeting
                .links()
                .filter_map(|(rank, link)| Some((rank, Arc::clone(link.wire.sign()?))))
                .collect(),
            Phase::Parting(_) | Phase::Over => Vec::new(),
        }
    }

    /// The plane is being dropped.
    pub(super) fn close_soon(&self, now: Instant) {
        let mut inside = lock(&self.inside);
        inside.stopping = true;
        match &mut inside.phase {
            Phase::Open(_) => {
                self.shared.fail(self.shared.aborted(AbortReason::Leaving));
            }
            Phase::Parting(parting) => parting.until = parting.until.min(now + STOP_LINGER),
            Phase::Over => {}
        }
        self.ring();
    }

    /// The engine has ended: nobody speaks to the peers any more.
    pub(super) fn end(&self) {
        self.shared.fail(self.shared.aborted(AbortReason::Leaving));
        let mut inside = lock(&self.inside);
        self.advance(&mut inside, None);
        inside.phase = Phase::Over;
    }

    fn wait(&self, events: &mut Vec<epoll::Event>, timeout: Duration) {
        events.clear();
        match epoll::wait(&self.epoll, spare_capacity(events), Some(&timespec(timeout))) {
            Ok(_) | Err(Errno::INTR) => {}
            // A lack of kernel memory: the group is of no use any more.
            Err(errno) => {
                self.shared.fail(self.shared.io(format!("cannot wait for the peers: {errno}")));
            }
        }
    }

    fn collect(&self, inside: &mut Inside, events: &mut Vec<epoll::Event>) {
        self.wait(events, Duration::ZERO);
        inside.notice(events);
        inside.wake();
    }

    /// One turn of the group.
    fn advance(&self, inside: &mut Inside, mut lent: Lending<'_, '_>) -> State {
        let tasks = std::mem::take(&mut *lock(&self.inbox));
        let now = Instant::now();
        if let Phase::Open(meeting) = &mut inside.phase {
            for task in tasks {
                meeting.submit(task);
            }
        } else {
            for task in tasks {
                task.slot.set(End::Failed);
            }
        }
        let mut parting = match std::mem::replace(&mut inside.phase, Phase::Over) {
            Phase::Open(mut meeting) => match meeting.turn(now, lent.as_deref_mut()) {
                Turn::Idle => {
                    inside.phase = Phase::Open(meeting);
                    return State::Idle;
                }
                Turn::More => {
                    inside.phase = Phase::Open(meeting);
                    return State::More;
                }
                Turn::Retired => Box::new(meeting.say_goodbye(now)),
                Turn::Failed(error) => {
                    let error = self.shared.fail(error);
                    Box::new(meeting.fail(&error, now, lent))
                }
            },
            Phase::Parting(parting) => parting,
            Phase::Over => return State::Over,
        };
        if inside.stopping {
            parting.until = parting.until.min(now + STOP_LINGER);
        }
        if parting.turn(now) {
            return State::Over;
        }
        self.hub.alarm(parting.until);
        inside.phase = Phase::Parting(parting);
        State::Idle
    }

    /// Before nobody looks at the rings for a while: asks the peers to call. False when something has come already.
    fn sleep(&self, inside: &mut Inside) -> bool {
        inside.doze();
        // With the fence of the peers, who first write and then look whether this rank sleeps.
        fence(Ordering::SeqCst);
        !inside.has_news() && lock(&self.inbox).is_empty()
    }
}

/// The thread that drives. Whoever lends memory may panic in the middle; then nobody would serve the group any more, and
/// its plane could never end.
struct Driver<'a>(&'a Room);

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.step_back(&mut lock(&self.0.inside), State::Over);
        }
    }
}

impl Inside {
    fn notice(&mut self, events: &[epoll::Event]) {
        use epoll::EventFlags as Flags;
        for event in events {
            let (word, flags) = (event.data.u64(), event.flags);
            if word == BELL {
                continue;
            }
            if let Some(link) = self.link(word as usize) {
                link.wire.notice(
                    flags.contains(Flags::IN),
                    flags.contains(Flags::OUT),
                    flags.intersects(Flags::RDHUP | Flags::HUP | Flags::ERR),
                );
            }
        }
    }

    fn link(&mut self, rank: usize) -> Option<&mut Link> {
        match &mut self.phase {
            Phase::Open(meeting) => meeting.link(rank),
            Phase::Parting(parting) => parting.link(rank),
            Phase::Over => None,
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Open(meeting) => meeting.next_deadline(),
            Phase::Parting(parting) => Some(parting.until),
            Phase::Over => None,
        }
    }

    fn doze(&mut self) {
        self.wake();
        match &mut self.phase {
            Phase::Open(meeting) => meeting.doze(),
            Phase::Parting(parting) => parting.doze(),
            Phase::Over => {}
        }
    }

    fn for_each_ring(&mut self, mut look: impl FnMut(Option<&mut Ring>)) {
        match &mut self.phase {
            Phase::Open(meeting) => meeting.links_mut().for_each(|link| look(link.wire.ring())),
            Phase::Parting(parting) => parting.links_mut().for_each(|link| look(link.wire.ring())),
            Phase::Over => {}
        }
    }

    fn has_news(&mut self) -> bool {
        let mut news = false;
        self.for_each_ring(|ring| news |= ring.is_some_and(|ring| ring.has_come()));
        news
    }

    fn wake(&mut self) {
        self.for_each_ring(|ring| ring.into_iter().for_each(Ring::wake));
    }

    fn has_plain_sockets(&mut self) -> bool {
        let mut plain = false;
        self.for_each_ring(|ring| plain |= ring.is_none());
        plain
    }
}
