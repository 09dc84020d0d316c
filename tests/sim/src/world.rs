//! Virtual time: what happens next, and to whom.

use crate::agent::Agent;
use crate::cluster::{DAEMONS, NODES, gpus_of};
use crate::daemon::{Daemon, Wish};
use crate::invariants::{Fact, Invariants};
use crate::memory::Truth;
use crate::net::{MS, Order, Peer, Session, Site};
use crate::outcome::Statistics;
use crate::random::Random;
use crate::store::{Store, Write};
use crate::worker::Worker;
use crate::{Fault, Sabotage, Script};
use reknit_engine::{Event, ExitStatus, Time};
use reknit_layout::{Epoch, GpuId, Step, WorkerKey};
use std::collections::BTreeMap;

/// What happens at a time. Numbers are those of sessions, daemons and nodes.
#[derive(Debug, Clone)]
pub(crate) enum What {
    Up(u64, Event),
    Down(u64, Order),
    ServerNotices(u64),
    ClientNotices(u64),
    ServerGivesUp(u64),
    CheckSession(u64),
    Dials(Peer),

    /// Reaches the store: a campaign, a lease's renewal, a write.
    Campaigns {
        daemon: usize,
        boot: u64,
    },
    Renews {
        daemon: usize,
        term: u64,
        sent: Time,
    },
    Writes {
        daemon: usize,
        term: u64,
        number: u64,
        write: Write,
    },
    /// Its answers.
    Granted {
        daemon: usize,
        boot: u64,
        term: Option<u64>,
        sent: Time,
    },
    Renewed {
        daemon: usize,
        term: u64,
        sent: Time,
        held: bool,
    },
    Written {
        daemon: usize,
        term: u64,
        number: u64,
        taken: bool,
    },
    /// In a daemon.
    WriteIsLate {
        daemon: usize,
        term: u64,
        number: u64,
    },
    WantsLead {
        daemon: usize,
        boot: u64,
    },
    KeepsLease {
        daemon: usize,
        term: u64,
    },
    /// With what it had in hand.
    Wakes {
        daemon: usize,
        term: u64,
    },
    Planned {
        daemon: usize,
        term: u64,
        event: Event,
    },
    Wished {
        wish: Wish,
        tries: u32,
    },

    DaemonBoots(usize),
    AgentBoots(usize),
    ProcessStarts(WorkerKey, usize),
    ProcessEnds(WorkerKey, ExitStatus),
    Prepared(WorkerKey, Epoch, Step),
    Votes(Epoch, Step),
    Commits(WorkerKey, Epoch, Step, bool),
    TimesOut(WorkerKey, Epoch, Step),
    NoticesFailure(WorkerKey, Epoch, WorkerKey),
    GetsReady(WorkerKey, Epoch, u64, Time),
    Heartbeat,
    Strikes(Fault),
    Heals,
}

/// Everything there is.
#[derive(Debug)]
pub struct World {
    pub(crate) now: Time,
    pub(crate) random: Random,
    pub(crate) sabotage: Sabotage,
    pub(crate) tensor: u32,
    queue: BTreeMap<(Time, u64), What>,
    pub(crate) sequence: u64,
    pub(crate) cuts: BTreeMap<(Site, Site), Time>,
    pub(crate) sessions: BTreeMap<u64, Session>,
    pub(crate) store: Store,
    pub(crate) daemons: Vec<Daemon>,
    pub(crate) agents: Vec<Agent>,
    pub(crate) workers: BTreeMap<WorkerKey, Worker>,
    pub(crate) lose_answer: bool,
    pub(crate) healed: bool,
    pub(crate) truth: Truth,
    pub(crate) facts: Vec<Fact>,
    invariants: Option<Invariants>,
    /// The first broken invariant.
    pub violation: Option<String>,
    pub(crate) statistics: Statistics,
    pub(crate) trace: bool,
}

impl World {
    pub(crate) fn new(script: &Script, sabotage: Sabotage, trace: bool) -> Self {
        let agent = |node| Agent::new(gpus_of(node, script.tensor));
        let mut world = Self {
            now: Time(1_000_000_000),
            random: Random(script.seed ^ 0x0dd5_eed5),
            sabotage,
            tensor: script.tensor,
            queue: BTreeMap::new(),
            sequence: 0,
            cuts: BTreeMap::new(),
            sessions: BTreeMap::new(),
            store: Store::default(),
            daemons: (0..DAEMONS).map(|_| Daemon::default()).collect(),
            agents: (0..NODES).map(agent).collect(),
            workers: BTreeMap::new(),
            lose_answer: false,
            healed: false,
            truth: Truth::default(),
            facts: Vec::new(),
            invariants: Some(Invariants::default()),
            violation: None,
            statistics: Statistics::default(),
            trace,
        };
        for daemon in 0..DAEMONS {
            let wait = world.random.below(20 * MS);
            world.at(wait, What::DaemonBoots(daemon));
        }
        for node in 0..NODES {
            world.at(30 * MS, What::AgentBoots(node));
        }
        world.at(40 * MS, What::Wished { wish: Wish::Submit, tries: 0 });
        world.at(100 * MS, What::Heartbeat);
        for (ms, fault) in &script.faults {
            world.at((500 + ms) * MS, What::Strikes(fault.clone()));
        }
        let last = script.faults.iter().map(|(ms, _)| *ms).max().unwrap_or(0);
        world.at((1_000 + last) * MS, What::Heals);
        world
    }

    pub(crate) fn at(&mut self, wait: u64, what: What) {
        self.put(Time(self.now.0 + wait), what);
    }

    pub(crate) fn put(&mut self, at: Time, what: What) {
        self.sequence += 1;
        self.queue.insert((at.max(self.now), self.sequence), what);
    }

    pub(crate) fn gpu_number(&self, gpu: &GpuId) -> usize {
        let number = |text: &str| text.parse::<usize>().unwrap_or(0);
        number(&gpu.0[1..2]) * self.tensor as usize + number(&gpu.0[2..])
    }

    pub(crate) fn breaks(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    pub(crate) fn log(&self, text: impl FnOnce() -> String) {
        if self.trace {
            println!("{:>9} {}", (self.now.0 - 1_000_000_000) / MS, text());
        }
    }

    /// Until then, or until an invariant is broken.
    pub(crate) fn run_until(&mut self, until: Time) {
        while self.violation.is_none() {
            let queued = self.queue.first_key_value().map(|((at, _), _)| *at);
            let tick = (0..DAEMONS).filter_map(|d| self.next_tick(d).map(|at| (at, d))).min();
            let next = queued.into_iter().chain(tick.map(|(at, _)| at)).min();
            let Some(next) = next.filter(|next| *next <= until) else {
                self.now = until;
                return;
            };
            self.now = self.now.max(next);
            match tick {
                Some((at, daemon)) if queued.is_none_or(|queued| at <= queued) => self.tick(daemon),
                Some(_) | None => {
                    if let Some((_, what)) = self.queue.pop_first() {
                        self.happens(what);
                    }
                }
            }
            self.statistics.events += 1;
            self.check();
        }
    }

    /// After every event, every invariant sees what it did.
    fn check(&mut self) {
        let facts = std::mem::take(&mut self.facts);
        if facts.is_empty() {
            return;
        }
        let Some(mut invariants) = self.invariants.take() else { return };
        for fact in &facts {
            if let Err(broken) = invariants.see(self, fact) {
                self.breaks(broken);
            }
        }
        self.invariants = Some(invariants);
    }

    /// A process that is stopped does nothing; it goes on when it wakes.
    fn thaws(&self, what: &What) -> Option<Time> {
        match what {
            What::Prepared(key, ..)
            | What::Commits(key, ..)
            | What::TimesOut(key, ..)
            | What::NoticesFailure(key, ..)
            | What::GetsReady(key, ..) => self.worker_sleeps(key),
            What::Dials(peer) => self.peer_sleeps(peer),
            What::Granted { daemon, .. }
            | What::Renewed { daemon, .. }
            | What::Written { daemon, .. }
            | What::WriteIsLate { daemon, .. }
            | What::WantsLead { daemon, .. }
            | What::KeepsLease { daemon, .. }
            | What::Wakes { daemon, .. }
            | What::Planned { daemon, .. } => self.daemon_sleeps(*daemon),
            What::ProcessStarts(_, node) => self.peer_sleeps(&Peer::Agent(*node)),
            What::Up(..)
            | What::Down(..)
            | What::ServerNotices(_)
            | What::ClientNotices(_)
            | What::ServerGivesUp(_)
            | What::CheckSession(_)
            | What::Campaigns { .. }
            | What::Renews { .. }
            | What::Writes { .. }
            | What::Wished { .. }
            | What::DaemonBoots(_)
            | What::AgentBoots(_)
            | What::ProcessEnds(..)
            | What::Votes(..)
            | What::Heartbeat
            | What::Strikes(_)
            | What::Heals => None,
        }
    }

    fn happens(&mut self, what: What) {
        if let Some(thaw) = self.thaws(&what) {
            self.put(thaw, what);
            return;
        }
        match what {
            What::Up(id, event) => self.deliver_up(id, event),
            What::Down(id, order) => self.deliver_down(id, order),
            What::ServerNotices(id) => self.server_notices(id, false),
            What::ServerGivesUp(id) => self.server_notices(id, true),
            What::ClientNotices(id) => self.client_notices(id, false),
            What::CheckSession(id) => self.check_session(id),
            What::Dials(peer) => self.dials(&peer),
            What::Campaigns { .. }
            | What::Renews { .. }
            | What::Writes { .. }
            | What::Granted { .. }
            | What::Renewed { .. }
            | What::Written { .. } => self.store_talk(what),
            What::WriteIsLate { daemon, term, number } => self.write_is_late(daemon, term, number),
            What::WantsLead { daemon, boot } => self.wants_lead(daemon, boot),
            What::KeepsLease { daemon, term } => self.keeps_lease(daemon, term),
            What::Wakes { daemon, term } => self.wakes(daemon, term),
            What::Planned { daemon, term, event } => self.planned(daemon, term, event),
            What::Wished { wish, tries } => self.wished(wish, tries),
            What::DaemonBoots(daemon) => self.daemon_boots(daemon),
            What::AgentBoots(node) => self.agent_boots(node),
            What::ProcessStarts(key, node) => self.process_starts(key, node),
            What::ProcessEnds(key, exit) => self.process_ends(&key, exit),
            What::Prepared(key, epoch, step) => self.prepared(&key, epoch, step),
            What::Votes(epoch, step) => self.votes(epoch, step),
            What::Commits(key, epoch, step, pause) => self.commits(&key, epoch, step, pause),
            What::TimesOut(key, epoch, step) => self.times_out(&key, epoch, step),
            What::NoticesFailure(key, epoch, peer) => self.notices_failure(&key, epoch, &peer),
            What::GetsReady(key, epoch, ticket, by) => self.gets_ready(&key, epoch, ticket, by),
            What::Heartbeat => self.heartbeat(),
            What::Strikes(fault) => self.strikes(fault),
            What::Heals => self.heals(),
        }
    }
}
