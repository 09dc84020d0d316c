//! The one thread of a plane that moves data: an event loop that owns the sockets of all groups.

use super::HostError;
use super::member::{Member, Parting, Turn};
use super::running::Task;
use super::work::{End, Slot, lock};
use crate::{AbortReason, Buffer};
use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Epoll's word for the mailbox; every other word is a group's number and a rank.
const MAILBOX: u64 = u64::MAX;
const RANK_BITS: u32 = 16;
/// Events taken per call.
const EVENTS: usize = 64;
/// How long a plane that is dropped goes on telling peers that it leaves.
const STOP_LINGER: Duration = Duration::from_millis(250);

/// A rank must fit into an epoll word beside the group's number.
pub(super) const MAX_SIZE: usize = 1 << RANK_BITS;

#[derive(Debug)]
pub(super) enum Command {
    Adopt(Box<Member>),
    Submit(u64, Task),
    /// The reason stands in what the group shares.
    Abort(u64),
    Retire(u64, Arc<Slot>),
    Stop,
}

/// The engine takes no commands any more.
#[derive(Debug)]
pub(super) struct Ended;

/// How the other threads speak to the engine.
#[derive(Debug)]
pub(super) struct Mailbox {
    /// `None` once the engine has ended.
    commands: Mutex<Option<Vec<Command>>>,
    wake: OwnedFd,
    ids: AtomicU64,
}

impl Mailbox {
    pub(super) fn new() -> Result<Mailbox, HostError> {
        Ok(Mailbox { commands: Mutex::new(Some(Vec::new())), wake: bell()?, ids: AtomicU64::new(0) })
    }

    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn post(&self, command: Command) -> Result<(), Ended> {
        let mut commands = lock(&self.commands);
        let Some(queue) = commands.as_mut() else {
            return Err(Ended);
        };
        queue.push(command);
        if queue.len() == 1 {
            ring(&self.wake);
        }
        Ok(())
    }

    pub(super) fn abort(&self, id: u64) {
        // An engine that has ended has failed all its groups already.
        let _ = self.post(Command::Abort(id));
    }

    fn collect(&self, into: &mut Vec<Command>) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        if let Some(queue) = lock(&self.commands).as_mut() {
            into.append(queue);
        }
    }

    fn close(&self) -> Vec<Command> {
        lock(&self.commands).take().unwrap_or_default()
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

#[derive(Debug)]
enum Room {
    Open(Box<Member>),
    Parting(Parting),
}

#[derive(Debug)]
pub(super) struct Engine {
    mailbox: Arc<Mailbox>,
    epoll: OwnedFd,
    rooms: BTreeMap<u64, Room>,
    /// Groups with something to do at once.
    busy: BTreeSet<u64>,
    stopping: bool,
}

impl Engine {
    pub(super) fn new(mailbox: &Arc<Mailbox>) -> Result<Engine, HostError> {
        let failed = |errno| HostError::system("create an epoll instance", errno);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let data = epoll::EventData::new_u64(MAILBOX);
        epoll::add(&epoll, &mailbox.wake, data, epoll::EventFlags::IN).map_err(failed)?;
        Ok(Engine {
            mailbox: Arc::clone(mailbox),
            epoll,
            rooms: BTreeMap::new(),
            busy: BTreeSet::new(),
            stopping: false,
        })
    }

    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        let mut commands = Vec::new();
        while !(self.stopping && self.rooms.is_empty()) {
            let timeout = self.patience().map(timespec);
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                // The descriptors are this engine's own: only a lack of kernel memory is left.
                Err(_) => break,
            }
            for event in &events {
                let (word, flags) = (event.data.u64(), event.flags);
                if word == MAILBOX {
                    self.mailbox.collect(&mut commands);
                } else {
                    self.notice(word, flags);
                }
            }
            for command in commands.drain(..) {
                self.obey(command);
            }
            self.work(Instant::now());
        }
        self.end();
    }

    /// How long nothing happens by itself.
    fn patience(&self) -> Option<Duration> {
        if !self.busy.is_empty() {
            return Some(Duration::ZERO);
        }
        let next = self.rooms.values().filter_map(|room| match room {
            Room::Open(member) => member.next_deadline(),
            Room::Parting(parting) => Some(parting.until),
        });
        Some(next.min()?.saturating_duration_since(Instant::now()))
    }

    fn notice(&mut self, word: u64, flags: epoll::EventFlags) {
        use epoll::EventFlags as Flags;
        let id = word >> RANK_BITS;
        let rank = (word & (MAX_SIZE as u64 - 1)) as usize;
        let link = match self.rooms.get_mut(&id) {
            Some(Room::Open(member)) => member.link(rank),
            Some(Room::Parting(parting)) => parting.link(rank),
            None => None,
        };
        if let Some(link) = link {
            link.notice(
                flags.contains(Flags::IN),
                flags.contains(Flags::OUT),
                flags.intersects(Flags::RDHUP | Flags::HUP | Flags::ERR),
            );
            self.busy.insert(id);
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Adopt(member) => self.adopt(member),
            Command::Submit(id, task) => match self.rooms.get_mut(&id) {
                Some(Room::Open(member)) => {
                    member.submit(task);
                    self.busy.insert(id);
                }
                // The submitter looks for the group's error first; this one came in between.
                Some(Room::Parting(_)) | None => task.slot.set(End::Failed),
            },
            Command::Abort(id) => {
                self.busy.insert(id);
            }
            Command::Retire(id, told) => match self.rooms.get_mut(&id) {
                Some(Room::Open(member)) => {
                    member.retire(told);
                    self.busy.insert(id);
                }
                Some(Room::Parting(_)) | None => told.set(End::Done(Buffer::empty())),
            },
            Command::Stop => {
                self.stopping = true;
                for room in self.rooms.values_mut() {
                    match room {
                        Room::Open(member) => {
                            let shared = member.shared();
                            shared.fail(shared.aborted(AbortReason::Leaving));
                        }
                        Room::Parting(parting) => {
                            parting.until = parting.until.min(Instant::now() + STOP_LINGER);
                        }
                    }
                }
                self.busy.extend(self.rooms.keys());
            }
        }
    }

    fn adopt(&mut self, member: Box<Member>) {
        use epoll::EventFlags as Flags;
        let id = member.shared().id;
        for (rank, link) in member.links() {
            let data = epoll::EventData::new_u64(id << RANK_BITS | rank as u64);
            let flags = Flags::IN | Flags::OUT | Flags::RDHUP | Flags::ET;
            if let Err(errno) = epoll::add(&self.epoll, link.socket(), data, flags) {
                let shared = member.shared();
                shared.fail(shared.io(format!("cannot watch the socket of rank {rank}: {errno}")));
            }
        }
        self.rooms.insert(id, Room::Open(member));
        self.busy.insert(id);
    }

    fn work(&mut self, now: Instant) {
        self.busy.extend(self.rooms.iter().filter_map(|(id, room)| {
            let due = match room {
                Room::Open(member) => member.next_deadline(),
                Room::Parting(parting) => Some(parting.until),
            };
            due.is_some_and(|due| due <= now).then_some(*id)
        }));
        for id in std::mem::take(&mut self.busy) {
            let Some(room) = self.rooms.remove(&id) else {
                continue;
            };
            if let Some(room) = self.turn(id, room, now) {
                self.rooms.insert(id, room);
            }
        }
    }

    fn turn(&mut self, id: u64, room: Room, now: Instant) -> Option<Room> {
        let mut parting = match room {
            Room::Open(mut member) => match member.turn(now) {
                Turn::Idle => return Some(Room::Open(member)),
                Turn::More => {
                    self.busy.insert(id);
                    return Some(Room::Open(member));
                }
                Turn::Retired => member.say_goodbye(now),
                Turn::Failed(error) => {
                    let error = member.shared().fail(error);
                    member.fail(&error, now)
                }
            },
            Room::Parting(parting) => parting,
        };
        if self.stopping {
            parting.until = parting.until.min(now + STOP_LINGER);
        }
        (!parting.turn(now)).then_some(Room::Parting(parting))
    }

    /// Whoever still speaks to the engine hears that it is gone.
    fn end(self) {
        for command in self.mailbox.close() {
            match command {
                Command::Adopt(member) => {
                    let shared = member.shared();
                    shared.fail(shared.aborted(AbortReason::Leaving));
                }
                Command::Submit(_, task) => task.slot.set(End::Failed),
                Command::Retire(_, told) => told.set(End::Done(Buffer::empty())),
                Command::Abort(_) | Command::Stop => {}
            }
        }
        for room in self.rooms.into_values() {
            if let Room::Open(member) = room {
                let shared = Arc::clone(member.shared());
                let error = shared.fail(shared.aborted(AbortReason::Leaving));
                drop(member.fail(&error, Instant::now()));
            }
        }
    }
}
