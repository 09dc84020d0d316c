//! How a job ends: stopped, completed or failed.

use super::worker::Completed;
use super::{Job, Stage};
use crate::state::Ctx;
use crate::{Phase, Time, WorkerPhase};
use reknit_layout::{Epoch, Step, WorkerKey};
use std::collections::BTreeSet;

impl Job {
    pub(crate) fn stop(&mut self, ctx: &mut Ctx<'_>) {
        match &self.stage {
            Stage::Ended | Stage::Draining { .. } => return,
            Stage::Pending
            | Stage::Starting { .. }
            | Stage::Running
            | Stage::Closing(_)
            | Stage::Planning(_)
            | Stage::Preparing(_)
            | Stage::Waiting { .. }
            | Stage::Rebuilding { .. } => {}
        }
        self.set_phase(ctx, Phase::Draining, "stopped by an operator");
        self.keep_progress();
        self.persist(ctx);
        self.stage = Stage::Draining { not_before: ctx.now };
        self.stop_all(ctx, "the job is stopped");
    }

    fn stop_all(&mut self, ctx: &mut Ctx<'_>, reason: &str) {
        let keys: Vec<_> = self.workers.keys().cloned().collect();
        for key in keys {
            self.stop_worker(ctx, &key, reason);
        }
    }

    pub(crate) fn try_end_draining(&mut self, ctx: &mut Ctx<'_>, not_before: Time) -> bool {
        let done = self.workers.is_empty() && ctx.now >= not_before;
        if done {
            self.end(ctx, Phase::Stopped, "stopped by an operator");
        }
        done
    }

    pub(crate) fn completed(&mut self, key: &WorkerKey, epoch: Epoch, step: Step, digest: String) {
        if epoch != self.epoch() || step.0 < self.spec.run.steps {
            return;
        }
        let vote = self.vote.filter(|_| step == self.committed);
        if let Some(mut worker) = self.workers.get_mut(key) {
            worker.completed = Some(Completed { digest: Some(digest) });
            // Should the job have to recover once more, this is what it holds.
            if let Some(state) = worker.state.as_mut().filter(|state| state.epoch == epoch) {
                (state.holding.step, state.prepared, state.attempted) = (step, step, step);
                state.vote = vote;
            }
        }
        self.observe_phase(key, WorkerPhase::Completed, epoch);
    }

    /// Every member has committed the last step.
    pub(crate) fn try_complete(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if self.workers.completed() < self.size() {
            return false;
        }
        let members = self.members();
        let mut digests = BTreeSet::new();
        for member in &members {
            match self.workers.get(member).map(|worker| &worker.completed) {
                Some(Some(completed)) => digests.extend(completed.digest.clone()),
                Some(None) | None => return false,
            }
        }
        if members.is_empty() {
            return false;
        }
        self.recovered(ctx);
        if digests.len() > 1 {
            let text = format!(
                "REPLICATED violated: {} different sets of replicated parameters after the last step",
                digests.len()
            );
            self.fail(ctx, &text);
        } else {
            self.end(ctx, Phase::Completed, "");
        }
        true
    }

    pub(crate) fn fail(&mut self, ctx: &mut Ctx<'_>, why: &str) {
        self.end(ctx, Phase::Failed, why);
    }

    fn end(&mut self, ctx: &mut Ctx<'_>, phase: Phase, explanation: &str) {
        self.set_phase(ctx, phase, explanation);
        self.keep_progress();
        self.persist(ctx);
        self.stop_all(ctx, "the job has ended");
        self.close_incidents(ctx);
        self.stage = Stage::Ended;
    }

    /// For those who ask when its workers are gone, and perhaps this daemon too.
    fn keep_progress(&mut self) {
        if self.committed > self.record.committed_step {
            self.record.committed_step = self.committed;
            self.record.last_loss = self.vote.map(|vote| vote.loss);
        }
    }
}
