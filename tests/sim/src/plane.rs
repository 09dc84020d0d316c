//! Training: steps, votes, and what peers notice of each other.

use crate::Sabotage;
use crate::cluster::{TIMEOUTS, Who};
use crate::invariants::Fact;
use crate::memory::{BATCH, REPLICATED, Values, gradients};
use crate::net::MS;
use crate::random::mix;
use crate::worker::{Worker, vote};
use crate::world::{What, World};
use reknit_engine::{Activity, Event, JobName, StepPart, WorkerPhase};
use reknit_layout::{CheckpointId, Epoch, Layout, Step};
use std::collections::BTreeSet;
use std::ops::Range;

const STEP_TIME: u64 = 60 * MS;

/// The samples that every replica takes of a step.
pub(crate) fn samples(layout: &Layout, step: u64) -> Vec<Range<u64>> {
    let first = (step - 1) * BATCH;
    let replicas: BTreeSet<_> = layout.groups.iter().map(|group| group.replica).collect();
    let ranges = replicas.into_iter().map(|replica| layout.samples_of(replica));
    ranges.map(|range| first + u64::from(range.start)..first + u64::from(range.end)).collect()
}

impl Worker {
    /// The others of its epoch, in their order.
    fn members(&self, who: &Who) -> Vec<Who> {
        let members = self.plan.iter().flat_map(|plan| plan.layout.members());
        members.map(|(_, member)| who.peer(&member.worker)).collect()
    }

    fn sums(&self, who: &Who, step: u64, sabotage: Sabotage) -> Option<Values> {
        let layout = &self.plan.as_ref()?.layout;
        let mut sums = gradients(self.seed, step, &samples(layout, step));
        let place = layout.place_of(&who.key)?;
        match sabotage {
            Sabotage::LocalReplicated => {
                let own = layout.samples_of(place.replica);
                let first = (step - 1) * BATCH;
                #[allow(clippy::single_range_in_vec_init, reason = "those of its replica are one range")]
                let own = [first + u64::from(own.start)..first + u64::from(own.end)];
                sums[REPLICATED] = gradients(self.seed, step, &own)[REPLICATED];
            }
            Sabotage::StreamOfSlot => {
                sums.iter_mut().for_each(|sum| *sum = mix(*sum ^ u64::from(place.slot.0)));
            }
            Sabotage::None
            | Sabotage::SkipPersist
            | Sabotage::NoFencing
            | Sabotage::ResumeEarly
            | Sabotage::StaleHoldings
            | Sabotage::ForgetCommits
            | Sabotage::StepsBack
            | Sabotage::BlameAnother
            | Sabotage::KeepGarbage
            | Sabotage::KeepAll
            | Sabotage::DropEarly
            | Sabotage::RunAhead => {}
        }
        Some(sums)
    }
}

impl World {
    /// The next step begins, or the job is done.
    pub(crate) fn goes_on(&mut self, who: &Who) {
        let Some(worker) = self.workers.get_mut(who) else { return };
        let (epoch, done) = (worker.state.epoch, worker.state.holding.step);
        if done.0 >= worker.last_step {
            worker.state.phase = WorkerPhase::Completed;
            let (job, worker, replicated_digest) = (who.job.clone(), who.key.clone(), worker.memory.digest());
            self.worker_says(who, Event::Completed { job, worker, epoch, step: done, replicated_digest });
            return;
        }
        let step = Step(done.0 + 1);
        worker.state.attempted = step;
        let wait = STEP_TIME / 2 + self.random.below(STEP_TIME);
        self.at(wait, What::Prepared(who.clone(), epoch, step));
        // Everyone is there by the time of the slowest, or never.
        let deadline = 2 * STEP_TIME + u64::from(TIMEOUTS.operation_ms) * MS;
        self.at(deadline, What::TimesOut(who.clone(), epoch, step));
    }

    /// Its gradients are reduced.
    pub(crate) fn prepared(&mut self, who: &Who, epoch: Epoch, step: Step) {
        let (now, sabotage) = (self.now, self.sabotage);
        let Some(worker) = self.workers.get_mut(who) else { return };
        if !worker.trains(epoch) || worker.state.attempted != step {
            return;
        }
        let Some(sums) = worker.sums(who, step.0, sabotage) else { return };
        worker.reduced = Some((step, sums));
        worker.state.prepared = step;
        worker.waits_since = now;
        worker.ticks += 1;
        self.votes(who, epoch, step);
    }

    /// Succeeds when every member of the epoch has prepared the step and reaches every other.
    pub(crate) fn votes(&mut self, who: &Who, epoch: Epoch, step: Step) {
        let voted = |peer: &Who| self.workers.get(peer).is_some_and(|found| found.has_prepared(epoch, step));
        let Some(worker) = self.workers.get(who) else { return };
        let (Some(plan), members) = (worker.plan.clone(), worker.members(who)) else { return };
        if !members.iter().all(voted) {
            return;
        }
        let asleep = members.iter().filter_map(|peer| self.worker_sleeps(peer)).max();
        let sites: Vec<_> = members.iter().map(|peer| self.site(peer)).collect();
        let pairs = sites.iter().flat_map(|from| sites.iter().map(move |to| (*from, *to)));
        let cut = pairs.filter_map(|(from, to)| self.cut(from, to)).max();
        if let Some(until) = asleep.max(cut) {
            self.put(until, What::Votes(who.clone(), epoch, step));
            return;
        }
        let pause = members.iter().any(|peer| self.workers[peer].pausing);
        self.facts.push(Fact::Decided { job: who.job.clone(), epoch, step, plan });
        self.saves(&who.job, step);
        for member in members {
            let wait = self.some_delay();
            self.at(wait, What::Commits(member, epoch, step, pause));
        }
    }

    /// A checkpoint of a step that is decided, if it is one's turn.
    fn saves(&mut self, job: &JobName, step: Step) {
        let Some(record) = self.store.jobs.get(job) else { return };
        let checkpoint = &record.spec.checkpoint;
        if checkpoint.every_steps > 0 && step.0.is_multiple_of(checkpoint.every_steps) {
            let id = CheckpointId { step, digest: format!("{:016x}", mix(step.0)) };
            let (saved, written) = self.saved.entry(job.clone()).or_default();
            *written = self.now;
            saved.retain(|other| *other != id);
            saved.insert(0, id);
            saved.truncate(checkpoint.keep as usize);
        }
    }

    pub(crate) fn commits(&mut self, who: &Who, epoch: Epoch, step: Step, pause: bool) {
        let ahead = self.sabotage == Sabotage::RunAhead && self.gpu_number(&who.key.gpu) == 0;
        let Some(worker) = self.workers.get_mut(who) else { return };
        if !worker.has_prepared(epoch, step) {
            return;
        }
        worker.apply(step);
        worker.state.vote = Some(vote(step));
        worker.ticks += 1;
        worker.computes(who);
        let ended = step.0 >= worker.last_step;
        if ahead && let Some(sums) = worker.sums(who, step.0 + 1, Sabotage::None) {
            worker.memory.apply(step.0 + 1, &sums);
        }
        self.facts.push(Fact::Applied { worker: who.clone(), step });
        self.says_committed(who, step, false);
        // At the last step some have written their last checkpoint, and are done.
        if pause && (!ended || self.random.below(2) == 0) {
            self.quiesce(who);
        } else {
            self.goes_on(who);
            if pause {
                self.says_quiesced(who);
            }
        }
    }

    pub(crate) fn says_committed(&mut self, who: &Who, step: Step, rolled_forward: bool) {
        let Some(worker) = self.workers.get(who) else { return };
        let Some(layout) = worker.plan.as_ref().map(|plan| &plan.layout) else { return };
        let Some(place) = layout.place_of(&who.key) else { return };
        let range = layout.samples_of(place.replica);
        let event = Event::Committed {
            job: who.job.clone(),
            worker: who.key.clone(),
            epoch: worker.state.epoch,
            step,
            vote: vote(step),
            first_sample: (step.0 - 1) * BATCH + u64::from(range.start),
            samples: range.end - range.start,
            step_ms: 60,
            tokens: 128,
            rolled_forward,
        };
        self.worker_says(who, event);
    }

    pub(crate) fn times_out(&mut self, who: &Who, epoch: Epoch, step: Step) {
        let Some(worker) = self.workers.get(who) else { return };
        if worker.trains(epoch) && worker.state.holding.step < step {
            let absent = self.missed(who, worker).into_iter().next();
            self.plane_fails(who, absent, "an operation took too long");
        }
    }

    /// Whose vote on its step has not reached the worker.
    fn missed(&self, who: &Who, worker: &Worker) -> Vec<Who> {
        let (epoch, step) = (worker.state.epoch, worker.state.attempted);
        let there = |peer: &Who| {
            self.cut(self.site(peer), self.site(who)).is_none()
                && self.worker_sleeps(peer).is_none()
                && self
                    .workers
                    .get(peer)
                    .is_some_and(|found| found.trains(epoch) && found.state.prepared >= step)
        };
        worker.members(who).into_iter().filter(|peer| peer != who && !there(peer)).collect()
    }

    pub(crate) fn notices_failure(&mut self, who: &Who, epoch: Epoch, peer: &Who) {
        if let Some(until) = self.cut(self.site(peer), self.site(who)) {
            self.put(until, What::NoticesFailure(who.clone(), epoch, peer.clone()));
            return;
        }
        if self.workers.get(who).is_some_and(|worker| worker.trains(epoch)) {
            self.plane_fails(who, None, "a peer's socket ended");
        }
    }

    fn plane_fails(&mut self, who: &Who, peer: Option<Who>, reason: &str) {
        let Some(worker) = self.workers.get(who) else { return };
        let (epoch, members) = (worker.state.epoch, worker.members(who));
        let event = Event::PlaneFailed {
            job: who.job.clone(),
            worker: who.key.clone(),
            epoch,
            peer: peer.map(|peer| peer.key),
            reason: reason.to_owned(),
        };
        self.worker_says(who, event);
        // Its peers see its sockets end.
        for peer in members.into_iter().filter(|peer| peer != who) {
            let wait = self.some_delay();
            self.at(wait, What::NoticesFailure(peer, epoch, who.clone()));
        }
        self.quiesce(who);
    }

    /// What everyone says: who trains, since when it waits, and for whom.
    pub(crate) fn heartbeat(&mut self) {
        let awake = self.workers.iter().filter(|(_, worker)| worker.frozen_until <= self.now);
        let told: Vec<_> = awake.map(|(who, worker)| (who.clone(), self.progress(who, worker))).collect();
        for (who, event) in told {
            self.worker_says(&who, event);
        }
        // They say it once for each that is new; the engine takes no notice of the others.
        let everyone: Vec<_> = self.workers.keys().cloned().collect();
        for who in everyone {
            if let Some((ids, written)) = self.saved.get(&who.job).cloned() {
                let (job, worker) = (who.job.clone(), who.key.clone());
                self.worker_says(&who, Event::Checkpoints { job, worker, ids, written });
            }
        }
        self.at(100 * MS, What::Heartbeat);
    }

    fn progress(&self, who: &Who, worker: &Worker) -> Event {
        if worker.state.phase != WorkerPhase::Training {
            return Event::Alive { job: who.job.clone(), worker: who.key.clone() };
        }
        let (epoch, step) = (worker.state.epoch, worker.state.holding.step);
        let mut activity = Activity { computed_us: worker.computed_us, ..Activity::default() };
        if worker.has_prepared(epoch, worker.state.attempted) {
            activity.part = Some(StepPart::Vote);
            activity.waiting_for =
                self.missed(who, worker).into_iter().map(|peer| peer.key).take(8).collect();
            activity.waiting_ms = ((self.now.0 - worker.waits_since.0) / MS) as u32;
        }
        let (job, worker, ticks) = (who.job.clone(), who.key.clone(), worker.ticks);
        Event::Progress { job, worker, epoch, step, ticks, activity }
    }
}
