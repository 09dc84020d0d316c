//! Training: steps, votes, and what peers notice of each other.

use crate::cluster::{TIMEOUTS, job_name};
use crate::invariants::Fact;
use crate::memory::{BATCH, gradients};
use crate::net::{MS, Site};
use crate::worker::vote;
use crate::world::{What, World};
use reknit_engine::{Activity, Event, Time, WorkerPhase};
use reknit_layout::{Epoch, Layout, Step, WorkerKey};
use std::ops::Range;

const STEP_TIME: u64 = 60 * MS;

/// The samples that every replica takes of a step.
pub(crate) fn samples(layout: &Layout, step: u64) -> Vec<Range<u64>> {
    let first = (step - 1) * BATCH;
    let replicas = layout.groups.iter().map(|group| group.replica);
    let replicas: std::collections::BTreeSet<_> = replicas.collect();
    let ranges = replicas.into_iter().map(|replica| layout.samples_of(replica));
    ranges.map(|range| first + u64::from(range.start)..first + u64::from(range.end)).collect()
}

impl World {
    /// The next step begins.
    pub(crate) fn goes_on(&mut self, key: &WorkerKey) {
        let Some(worker) = self.workers.get_mut(key) else { return };
        let (epoch, step) = (worker.state.epoch, Step(worker.state.holding.step.0 + 1));
        worker.state.attempted = step;
        let wait = STEP_TIME / 2 + self.random.below(STEP_TIME);
        self.at(wait, What::Prepared(key.clone(), epoch, step));
        // Everyone is there by the time of the slowest, or never.
        let deadline = 2 * STEP_TIME + u64::from(TIMEOUTS.operation_ms) * MS;
        self.at(deadline, What::TimesOut(key.clone(), epoch, step));
    }

    /// Its gradients are reduced.
    pub(crate) fn prepared(&mut self, key: &WorkerKey, epoch: Epoch, step: Step) {
        let Some(worker) = self.workers.get_mut(key) else { return };
        if !worker.trains(epoch) || worker.state.attempted != step {
            return;
        }
        let Some(plan) = &worker.plan else { return };
        let sums = gradients(step.0, &samples(&plan.layout, step.0));
        worker.reduced = Some((step, sums));
        worker.state.prepared = step;
        worker.ticks += 1;
        self.votes(epoch, step);
    }

    /// Succeeds when every member of the epoch has prepared the step and reaches every other.
    pub(crate) fn votes(&mut self, epoch: Epoch, step: Step) {
        let voted = |key: &&WorkerKey| {
            let worker = &self.workers[*key];
            worker.trains(epoch) && worker.state.prepared == step && worker.state.holding.step < step
        };
        let Some(first) = self.workers.keys().find(voted) else { return };
        let Some(plan) = self.workers[first].plan.clone() else { return };
        let members: Vec<_> = plan.layout.members().map(|(_, member)| member.worker.clone()).collect();
        let here = |key: &WorkerKey| self.workers.contains_key(key) && voted(&key);
        if !members.iter().all(here) {
            return;
        }
        let asleep = members.iter().filter_map(|key| self.worker_sleeps(key)).max();
        let sites: Vec<_> = members.iter().map(|key| Site::Gpu(self.gpu_number(&key.gpu))).collect();
        let pairs = sites.iter().flat_map(|from| sites.iter().map(move |to| (*from, *to)));
        let cut = pairs.filter_map(|(from, to)| self.cut(from, to)).max();
        if let Some(until) = asleep.max(cut) {
            self.put(until, What::Votes(epoch, step));
            return;
        }
        let pause = members.iter().any(|key| self.workers[key].pausing);
        self.facts.push(Fact::Decided { epoch, step, plan });
        for key in members {
            let wait = self.some_delay();
            self.at(wait, What::Commits(key, epoch, step, pause));
        }
    }

    pub(crate) fn commits(&mut self, key: &WorkerKey, epoch: Epoch, step: Step, pause: bool) {
        let Some(worker) = self.workers.get_mut(key) else { return };
        if !worker.trains(epoch) || worker.state.prepared != step || worker.state.holding.step >= step {
            return;
        }
        worker.apply(step);
        worker.state.vote = Some(vote(step));
        worker.ticks += 1;
        self.facts.push(Fact::Applied { worker: key.clone(), step });
        self.says_committed(key, step, false);
        if pause {
            self.quiesce(key);
        } else {
            self.goes_on(key);
        }
    }

    pub(crate) fn says_committed(&mut self, key: &WorkerKey, step: Step, rolled_forward: bool) {
        let Some(worker) = self.workers.get(key) else { return };
        let Some(layout) = worker.plan.as_ref().map(|plan| &plan.layout) else { return };
        let Some(place) = layout.place_of(key) else { return };
        let range = layout.samples_of(place.replica);
        let event = Event::Committed {
            job: job_name(),
            worker: key.clone(),
            epoch: worker.state.epoch,
            step,
            vote: vote(step),
            first_sample: (step.0 - 1) * BATCH + u64::from(range.start),
            samples: range.end - range.start,
            step_ms: 60,
            tokens: 128,
            rolled_forward,
        };
        self.worker_says(key, event);
    }

    pub(crate) fn times_out(&mut self, key: &WorkerKey, epoch: Epoch, step: Step) {
        let Some(worker) = self.workers.get(key) else { return };
        if !worker.trains(epoch) || worker.state.holding.step >= step {
            return;
        }
        let members = worker.plan.iter().flat_map(|plan| plan.layout.members());
        let members: Vec<_> = members.map(|(_, member)| member.worker.clone()).collect();
        let site = |worker: &WorkerKey| Site::Gpu(self.gpu_number(&worker.gpu));
        let absent = members.into_iter().find(|peer| {
            self.cut(site(peer), site(key)).is_some()
                || self.workers.get(peer).is_none_or(|peer| peer.state.prepared < step)
        });
        self.plane_fails(key, absent, "an operation took too long", true);
    }

    pub(crate) fn notices_failure(&mut self, key: &WorkerKey, epoch: Epoch, peer: &WorkerKey) {
        let [from, to] = [peer, key].map(|worker| Site::Gpu(self.gpu_number(&worker.gpu)));
        if let Some(until) = self.cut(from, to) {
            self.put(until, What::NoticesFailure(key.clone(), epoch, peer.clone()));
            return;
        }
        if self.workers.get(key).is_some_and(|worker| worker.trains(epoch)) {
            self.plane_fails(key, None, "a peer's socket ended", false);
        }
    }

    fn plane_fails(&mut self, key: &WorkerKey, peer: Option<WorkerKey>, reason: &str, timed_out: bool) {
        let Some(worker) = self.workers.get(key) else { return };
        let (epoch, layout) = (worker.state.epoch, worker.plan.clone());
        let event = Event::PlaneFailed {
            job: job_name(),
            worker: key.clone(),
            epoch,
            peer,
            reason: reason.to_owned(),
            timed_out,
        };
        self.worker_says(key, event);
        // Its peers see its sockets end.
        let members = layout.iter().flat_map(|plan| plan.layout.members());
        let peers: Vec<_> =
            members.map(|(_, member)| member.worker.clone()).filter(|peer| peer != key).collect();
        for peer in peers {
            let wait = self.some_delay();
            self.at(wait, What::NoticesFailure(peer, epoch, key.clone()));
        }
        self.quiesce(key);
    }

    /// What everyone who trains says of it.
    pub(crate) fn heartbeat(&mut self) {
        let keys: Vec<_> = self.workers.keys().cloned().collect();
        for key in keys {
            if self.worker_sleeps(&key).is_some() {
                continue;
            }
            let Some(worker) = self.workers.get_mut(&key) else { continue };
            if worker.state.phase != WorkerPhase::Training {
                continue;
            }
            let (epoch, step, ticks) = (worker.state.epoch, worker.state.holding.step, worker.ticks);
            let (job, worker, activity) = (job_name(), key.clone(), Activity::default());
            let event = Event::Progress { job, worker, epoch, step, ticks, activity };
            self.worker_says(&key, event);
        }
        let next = Time(self.now.0 + 100 * MS);
        self.put(next, What::Heartbeat);
    }
}
