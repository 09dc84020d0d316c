//! The entrance of a plane: accepts connections, reads their hello, and hands them to the join they are for.
//!
//! What strangers can do is bounded: the number of connections, the bytes and the time each may take.

use super::HostError;
use super::handshake::{Hello, Key, PREFIX, Refusal};
use super::hub::{bell, ring, timespec};
use super::work::lock;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::collections::{HashMap, VecDeque};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Connections that may be saying hello at once. The oldest goes when another comes.
const MAX_STRANGERS: usize = 64;
const HELLO_TIME: Duration = Duration::from_secs(2);
/// Connections that may wait for a join of this rank. The oldest goes when another comes.
const MAX_EARLY: usize = 256;
const EARLY_TIME: Duration = Duration::from_secs(60);
/// After accepting failed, such as for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A connection that said whom it wants, and has proven nothing yet.
#[derive(Debug)]
pub(super) struct Visitor {
    pub(super) socket: OwnedFd,
    pub(super) hello: Hello,
}

impl Visitor {
    pub(super) fn refuse(&self, refusal: Refusal) {
        // The visitor may have gone; then there is nobody to tell.
        let _ = send(&self.socket, &refusal.encode(), SendFlags::NOSIGNAL);
    }
}

#[derive(Debug, Default)]
struct Desks {
    /// Joins that wait, with their visitors.
    waiting: HashMap<Key, (Arc<OwnedFd>, Vec<Visitor>)>,
    /// Visitors that came before their join, oldest first.
    early: VecDeque<(Instant, Visitor)>,
    closed_to: Option<u64>,
    stopping: bool,
}

impl Desks {
    fn closed(&self, epoch: u64) -> bool {
        self.stopping || self.closed_to.is_some_and(|closed| epoch <= closed)
    }

    fn route(&mut self, visitor: Visitor, now: Instant) {
        if self.closed(visitor.hello.key.epoch) {
            visitor.refuse(Refusal::EpochClosed);
        } else if let Some((bell, visitors)) = self.waiting.get_mut(&visitor.hello.key) {
            if visitors.len() >= MAX_EARLY {
                visitor.refuse(Refusal::NotYet);
                return;
            }
            visitors.push(visitor);
            ring(bell);
        } else {
            if self.early.len() >= MAX_EARLY
                && let Some((_, oldest)) = self.early.pop_front()
            {
                oldest.refuse(Refusal::NotYet);
            }
            self.early.push_back((now + EARLY_TIME, visitor));
        }
    }

    fn expire(&mut self, now: Instant) {
        while let Some((until, _)) = self.early.front()
            && *until <= now
        {
            if let Some((_, visitor)) = self.early.pop_front() {
                visitor.refuse(Refusal::NotYet);
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct Lobby {
    desks: Mutex<Desks>,
    wake: OwnedFd,
}

/// A join's place in the lobby, until it is dropped.
#[derive(Debug)]
pub(super) struct Desk<'a> {
    lobby: &'a Lobby,
    key: Key,
    /// Readable when visitors have come or the epoch was closed.
    pub(super) bell: Arc<OwnedFd>,
}

/// Why there is no desk, or no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoDesk {
    EpochClosed,
    Stopping,
    Taken,
}

impl Desk<'_> {
    pub(super) fn visitors(&self) -> Result<Vec<Visitor>, NoDesk> {
        let _ = rustix::io::read(&*self.bell, &mut [0; 8]);
        let mut desks = lock(&self.lobby.desks);
        if desks.stopping {
            return Err(NoDesk::Stopping);
        }
        if desks.closed(self.key.epoch) {
            return Err(NoDesk::EpochClosed);
        }
        let desk = desks.waiting.get_mut(&self.key);
        Ok(desk.map(|(_, visitors)| std::mem::take(visitors)).unwrap_or_default())
    }
}

impl Drop for Desk<'_> {
    fn drop(&mut self) {
        lock(&self.lobby.desks).waiting.remove(&self.key);
    }
}

impl Lobby {
    pub(super) fn new() -> Result<Lobby, HostError> {
        Ok(Lobby { desks: Mutex::default(), wake: bell()? })
    }

    pub(super) fn open(&self, key: &Key, bell: OwnedFd) -> Result<Desk<'_>, NoDesk> {
        let mut desks = lock(&self.desks);
        if desks.stopping {
            return Err(NoDesk::Stopping);
        }
        if desks.closed(key.epoch) {
            return Err(NoDesk::EpochClosed);
        }
        if desks.waiting.contains_key(key) {
            return Err(NoDesk::Taken);
        }
        let bell = Arc::new(bell);
        let mut visitors = Vec::new();
        for (until, visitor) in std::mem::take(&mut desks.early) {
            if visitor.hello.key == *key {
                visitors.push(visitor);
            } else {
                desks.early.push_back((until, visitor));
            }
        }
        ring(&bell);
        desks.waiting.insert(key.clone(), (Arc::clone(&bell), visitors));
        Ok(Desk { lobby: self, key: key.clone(), bell })
    }

    pub(super) fn close_to(&self, epoch: u64) {
        let mut desks = lock(&self.desks);
        desks.closed_to = desks.closed_to.max(Some(epoch));
        for (_, visitor) in std::mem::take(&mut desks.early) {
            // Those of closed epochs are refused on the way.
            desks.route(visitor, Instant::now());
        }
        for (key, (bell, _)) in &desks.waiting {
            if key.epoch <= epoch {
                ring(bell);
            }
        }
    }

    pub(super) fn stop(&self) {
        let mut desks = lock(&self.desks);
        desks.stopping = true;
        for (bell, _) in desks.waiting.values() {
            ring(bell);
        }
        ring(&self.wake);
    }

    /// Runs until [`Lobby::stop`].
    pub(super) fn run(&self, unix: &UnixListener, tcp: &TcpListener) {
        let mut strangers: VecDeque<Stranger> = VecDeque::new();
        let mut paused: Option<Instant> = None;
        while !lock(&self.desks).stopping {
            let now = Instant::now();
            paused = paused.filter(|until| *until > now);
            let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
            fds.extend(strangers.iter().map(|s| PollFd::new(&s.socket, PollFlags::IN)));
            if paused.is_none() {
                fds.push(PollFd::new(unix, PollFlags::IN));
                fds.push(PollFd::new(tcp, PollFlags::IN));
            }
            let next_hello = strangers.front().map(|stranger| stranger.until);
            let next_early = lock(&self.desks).early.front().map(|(until, _)| *until);
            let next = [next_hello, next_early, paused].into_iter().flatten().min();
            let timeout = next.map(|next| timespec(next.saturating_duration_since(now)));
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            let now = Instant::now();
            let mut still = VecDeque::new();
            for (mut stranger, ready) in strangers.into_iter().zip(&ready[1..]) {
                match if *ready { stranger.read() } else { Heard::More } {
                    Heard::More if stranger.until > now => still.push_back(stranger),
                    Heard::More | Heard::Nonsense => {}
                    Heard::Hello(hello) => {
                        let socket = stranger.socket;
                        lock(&self.desks).route(Visitor { socket, hello }, now);
                    }
                }
            }
            strangers = still;
            if paused.is_none() {
                let accepted =
                    accept_all(unix, &mut strangers, now).and_then(|()| accept_all(tcp, &mut strangers, now));
                paused = accepted.err().map(|_| now + ACCEPT_PAUSE);
            }
            lock(&self.desks).expire(now);
        }
    }
}

fn accept_all(listener: impl AsFd, strangers: &mut VecDeque<Stranger>, now: Instant) -> Result<(), Errno> {
    use rustix::net::{SocketFlags, accept_with};
    loop {
        match accept_with(&listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
            Ok(socket) => {
                if strangers.len() >= MAX_STRANGERS {
                    strangers.pop_front();
                }
                strangers.push_back(Stranger { socket, until: now + HELLO_TIME, heard: Vec::new() });
            }
            Err(Errno::AGAIN) => return Ok(()),
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// A connection that has not yet said what it wants.
#[derive(Debug)]
struct Stranger {
    socket: OwnedFd,
    until: Instant,
    heard: Vec<u8>,
}

enum Heard {
    More,
    Nonsense,
    Hello(Hello),
}

impl Stranger {
    /// Never reads beyond the hello: what follows is for the join.
    fn read(&mut self) -> Heard {
        loop {
            let wanted = match self.heard.first_chunk::<PREFIX>() {
                None => PREFIX,
                Some(prefix) => match Hello::body_len(prefix) {
                    Some(len) => PREFIX + len,
                    None => return Heard::Nonsense,
                },
            };
            if self.heard.len() == wanted {
                return match Hello::decode(&self.heard[PREFIX..]) {
                    Some(hello) => Heard::Hello(hello),
                    None => Heard::Nonsense,
                };
            }
            let mut bytes = vec![0; wanted - self.heard.len()];
            match recv(&self.socket, &mut bytes[..], RecvFlags::empty()) {
                Ok((0, _)) => return Heard::Nonsense,
                Ok((count, _)) => self.heard.extend(&bytes[..count]),
                Err(Errno::AGAIN) => return Heard::More,
                Err(Errno::INTR) => {}
                Err(_) => return Heard::Nonsense,
            }
        }
    }
}
