//! All are ready: the new layout is stored and trained with.

use super::{Job, Preparing, Stage};
use crate::state::Ctx;
use crate::{Command, Notice, Phase, StepVote, WorkerPhase, WorkerState};
use reknit_layout::{Epoch, Step, WorkerKey};

/// One worker's report of a committed step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CommittedStep {
    pub(crate) epoch: Epoch,
    pub(crate) step: Step,
    pub(crate) vote: StepVote,
    pub(crate) first_sample: u64,
    pub(crate) samples: u32,
    pub(crate) step_ms: u32,
    pub(crate) tokens: u64,
    pub(crate) rolled_forward: bool,
}

impl Job {
    pub(crate) fn ready(&mut self, key: &WorkerKey, epoch: Epoch, step: Step, digest: String) {
        // Of an epoch that is over, it says nothing any more (ONE-EPOCH).
        if let Stage::Preparing(preparing) = &mut self.stage
            && preparing.epoch == epoch
            && preparing.members.contains(key)
        {
            preparing.ready.insert(key.clone(), (step, digest));
            self.observe_phase(key, WorkerPhase::Ready, epoch);
        }
    }

    /// Commits when every member is ready at the same step with the same replicated parameters.
    pub(crate) fn tally(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let Stage::Preparing(preparing) = &self.stage else {
            return false;
        };
        if preparing.ready.len() < preparing.members.len() {
            return ctx.now >= preparing.deadline && self.preparation_too_late(ctx);
        }
        let mut votes = preparing.ready.values();
        let same = match votes.next() {
            Some((step, digest)) => {
                *step == preparing.resume_step && votes.all(|(s, d)| s == step && d == digest)
            }
            None => false,
        };
        if same {
            let preparing = preparing.clone();
            self.commit(ctx, &preparing);
        } else {
            let text = self.describe_disagreement(preparing);
            let first = preparing.members.first().cloned();
            self.disagreement(ctx, first, &text);
        }
        true
    }

    fn preparation_too_late(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let Stage::Preparing(preparing) = &self.stage else {
            return false;
        };
        let missing: Vec<_> = preparing
            .members
            .iter()
            .filter(|member| !preparing.ready.contains_key(*member))
            .cloned()
            .collect();
        if let Some(first) = missing.first() {
            let limit = ctx.timeouts.ready().as_millis();
            self.suspect_plane(ctx, first, None, &format!("not ready within {limit} ms"));
        }
        for worker in &missing {
            self.strike(ctx, worker);
        }
        true
    }

    fn describe_disagreement(&self, preparing: &Preparing) -> String {
        let parts: Vec<_> = preparing
            .ready
            .iter()
            .map(|(key, (step, digest))| {
                let place = self.name_of(key);
                format!("{place} step {step} digest {digest:.16}")
            })
            .collect();
        let resume = preparing.resume_step;
        format!("SAME-STEP or REPLICATED violated before step {resume}: {}", parts.join(", "))
    }

    /// Once may be an accident of the transfer; twice is a wrong model, which is never trained on.
    fn disagreement(&mut self, ctx: &mut Ctx<'_>, first: Option<WorkerKey>, text: &str) {
        self.digest_strikes += 1;
        match first {
            Some(first) if self.digest_strikes == 1 => self.suspect_plane(ctx, &first, None, text),
            Some(_) | None => self.fail(ctx, text),
        }
    }

    fn commit(&mut self, ctx: &mut Ctx<'_>, preparing: &Preparing) {
        let layout = &preparing.plan.layout;
        let leaving: Vec<_> = self.members().difference(&preparing.members).cloned().collect();
        let degrees = layout.degrees();
        self.stamp(ctx.now, |incident| &mut incident.ready);
        self.stamp(ctx.now, |incident| &mut incident.committed);
        for incident in self.incidents.current() {
            incident.epoch_after = Some(preparing.epoch);
            incident.degrees_after.clone_from(&degrees);
        }
        let notice = Notice::Layout {
            epoch: preparing.epoch,
            degrees,
            batch: layout.batch.clone(),
            bytes_moved: preparing.plan.bytes_moved,
            bytes_lower_bound: preparing.plan.bytes_lower_bound,
            resume_step: preparing.resume_step,
        };
        if let Some(origin) = &preparing.origin {
            self.went_back(ctx, &origin.id, preparing.epoch);
        }
        self.ledger.begin_epoch(layout);
        self.ledger.may_have_missed(preparing.resume_step);
        self.set_layout(layout.clone());
        self.record.ever_committed = true;
        if preparing.resume_step > self.committed {
            self.committed = preparing.resume_step;
            self.vote = preparing.vote;
        }
        self.strikes.clear();
        self.digest_strikes = 0;
        self.ahead = None;
        self.vain_joins = 0;
        ctx.notify(&self.record.name, notice);
        self.set_phase(ctx, Phase::Running, "");
        self.persist(ctx);
        for member in &preparing.members {
            self.resume(ctx, member);
        }
        for worker in &leaving {
            self.stop_worker(ctx, worker, "its place is gone");
        }
        self.resume_step = preparing.resume_step;
        self.stage = Stage::Running;
    }

    /// The committed layout is the worker's to train with.
    pub(crate) fn resume(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey) {
        let epoch = self.epoch();
        if let Some(mut worker) = self.workers.get_mut(key) {
            worker.member_since.get_or_insert(ctx.now);
            worker.joined_by = None;
            worker.stopped = false;
            worker.completed = None;
            worker.last_progress = ctx.now;
        }
        self.observe_phase(key, WorkerPhase::Training, epoch);
        ctx.out.push(Command::Resume { job: self.record.name.clone(), worker: key.clone(), epoch });
    }

    /// Keeps the last reported state in step with what is known since.
    pub(crate) fn observe_phase(&mut self, key: &WorkerKey, phase: WorkerPhase, epoch: Epoch) {
        let mut worker = self.workers.get_mut(key);
        if let Some(state) = worker.as_mut().and_then(|worker| worker.state.as_mut()) {
            state.phase = phase;
            match phase {
                WorkerPhase::Preparing | WorkerPhase::Ready => state.ready_epoch = epoch,
                WorkerPhase::Opening
                | WorkerPhase::Idle
                | WorkerPhase::Training
                | WorkerPhase::Quiesced
                | WorkerPhase::Completed => state.epoch = epoch,
            }
        }
    }

    /// Nobody can have committed a step beyond the job's last.
    pub(crate) fn plausible_step(&self, step: Step) -> bool {
        step.0 <= self.spec.run.steps
    }

    /// What it holds is of before the job went back to a checkpoint.
    pub(crate) fn is_given_up(&self, state: &WorkerState) -> bool {
        state.epoch < self.record.restored
    }

    /// What a member says it has committed is committed: nobody may go on from below it.
    pub(crate) fn learn_committed(&mut self, key: &WorkerKey, state: &WorkerState) {
        let step = state.holding.step;
        if self.is_member(key)
            && self.plausible_step(step)
            && step >= self.committed
            && !self.is_given_up(state)
        {
            let same = self.vote.filter(|_| step == self.committed);
            self.vote = state.vote.or(same);
            self.committed = step;
        }
    }

    /// Only members commit: whoever is none speaks of an earlier layout, or of an earlier run under this name.
    pub(crate) fn step_committed(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey, report: CommittedStep) {
        let given_up = report.epoch < self.record.restored;
        if !self.plausible_step(report.step) || !self.is_member(key) || given_up {
            return;
        }
        let Some(mut worker) = self.workers.get_mut(key) else {
            return;
        };
        worker.last_progress = ctx.now;
        drop(worker);
        if !report.rolled_forward {
            self.observe_step(ctx, report.epoch, report.step, report.step_ms);
        }
        if report.step >= self.committed {
            self.vote = Some(report.vote);
            self.committed = report.step;
        }
        if let Some(place) = self.place_of_gpu(&key.gpu) {
            for notice in self.ledger.record(place.replica, &report) {
                ctx.notify(&self.record.name, notice);
            }
        }
        // The next change may have begun meanwhile.
        let trained = match &self.stage {
            Stage::Running | Stage::Closing(_) => report.epoch == self.epoch() && !report.rolled_forward,
            Stage::Pending
            | Stage::Starting { .. }
            | Stage::Planning(_)
            | Stage::Preparing(_)
            | Stage::Waiting { .. }
            | Stage::Draining { .. }
            | Stage::Ended
            | Stage::Rebuilding { .. } => false,
        };
        if trained && report.step > self.resume_step {
            self.recovered(ctx);
        }
    }
}
