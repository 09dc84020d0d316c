//! Everything the engine knows.

use crate::cluster::Cluster;
use crate::job::Job;
use crate::{Command, JobName, Notice, Time, Timeouts};
use reknit_layout::Topology;
use std::collections::BTreeMap;

/// The cluster and the jobs on it. Changed by [`crate::step()`] only.
#[derive(Debug, Clone)]
pub struct State {
    pub(crate) timeouts: Timeouts,
    pub(crate) cluster: Cluster,
    pub(crate) jobs: BTreeMap<JobName, Job>,
}

impl State {
    pub fn new(timeouts: Timeouts) -> Self {
        Self { timeouts, cluster: Cluster::default(), jobs: BTreeMap::new() }
    }

    /// Where the cluster's GPUs are, as an operator describes it. Without it each node is a domain.
    #[must_use]
    pub fn with_topology(mut self, topology: Topology) -> Self {
        self.cluster.described = topology;
        self
    }

    /// When the shell must send `Event::Tick`, if nothing else happens before.
    pub fn next_deadline(&self) -> Option<Time> {
        let jobs = self.jobs.values().filter_map(|job| job.next_deadline(&self.cluster, &self.timeouts));
        self.cluster.next_deadline(&self.timeouts).into_iter().chain(jobs).min()
    }
}

/// What a transition sees and where its commands go.
#[derive(Debug)]
pub(crate) struct Ctx<'a> {
    pub(crate) now: Time,
    pub(crate) timeouts: &'a Timeouts,
    pub(crate) cluster: &'a Cluster,
    /// What workers and agents wait for, in order.
    pub(crate) out: Vec<Command>,
    /// What only people wait for: after the rest, so that it never delays a recovery.
    pub(crate) later: Vec<Command>,
}

impl Ctx<'_> {
    pub(crate) fn notify(&mut self, job: &JobName, notice: Notice) {
        self.later.push(Command::Notify { job: job.clone(), notice });
    }
}
