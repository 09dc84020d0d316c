//! The store as etcd behaves: a leader's key under a lease, and writes that only the present leader may make.

use reknit_engine::{Incident, JobName, JobRecord, Time};
use std::collections::BTreeMap;

/// In microseconds, by the store's clock.
pub(crate) const TTL: u64 = 1_000_000;

#[derive(Debug, Clone, Default)]
pub(crate) struct Store {
    pub(crate) jobs: BTreeMap<JobName, JobRecord>,
    pub(crate) incidents: BTreeMap<(JobName, u64), Incident>,
    pub(crate) leader: Option<Lease>,
    pub(crate) revision: u64,
    /// Without a quorum: takes nothing before.
    pub(crate) down_until: Time,
    pub(crate) slow_until: Time,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Lease {
    pub(crate) daemon: usize,
    /// The leader key's create revision.
    pub(crate) term: u64,
    pub(crate) until: Time,
}

#[derive(Debug, Clone)]
pub(crate) enum Write {
    Job(Box<JobRecord>),
    Incident(Box<Incident>),
}

impl Store {
    /// The lease that holds now. One that ended is removed.
    pub(crate) fn holder(&mut self, now: Time) -> Option<Lease> {
        self.leader = self.leader.filter(|lease| lease.until > now);
        self.leader
    }

    /// A leadership, if nobody has one.
    pub(crate) fn campaign(&mut self, now: Time, daemon: usize) -> Option<u64> {
        if self.holder(now).is_some() {
            return None;
        }
        self.revision += 1;
        let term = self.revision;
        self.leader = Some(Lease { daemon, term, until: Time(now.0 + TTL) });
        Some(term)
    }

    /// False: that leadership is over.
    pub(crate) fn keep_alive(&mut self, now: Time, term: u64) -> bool {
        match self.holder(now) {
            Some(mut lease) if lease.term == term => {
                lease.until = Time(now.0 + TTL);
                self.leader = Some(lease);
                true
            }
            Some(_) | None => false,
        }
    }

    pub(crate) fn leads(&mut self, now: Time, term: u64) -> bool {
        self.holder(now).is_some_and(|lease| lease.term == term)
    }

    pub(crate) fn put(&mut self, write: Write) {
        self.revision += 1;
        match write {
            Write::Job(record) => drop(self.jobs.insert(record.name.clone(), *record)),
            Write::Incident(incident) => {
                self.incidents.insert((incident.job.clone(), incident.id), *incident);
            }
        }
    }

    /// No quorum until then. Leases do not run out meanwhile: they are granted anew by who counts them next.
    pub(crate) fn goes_down(&mut self, until: Time) {
        self.down_until = self.down_until.max(until);
        if let Some(lease) = &mut self.leader {
            lease.until = Time(lease.until.0.max(self.down_until.0 + TTL));
        }
    }
}
