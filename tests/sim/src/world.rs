//! Virtual time: what happens next, and to whom.

use crate::agent::Agent;
use crate::cluster::{Cluster, DAEMONS, Who, gpus_of};
use crate::daemon::Daemon;
use crate::harm::Harm;
use crate::invariants::{Fact, Invariants};
use crate::memory::Truth;
use crate::net::{MS, Order, Peer, Session, Site};
use crate::outcome::Statistics;
use crate::random::Random;
use crate::script::NEVER;
use crate::store::{Store, Write};
use crate::wish::Wish;
use crate::worker::Worker;
use crate::{Fault, Sabotage, Script};
use reknit_engine::{Event, ExitStatus, JobName, Time};
use reknit_layout::{CheckpointId, Epoch, GpuId, Step};
use std::collections::{BTreeMap, BTreeSet};

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
    ProcessStarts(Who, usize),
    ProcessEnds(Who, ExitStatus),
    Prepared(Who, Epoch, Step),
    Votes(Who, Epoch, Step),
    Commits(Who, Epoch, Step, bool),
    TimesOut(Who, Epoch, Step),
    NoticesFailure(Who, Epoch, Who),
    GetsReady(Who, Epoch, u64, Time),
    Joins(Who, Epoch, u64, Time),
    Opens(Who),
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
    pub(crate) cluster: Cluster,
    /// In the order of their numbers.
    pub(crate) gpus: Vec<GpuId>,
    queue: BTreeMap<(Time, u64), What>,
    pub(crate) sequence: u64,
    pub(crate) cuts: BTreeMap<(Site, Site), Time>,
    pub(crate) sessions: BTreeMap<u64, Session>,
    pub(crate) store: Store,
    pub(crate) daemons: Vec<Daemon>,
    pub(crate) agents: Vec<Agent>,
    pub workers: BTreeMap<Who, Worker>,
    /// The last incident of each job's run before the present one.
    pub(crate) earlier: BTreeMap<JobName, u64>,
    /// Nodes whose agent never comes back.
    pub(crate) gone: BTreeSet<usize>,
    pub(crate) lose_answer: bool,
    pub(crate) healed: bool,
    /// A story: one daemon, whose writes are done at once, and nothing fails by chance.
    pub(crate) quiet: bool,
    /// In a story: what the daemon ordered, in short.
    pub told: Vec<String>,
    /// Every worker finds other replicated parameters.
    pub lie_about_digests: bool,
    /// Bytes of memory that plans may count on.
    pub gpu_memory: Option<u64>,
    /// How much longer than usual workers take to open their data, in milliseconds.
    pub opens_later_ms: u64,
    pub(crate) truths: BTreeMap<u64, Truth>,
    /// The checkpoints of each job, the last written first, and when that was.
    pub saved: BTreeMap<JobName, (Vec<CheckpointId>, Time)>,
    /// What was done to whom.
    pub(crate) harm: Vec<Harm>,
    pub(crate) facts: Vec<Fact>,
    invariants: Option<Invariants>,
    /// The first broken invariant.
    pub violation: Option<String>,
    pub(crate) statistics: Statistics,
    pub(crate) trace: bool,
}

impl World {
    pub(crate) fn new(script: &Script, sabotage: Sabotage, trace: bool) -> Self {
        let mut world = Self::empty(script.seed, script.cluster.clone(), DAEMONS);
        world.sabotage = sabotage;
        world.trace = trace;
        for daemon in 0..DAEMONS {
            let wait = world.random.below(20 * MS);
            world.at(wait, What::DaemonBoots(daemon));
        }
        for node in 0..world.agents.len() {
            world.at(30 * MS, What::AgentBoots(node));
        }
        for job in 0..world.cluster.jobs.len() {
            world.at((40 + 10 * job as u64) * MS, What::Wished { wish: Wish::Submit(job), tries: 0 });
        }
        for (ms, fault) in &script.faults {
            world.at((500 + ms) * MS, What::Strikes(fault.clone()));
        }
        world.at((1_000 + script.end()) * MS, What::Heals);
        world
    }

    /// Nobody is up yet.
    pub(crate) fn empty(seed: u64, cluster: Cluster, daemons: usize) -> Self {
        let reports: Vec<_> = (0..).zip(&cluster.nodes).map(|(node, gpus)| gpus_of(node, *gpus)).collect();
        let mut world = Self {
            now: Time(1_000_000_000),
            random: Random(seed ^ 0x0dd5_eed5),
            sabotage: Sabotage::None,
            gpus: reports.iter().flatten().map(|report| report.gpu.clone()).collect(),
            cluster,
            queue: BTreeMap::new(),
            sequence: 0,
            cuts: BTreeMap::new(),
            sessions: BTreeMap::new(),
            store: Store::default(),
            daemons: (0..daemons).map(|_| Daemon::default()).collect(),
            agents: reports.into_iter().map(|gpus| Agent::new(gpus, 0)).collect(),
            workers: BTreeMap::new(),
            earlier: BTreeMap::new(),
            gone: BTreeSet::new(),
            lose_answer: false,
            healed: false,
            quiet: false,
            told: Vec::new(),
            lie_about_digests: false,
            gpu_memory: None,
            opens_later_ms: 0,
            truths: BTreeMap::new(),
            saved: BTreeMap::new(),
            harm: Vec::new(),
            facts: Vec::new(),
            invariants: Some(Invariants::default()),
            violation: None,
            statistics: Statistics::default(),
            trace: false,
        };
        world.at(100 * MS, What::Heartbeat);
        world
    }

    /// Faults happen by chance.
    pub(crate) fn rough(&self) -> bool {
        !self.quiet && !self.healed
    }

    pub(crate) fn job_name(&self, job: usize) -> JobName {
        JobName(self.cluster.jobs[job].name.clone())
    }

    pub(crate) fn truth(&mut self, seed: u64) -> &mut Truth {
        self.truths.entry(seed).or_insert_with(|| Truth::new(seed))
    }

    pub(crate) fn at(&mut self, wait: u64, what: What) {
        self.put(Time(self.now.0 + wait), what);
    }

    pub(crate) fn put(&mut self, at: Time, what: What) {
        self.sequence += 1;
        self.queue.insert((at.max(self.now), self.sequence), what);
    }

    pub(crate) fn gpu_number(&self, gpu: &GpuId) -> usize {
        self.gpus.binary_search(gpu).unwrap_or_default()
    }

    pub(crate) fn node_of(&self, gpu: usize) -> usize {
        let on = |agent: &Agent| agent.gpus.iter().any(|report| report.gpu == self.gpus[gpu]);
        self.agents.iter().position(on).unwrap_or_default()
    }

    /// Whatever waited for somebody who would never wake up goes on.
    pub(crate) fn wakes_all(&mut self) {
        for (_, what) in self.queue.split_off(&(Time(self.now.0 + NEVER * MS / 2), 0)) {
            self.put(self.now, what);
        }
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
    pub(crate) fn run_until_time(&mut self, until: Time) {
        while self.violation.is_none() && self.next(until) {}
    }

    /// Lets the next thing happen; false when `until` comes first.
    pub fn next(&mut self, until: Time) -> bool {
        let queued = self.queue.first_key_value().map(|((at, _), _)| *at);
        let daemons = 0..self.daemons.len();
        let tick = daemons.filter_map(|daemon| self.next_tick(daemon).map(|at| (at, daemon))).min();
        let next = queued.into_iter().chain(tick.map(|(at, _)| at)).min();
        let Some(next) = next.filter(|next| *next <= until) else {
            self.now = until;
            return false;
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
        true
    }

    /// After every event, every invariant sees what it did.
    pub(crate) fn check(&mut self) {
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
            | What::GetsReady(key, ..)
            | What::Joins(key, ..)
            | What::Opens(key) => self.worker_sleeps(key),
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
            // A daemon that wakes up finds its lease's end and what has come meanwhile in whatever order.
            let late = matches!(what, What::KeepsLease { .. });
            let late = if late { self.random.below(5 * MS) } else { 0 };
            self.put(Time(thaw.0 + late), what);
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
            What::Votes(who, epoch, step) => self.votes(&who, epoch, step),
            What::Commits(key, epoch, step, pause) => self.commits(&key, epoch, step, pause),
            What::TimesOut(key, epoch, step) => self.times_out(&key, epoch, step),
            What::NoticesFailure(key, epoch, peer) => self.notices_failure(&key, epoch, &peer),
            What::GetsReady(key, epoch, ticket, by) => self.gets_ready(&key, epoch, ticket, by),
            What::Joins(key, epoch, ticket, by) => self.joins(&key, epoch, ticket, by),
            What::Opens(key) => self.opens(&key),
            What::Heartbeat => self.heartbeat(),
            What::Strikes(fault) => self.strikes(fault),
            What::Heals => self.heals(),
        }
    }
}
