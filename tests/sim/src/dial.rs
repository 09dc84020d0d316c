//! Daemons and the store, and peers in search of the leader.

use crate::Sabotage;
use crate::daemon::lease_from;
use crate::invariants::Fact;
use crate::net::{MS, Peer, Site};
use crate::store::{TTL, Write};
use crate::world::{What, World};
use reknit_engine::{Event, JobRecord, Time};

impl World {
    pub(crate) fn store_delay(&mut self) -> u64 {
        let slow = if self.store.slow_until > self.now { self.random.below(400 * MS) } else { 0 };
        100 + self.random.below(1_000) + slow
    }

    pub(crate) fn wants_lead(&mut self, daemon: usize, boot: u64) {
        let found = &self.daemons[daemon];
        if !found.up || found.boot != boot || found.leading.is_some() {
            return;
        }
        let wait = self.store_delay();
        self.at(wait, What::Campaigns { daemon, boot });
        let again = 100 * MS + self.random.below(100 * MS);
        self.at(again, What::WantsLead { daemon, boot });
    }

    pub(crate) fn keeps_lease(&mut self, daemon: usize, term: u64) {
        let now = self.now;
        let Some(leading) = self.daemons[daemon].leading.as_ref().filter(|found| found.term == term) else {
            return;
        };
        let lease = leading.lease;
        // One that wakes with orders in hand gives them first: nothing made it look.
        self.pump(daemon);
        if now >= lease && self.sabotage != Sabotage::NoFencing {
            self.ends_leading(daemon);
            return;
        }
        let wait = self.store_delay();
        self.at(wait, What::Renews { daemon, term, sent: now });
        self.at(TTL / 4, What::KeepsLease { daemon, term });
    }

    /// What goes to the store and comes from it waits for its link, and for a quorum.
    pub(crate) fn store_talk(&mut self, what: What) {
        let (daemon, there) = match &what {
            What::Campaigns { daemon, .. } | What::Renews { daemon, .. } | What::Writes { daemon, .. } => {
                (*daemon, true)
            }
            What::Granted { daemon, .. } | What::Renewed { daemon, .. } | What::Written { daemon, .. } => {
                (*daemon, false)
            }
            other => unreachable!("{other:?} is no talk with the store"),
        };
        let site = Site::Daemon(daemon);
        let cut = if there { self.cut(site, Site::Store) } else { self.cut(Site::Store, site) };
        let down = Some(self.store.down_until).filter(|until| there && *until > self.now);
        if let Some(until) = cut.max(down) {
            self.put(until, what);
            return;
        }
        let (now, wait) = (self.now, self.store_delay());
        match what {
            What::Campaigns { daemon, boot } => {
                if let Some(term) = self.store.campaign(now, daemon) {
                    let term = Some(term);
                    self.at(wait, What::Granted { daemon, boot, term, sent: now });
                }
            }
            What::Granted { daemon, boot, term: Some(term), sent } => {
                let found = &self.daemons[daemon];
                // It gives up a leadership whose grant took too long; so does a process that asked for nothing.
                let usable = found.up && found.boot == boot && found.leading.is_none();
                if usable && now < lease_from(sent) && self.store.leads(now, term) {
                    self.starts_leading(daemon, term, sent);
                }
            }
            What::Renews { daemon, term, sent } => {
                let held = self.store.keep_alive(now, term) || self.sabotage == Sabotage::NoFencing;
                self.at(wait, What::Renewed { daemon, term, sent, held });
            }
            What::Renewed { daemon, term, sent, held } => {
                let leading = self.daemons[daemon].leading.as_mut();
                if let Some(leading) = leading.filter(|found| found.term == term) {
                    if held {
                        leading.lease = leading.lease.max(lease_from(sent));
                    } else {
                        self.ends_leading(daemon);
                    }
                }
            }
            What::Writes { daemon, term, number, write } => {
                let taken = self.store.leads(now, term) || self.sabotage == Sabotage::NoFencing;
                if taken {
                    self.takes(term, write);
                } else {
                    self.statistics.did("a write of an old leader was refused");
                }
                if std::mem::take(&mut self.lose_answer) {
                    self.statistics.happened("answer of a write lost");
                } else {
                    self.at(wait, What::Written { daemon, term, number, taken });
                }
            }
            What::Written { daemon, term, number, taken } => self.written(daemon, term, number, taken),
            What::Granted { term: None, .. } => {}
            other => unreachable!("{other:?} is no talk with the store"),
        }
    }

    pub(crate) fn takes(&mut self, term: u64, write: Write) {
        match &write {
            Write::Job(record) => {
                let before = self.store.jobs.get(&record.name).cloned();
                let spares = |record: &JobRecord| record.replaced.len();
                if before.as_ref().is_some_and(|before| spares(before) < spares(record)) {
                    self.statistics.did("a spare took a place");
                }
                if before.as_ref().is_some_and(|before| before.phase.ended()) && !record.phase.ended() {
                    self.earlier.insert(record.name.clone(), record.last_incident);
                }
                let record = record.clone();
                self.log(|| format!("store: {:?} {:?} (term {term})", record.phase, record.last_epoch));
                self.facts.push(Fact::Stored { before: before.map(Box::new), record });
            }
            Write::Incident(incident) => self.facts.push(Fact::Incident(incident.clone())),
        }
        self.store.put(write);
    }

    fn link_of(&mut self, peer: &Peer) -> Option<&mut Link> {
        match peer {
            Peer::Agent(node) => {
                let agent = &mut self.agents[*node];
                agent.up.then_some(&mut agent.link)
            }
            Peer::Worker(who) => self.workers.get_mut(who).map(|worker| &mut worker.link),
        }
    }

    pub(crate) fn peer_sleeps(&self, peer: &Peer) -> Option<Time> {
        match peer {
            Peer::Agent(node) => Some(self.agents[*node].frozen_until).filter(|until| *until > self.now),
            Peer::Worker(who) => self.worker_sleeps(who),
        }
    }

    pub(crate) fn dials(&mut self, peer: &Peer) {
        let Some(link) = self.link_of(peer) else { return };
        if link.session.is_some() {
            return;
        }
        link.connections += 1;
        let (daemon, connection) = (link.address, link.connections);
        let instance = match peer {
            Peer::Agent(node) => self.agents[*node].instance,
            Peer::Worker(_) => 0,
        };
        let Some(hello) = self.hello_of(peer) else { return };
        let id = self.open_session(peer.clone(), daemon, (instance, connection), hello);
        if let Some(link) = self.link_of(peer) {
            link.session = Some(id);
        }
        match peer {
            Peer::Agent(node) => self.agent_repeats(*node),
            Peer::Worker(who) => {
                self.says(peer, Event::Alive { job: who.job.clone(), worker: who.key.clone() });
            }
        }
    }

    /// A daemon that leads under a lower term than one met before is left at once: it is an old leader.
    pub(crate) fn welcomed(&mut self, peer: &Peer, id: u64, term: u64) {
        let Some(link) = self.link_of(peer) else { return };
        if link.session != Some(id) {
            return;
        }
        if term < link.highest_term {
            self.statistics.did("an old leader was left by a peer");
            self.peer_hangs_up(peer);
        } else {
            link.highest_term = term;
        }
    }

    pub(crate) fn peer_hangs_up(&mut self, peer: &Peer) {
        let Some(link) = self.link_of(peer) else { return };
        if let Some(id) = link.session {
            self.client_leaves(id);
            self.peer_loses(peer, id);
        }
    }

    /// It tries the next address after a pause: the one it was told of, if any.
    pub(crate) fn peer_loses(&mut self, peer: &Peer, id: u64) {
        let (told, daemons) = (self.store.leader.map(|lease| lease.daemon), self.daemons.len());
        let (wait, follow) = (10 * MS + self.random.below(300 * MS), self.random.below(2) == 0);
        let Some(link) = self.link_of(peer) else { return };
        if link.session != Some(id) {
            return;
        }
        link.session = None;
        link.address = match told {
            Some(leader) if follow => leader,
            Some(_) | None => (link.address + 1) % daemons,
        };
        self.client_leaves(id);
        self.at(wait, What::Dials(peer.clone()));
    }

    pub(crate) fn says(&mut self, peer: &Peer, event: Event) {
        if let Some(id) = self.link_of(peer).and_then(|link| link.session) {
            self.send_up(id, event);
        }
    }
}

/// A peer's way to the daemons.
#[derive(Debug, Clone, Default)]
pub(crate) struct Link {
    pub(crate) session: Option<u64>,
    address: usize,
    /// By this process.
    connections: u64,
    /// The highest it was welcomed with.
    highest_term: u64,
}
