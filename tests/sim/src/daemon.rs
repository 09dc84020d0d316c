//! A daemon: the shell around the real engine, its leadership, and what it does with the store.

use crate::Sabotage;
use crate::cluster::{TIMEOUTS, node_name};
use crate::invariants::Fact;
use crate::net::{MS, Peer};
use crate::store::{TTL, Write};
use crate::wish::Wish;
use crate::world::{What, World};
use reknit_engine::{Command, Event, Hold, State, Time, step};
use std::collections::{BTreeMap, VecDeque};

/// The rest of what is known of a write that is not answered.
const WRITE_DEADLINE: u64 = 1_000 * MS;

#[derive(Debug, Default)]
pub(crate) struct Daemon {
    pub(crate) up: bool,
    /// Counts its processes.
    pub(crate) boot: u64,
    pub(crate) frozen_until: Time,
    /// Its clock against true time: ahead by so much, and fast by so many millionths.
    pub(crate) ahead: u64,
    pub(crate) fast: u64,
    pub(crate) leading: Option<Leading>,
    /// What shall happen in the middle of its next orders.
    pub(crate) interrupt: Option<Interrupt>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Interrupt {
    Crash { after: usize, ms: u64 },
    Freeze { after: usize, ms: u64 },
}

impl Daemon {
    /// Whoever waits for it to wake was told of the later of two ends.
    pub(crate) fn freezes(&mut self, until: Time) {
        self.frozen_until = self.frozen_until.max(until);
    }
}

/// One leadership.
#[derive(Debug)]
pub(crate) struct Leading {
    pub(crate) term: u64,
    pub(crate) state: State,
    /// Until when it knows that it leads.
    pub(crate) lease: Time,
    pub(crate) sessions: BTreeMap<Peer, u64>,
    /// The process of each peer that was heard last, and its latest connection.
    latest: BTreeMap<Peer, (u64, u64)>,
    /// With the time at which each came.
    pub(crate) inbox: VecDeque<(Time, Input)>,
    /// Of what is in hand: never backwards.
    at: Time,
    hold: Hold,
    pub(crate) hand: VecDeque<Command>,
    writing: Option<u64>,
}

#[derive(Debug, Clone)]
pub(crate) enum Input {
    Said {
        peer: Peer,
        session: u64,
        event: Event,
    },
    /// From within.
    Told(Event),
    Wish(Wish),
}

impl World {
    pub(crate) fn daemon_sleeps(&self, daemon: usize) -> Option<Time> {
        Some(self.daemons[daemon].frozen_until).filter(|until| *until > self.now)
    }

    pub(crate) fn daemon_boots(&mut self, daemon: usize) {
        let (ahead, fast) = match self.quiet {
            true => (0, 0),
            false => (self.random.below(20_000 * MS), self.random.below(400)),
        };
        let found = &mut self.daemons[daemon];
        if found.up {
            return;
        }
        *found = Daemon { up: true, boot: found.boot + 1, ahead, fast, ..Daemon::default() };
        let boot = found.boot;
        self.at(0, What::WantsLead { daemon, boot });
    }

    pub(crate) fn daemon_dies(&mut self, daemon: usize, ms: u64) {
        self.ends_leading(daemon);
        let found = &mut self.daemons[daemon];
        found.up = false;
        found.frozen_until = Time(0);
        found.interrupt = None;
        self.log(|| format!("daemon {daemon} dies"));
        self.at(ms * MS, What::DaemonBoots(daemon));
    }

    /// It goes back to stand-by.
    pub(crate) fn ends_leading(&mut self, daemon: usize) {
        let Some(leading) = self.daemons[daemon].leading.take() else { return };
        self.log(|| format!("daemon {daemon} leads no more (term {})", leading.term));
        for id in leading.sessions.into_values() {
            self.server_leaves(id);
        }
        let boot = self.daemons[daemon].boot;
        self.at(50 * MS, What::WantsLead { daemon, boot });
    }

    pub(crate) fn starts_leading(&mut self, daemon: usize, term: u64, sent: Time) {
        let jobs = self.store.jobs.values().cloned().collect();
        let incidents = self.store.incidents.values().cloned().collect();
        if term > 1 {
            self.statistics.did("a take-over");
        }
        self.log(|| format!("daemon {daemon} leads, term {term}"));
        let clock = self.clock(daemon);
        self.daemons[daemon].leading = Some(Leading {
            term,
            state: State::new(TIMEOUTS).with_topology(self.cluster.topology.clone()),
            lease: lease_from(sent),
            sessions: BTreeMap::new(),
            latest: BTreeMap::new(),
            inbox: VecDeque::from([(clock, Input::Told(Event::Started { jobs, incidents }))]),
            at: clock,
            hold: Hold::default(),
            hand: VecDeque::new(),
            writing: None,
        });
        self.facts.push(Fact::Leads { term });
        // A story's daemon leads for ever.
        if !self.quiet {
            self.at(0, What::KeepsLease { daemon, term });
        }
        self.pump(daemon);
    }

    /// True time as this daemon's engine sees it; never backwards in one process.
    fn clock(&self, daemon: usize) -> Time {
        let Daemon { ahead, fast, .. } = self.daemons[daemon];
        Time(self.now.0 + ahead + self.now.0 / 1_000_000 * fast)
    }

    /// When its engine wants to be woken, in true time.
    pub(crate) fn next_tick(&self, daemon: usize) -> Option<Time> {
        let found = &self.daemons[daemon];
        let leading = found.leading.as_ref()?;
        let busy = leading.writing.is_some() || !leading.inbox.is_empty();
        if busy || found.frozen_until > self.now {
            return None;
        }
        let wake = leading.hold.wake(leading.state.next_deadline()?);
        let wait = wake.0.saturating_sub(self.clock(daemon).0);
        Some(Time(self.now.0 + wait))
    }

    pub(crate) fn tick(&mut self, daemon: usize) {
        let Some(leading) = &self.daemons[daemon].leading else { return };
        if leading.state.next_deadline().is_some_and(|at| leading.hold.wake(at) > self.clock(daemon)) {
            // The clock is coarser than the engine's: one microsecond more.
            self.now = Time(self.now.0 + 1);
        }
        let clock = self.clock(daemon);
        let Some(leading) = &mut self.daemons[daemon].leading else { return };
        let deadline = leading.state.next_deadline();
        let time = leading.hold.time(clock, leading.at, deadline, clock);
        if deadline.is_some_and(|deadline| deadline <= time) {
            self.puts(daemon, Input::Told(Event::Tick));
            self.pump(daemon);
        }
    }

    /// Behind what has come before.
    pub(crate) fn puts(&mut self, daemon: usize, input: Input) {
        let clock = self.clock(daemon);
        if let Some(leading) = &mut self.daemons[daemon].leading {
            leading.inbox.push_back((clock, input));
        }
    }

    pub(crate) fn daemon_hears(&mut self, daemon: usize, id: u64, peer: Peer, event: Event) {
        let hello = matches!(event, Event::AgentConnected { .. } | Event::WorkerConnected { .. });
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Some(leading) = &mut self.daemons[daemon].leading else {
            // Stand-by, or nobody listens there.
            session.server_open = false;
            self.server_leaves(id);
            return;
        };
        if hello && session.term.is_none() {
            let (instance, connection) = (session.instance, session.connection);
            let known = leading.latest.get(&peer).copied();
            let late = known.is_some_and(|(of, latest)| of == instance && latest > connection);
            let other = known.is_some_and(|(of, _)| of != instance) && leading.sessions.contains_key(&peer);
            if late {
                self.statistics.did("a late hello of a dead connection was refused");
            }
            if other {
                self.statistics.did("a second agent of a node was refused");
            }
            if other || late {
                self.server_leaves(id);
                return;
            }
            leading.latest.insert(peer.clone(), (instance, connection));
            session.term = Some(leading.term);
            session.server_open = true;
            // A newer session replaces an older one without a word to the engine.
            let old = leading.sessions.insert(peer.clone(), id);
            if let Some(old) = old {
                self.server_leaves(old);
            }
            self.send_down(id, crate::net::Order::Welcome);
        }
        self.puts(daemon, Input::Said { peer, session: id, event });
        self.pump(daemon);
    }

    pub(crate) fn daemon_loses(&mut self, daemon: usize, peer: &Peer, id: u64) {
        let Some(leading) = &mut self.daemons[daemon].leading else { return };
        if leading.sessions.get(peer) != Some(&id) {
            return;
        }
        let event = match peer {
            Peer::Agent(node) => Event::AgentDisconnected { node: node_name(*node) },
            Peer::Worker(who) => Event::WorkerDisconnected { job: who.job.clone(), worker: who.key.clone() },
        };
        self.puts(daemon, Input::Said { peer: peer.clone(), session: id, event });
        self.pump(daemon);
    }

    pub(crate) fn planned(&mut self, daemon: usize, term: u64, event: Event) {
        if self.daemons[daemon].leading.as_ref().is_some_and(|found| found.term == term) {
            self.puts(daemon, Input::Told(event));
            self.pump(daemon);
        }
    }

    /// Carries out what is in hand, then takes the next input, until it waits for the store or has nothing to do.
    pub(crate) fn pump(&mut self, daemon: usize) {
        loop {
            if self.daemon_sleeps(daemon).is_some() {
                let thaw = self.daemons[daemon].frozen_until;
                if let Some(leading) = &self.daemons[daemon].leading {
                    let term = leading.term;
                    self.put(thaw, What::Wakes { daemon, term });
                }
                return;
            }
            let clock = self.clock(daemon);
            let found = &mut self.daemons[daemon];
            let Some(leading) = &mut found.leading else { return };
            if leading.writing.is_some() {
                return;
            }
            if let Some(command) = leading.hand.pop_front() {
                if self.interrupted(daemon, &command) {
                    continue;
                }
                self.carry_out(daemon, command);
                continue;
            }
            let Some((came, input)) = leading.inbox.pop_front() else { return };
            leading.at = leading.hold.time(clock, leading.at, leading.state.next_deadline(), came);
            let Some(event) = self.understood(daemon, input) else { continue };
            self.feed(daemon, event);
        }
    }

    /// The event of it, if it still counts.
    fn understood(&mut self, daemon: usize, input: Input) -> Option<Event> {
        let leading = self.daemons[daemon].leading.as_mut()?;
        match input {
            Input::Told(event) => Some(event),
            Input::Said { peer, session, event } => {
                if leading.sessions.get(&peer) != Some(&session) {
                    return None;
                }
                if matches!(event, Event::AgentDisconnected { .. } | Event::WorkerDisconnected { .. }) {
                    leading.sessions.remove(&peer);
                }
                Some(event)
            }
            Input::Wish(wish) => {
                let leading = self.daemons[daemon].leading.as_ref()?;
                self.wish_of(&leading.state, wish)
            }
        }
    }

    fn feed(&mut self, daemon: usize, event: Event) {
        let (now, sabotage) = (self.now, self.sabotage);
        let Some(leading) = &mut self.daemons[daemon].leading else { return };
        let term = leading.term;
        if let Event::Ready { job, worker, epoch, .. } = &event
            && sabotage == Sabotage::ResumeEarly
        {
            let (job, worker, epoch) = (job.clone(), worker.clone(), *epoch);
            leading.hand.push_back(Command::Resume { job, worker, epoch });
        }
        let told = event.clone();
        let commands = step(&mut leading.state, leading.at, event);
        let leads = now < leading.lease || sabotage == Sabotage::NoFencing;
        if leads {
            leading.hand.extend(commands);
        }
        if !matches!(told, Event::Progress { .. } | Event::Alive { .. } | Event::Committed { .. }) {
            self.log(|| format!("d{daemon} -> {told:?}"));
        }
        self.facts.push(Fact::Heard { term, event: told });
        if !leads {
            self.ends_leading(daemon);
        }
    }

    pub(crate) fn wakes(&mut self, daemon: usize, term: u64) {
        if self.daemons[daemon].leading.as_ref().is_some_and(|found| found.term == term) {
            self.pump(daemon);
        }
    }

    /// Whether something befell the daemon instead.
    fn interrupted(&mut self, daemon: usize, command: &Command) -> bool {
        let found = &mut self.daemons[daemon];
        let left = match &mut found.interrupt {
            None => return false,
            Some(Interrupt::Crash { after, .. } | Interrupt::Freeze { after, .. }) => after,
        };
        if *left > 0 {
            *left -= 1;
            return false;
        }
        match found.interrupt.take() {
            Some(Interrupt::Crash { ms, .. }) => {
                self.statistics.happened("leader crashed amid its orders");
                match self.quiet {
                    true => self.restart_daemon(),
                    false => self.daemon_dies(daemon, ms),
                }
            }
            Some(Interrupt::Freeze { ms, .. }) => {
                self.statistics.happened("leader frozen amid its orders");
                found.freezes(Time(self.now.0 + ms * MS));
                if let Some(leading) = &mut found.leading {
                    leading.hand.push_front(command.clone());
                }
            }
            None => return false,
        }
        true
    }

    /// A write is under way; nothing else is done before its answer.
    pub(crate) fn write(&mut self, daemon: usize, write: Write) {
        if self.quiet {
            return self.takes(self.store.revision, write);
        }
        self.sequence += 1;
        let number = self.sequence;
        let Some(leading) = &mut self.daemons[daemon].leading else { return };
        leading.writing = Some(number);
        let term = leading.term;
        let wait = self.store_delay();
        self.at(wait, What::Writes { daemon, term, number, write });
        self.at(WRITE_DEADLINE, What::WriteIsLate { daemon, term, number });
    }

    pub(crate) fn written(&mut self, daemon: usize, term: u64, number: u64, taken: bool) {
        let Some(leading) = &mut self.daemons[daemon].leading else { return };
        if leading.term != term || leading.writing != Some(number) {
            return;
        }
        leading.writing = None;
        if taken {
            self.pump(daemon);
        } else {
            self.ends_leading(daemon);
        }
    }

    pub(crate) fn write_is_late(&mut self, daemon: usize, term: u64, number: u64) {
        self.written(daemon, term, number, false);
    }
}

/// A margin for the two clocks that count it.
pub(crate) fn lease_from(sent: Time) -> Time {
    Time(sent.0 + TTL - TTL / 20)
}
