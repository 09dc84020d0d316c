//! The network: sessions that keep their order, and cuts in each direction.

use crate::Fault;
use crate::cluster::Who;
use crate::world::{What, World};
use reknit_engine::{Command, Event, Time};

pub const MS: u64 = 1_000;
/// An end that hears nothing for two of these gives the session up.
const KEEP_ALIVE: u64 = 400 * MS;

/// Something that can be cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Site {
    Daemon(usize),
    Store,
    Agent(usize),
    Gpu(usize),
}

/// Who opens sessions with a daemon.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Peer {
    Agent(usize),
    Worker(Who),
}

#[derive(Debug, Clone)]
pub(crate) struct Session {
    pub(crate) peer: Peer,
    pub(crate) daemon: usize,
    /// The client's process, and how many connections it opened before this one.
    pub(crate) instance: u64,
    pub(crate) connection: u64,
    /// Of the leadership that took it; `None` before.
    pub(crate) term: Option<u64>,
    pub(crate) client_open: bool,
    pub(crate) server_open: bool,
    /// When the last message in each direction arrives: none overtakes it.
    up: Time,
    down: Time,
    strikes: u32,
}

#[derive(Debug, Clone)]
pub(crate) enum Order {
    Welcome,
    Command(Box<Command>),
}

impl World {
    /// Until when nothing gets from one to the other, if so.
    pub(crate) fn cut(&self, from: Site, to: Site) -> Option<Time> {
        self.cuts.get(&(from, to)).copied().filter(|until| *until > self.now)
    }

    pub(crate) fn some_delay(&mut self) -> u64 {
        200 + self.random.below(2_000)
    }

    pub(crate) fn site(&self, who: &Who) -> Site {
        Site::Gpu(self.gpu_number(&who.key.gpu))
    }

    pub(crate) fn open_session(
        &mut self,
        peer: Peer,
        daemon: usize,
        (instance, connection): (u64, u64),
        hello: Event,
    ) -> u64 {
        self.sequence += 1;
        let id = self.sequence;
        // Now and then the first packets are lost and sent again: a later connection may be there first.
        let slow = self.rough() && self.random.below(16) == 0;
        let late = if slow { self.random.below(1_500 * MS) } else { 0 };
        if slow {
            self.statistics.happened("connection slow");
            match &peer {
                Peer::Agent(node) => self.harms(&Fault::BreakAgentSession { node: *node }),
                Peer::Worker(who) => {
                    let gpu = self.gpu_number(&who.key.gpu);
                    self.harms(&Fault::BreakWorkerSession { gpu });
                }
            }
        }
        let session = Session {
            peer,
            daemon,
            instance,
            connection,
            term: None,
            client_open: true,
            server_open: false,
            up: Time(self.now.0 + late),
            down: Time(0),
            strikes: 0,
        };
        self.sessions.insert(id, session);
        self.send_up(id, hello);
        self.at(KEEP_ALIVE, What::CheckSession(id));
        id
    }

    pub(crate) fn send_up(&mut self, id: u64, event: Event) {
        let delay = self.some_delay();
        let now = self.now;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.up = session.up.max(Time(now.0 + delay));
        let at = session.up;
        self.put(at, What::Up(id, event));
    }

    pub(crate) fn send_down(&mut self, id: u64, order: Order) {
        let delay = self.some_delay();
        let now = self.now;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.down = session.down.max(Time(now.0 + delay));
        let at = session.down;
        self.put(at, What::Down(id, order));
    }

    pub(crate) fn site_of(&self, peer: &Peer) -> Site {
        match peer {
            Peer::Agent(node) => Site::Agent(*node),
            Peer::Worker(who) => self.site(who),
        }
    }

    /// The client's end is closed; the daemon learns of it if it can be reached.
    pub(crate) fn client_leaves(&mut self, id: u64) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.client_open = false;
            let wait = self.some_delay();
            self.at(wait, What::ServerNotices(id));
        }
    }

    /// The daemon's end is closed; the client learns of it if it can be reached.
    pub(crate) fn server_leaves(&mut self, id: u64) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.server_open = false;
            let wait = self.some_delay();
            self.at(wait, What::ClientNotices(id));
        }
    }

    pub(crate) fn server_notices(&mut self, id: u64, surely: bool) {
        let Some(session) = self.sessions.get(&id) else { return };
        let (peer, daemon) = (session.peer.clone(), session.daemon);
        if !surely && self.cut(self.site_of(&peer), Site::Daemon(daemon)).is_some() {
            return; // Its keep-alive will tell.
        }
        if let Some(thaw) = self.daemon_sleeps(daemon) {
            self.put(thaw, What::ServerNotices(id));
            return;
        }
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if std::mem::take(&mut session.server_open) {
            self.daemon_loses(daemon, &peer, id);
        }
    }

    pub(crate) fn client_notices(&mut self, id: u64, surely: bool) {
        let Some(session) = self.sessions.get(&id) else { return };
        let (peer, daemon) = (session.peer.clone(), session.daemon);
        if !surely && self.cut(Site::Daemon(daemon), self.site_of(&peer)).is_some() {
            return;
        }
        if let Some(thaw) = self.peer_sleeps(&peer) {
            self.put(thaw, What::ClientNotices(id));
            return;
        }
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if std::mem::take(&mut session.client_open) {
            self.peer_loses(&peer, id);
        }
    }

    /// Each end asks whether the other is there.
    pub(crate) fn check_session(&mut self, id: u64) {
        let Some(session) = self.sessions.get(&id) else { return };
        let (site, daemon) = (self.site_of(&session.peer), session.daemon);
        let torn = self.cut(site, Site::Daemon(daemon)).is_some()
            || self.cut(Site::Daemon(daemon), site).is_some()
            || self.daemon_sleeps(daemon).is_some()
            || self.peer_sleeps(&session.peer).is_some()
            || !session.client_open
            || !session.server_open;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if !session.client_open && !session.server_open {
            self.sessions.remove(&id);
            return;
        }
        session.strikes = if torn { session.strikes + 1 } else { 0 };
        // A connection that nobody has answered is given up sooner.
        let patience = if session.term.is_some() { 2 } else { 1 };
        if session.strikes >= patience {
            let late = self.random.below(300 * MS);
            self.at(late, What::ServerGivesUp(id));
            self.client_notices(id, true);
        }
        let jitter = self.random.below(50 * MS);
        self.at(KEEP_ALIVE + jitter, What::CheckSession(id));
    }

    pub(crate) fn deliver_up(&mut self, id: u64, event: Event) {
        let Some(session) = self.sessions.get(&id) else { return };
        let (peer, daemon) = (session.peer.clone(), session.daemon);
        if let Some(until) = self.cut(self.site_of(&peer), Site::Daemon(daemon)) {
            self.delay_up(id, until, What::Up(id, event));
        } else if let Some(thaw) = self.daemon_sleeps(daemon) {
            self.delay_up(id, thaw, What::Up(id, event));
        } else {
            self.daemon_hears(daemon, id, peer, event);
        }
    }

    fn delay_up(&mut self, id: u64, until: Time, what: What) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.up = session.up.max(until);
        }
        self.put(until, what);
    }

    pub(crate) fn deliver_down(&mut self, id: u64, order: Order) {
        let Some(session) = self.sessions.get(&id) else { return };
        let (peer, daemon, term) = (session.peer.clone(), session.daemon, session.term);
        if !session.client_open {
            return;
        }
        let held = self.cut(Site::Daemon(daemon), self.site_of(&peer)).or_else(|| self.peer_sleeps(&peer));
        if let Some(until) = held {
            if let Some(session) = self.sessions.get_mut(&id) {
                session.down = session.down.max(until);
            }
            self.put(until, What::Down(id, order));
            return;
        }
        match order {
            Order::Welcome => self.welcomed(&peer, id, term.unwrap_or_default()),
            Order::Command(command) => self.peer_obeys(&peer, term.unwrap_or_default(), *command),
        }
    }
}
