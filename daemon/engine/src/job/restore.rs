//! Going back to a checkpoint: on request, or when units have no live holder and the job's file says so.
//!
//! It takes the usual path. The plan is one of nobody who holds anything, and every member takes what it shall own out of
//! the checkpoint instead of making it from the seed (NO-GUESS: a checkpoint is a copy like any other, of an older step).
//! What members still hold stays as it is until the commit. From then on nothing that was said under an earlier epoch
//! counts: those steps were given up.

use super::ledger::Ledger;
use super::{Job, Preparing, Stage};
use crate::state::Ctx;
use crate::{Notice, Refusal, Time};
use reknit_layout::job::{CheckpointSpec, Restore};
use reknit_layout::{CheckpointId, Epoch, Step, WorkerKey};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A checkpoint to resume from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) id: CheckpointId,
    /// Where workers find it.
    pub(crate) folder: Arc<str>,
}

/// What is known of the job's checkpoints.
#[derive(Debug, Clone, Default)]
pub(crate) struct Checkpoints {
    /// The complete ones, the last written first, as workers found them, and behind them the one that the job began with.
    pub(crate) known: Vec<CheckpointId>,
    /// When the first of them was.
    written: Time,
    /// Those that could not be read.
    unreadable: BTreeSet<CheckpointId>,
    /// The next plan shall go back to it.
    wish: Option<CheckpointId>,
}

impl Checkpoints {
    pub(crate) fn of(spec: &CheckpointSpec) -> Self {
        Self { known: spec.origin().into_iter().collect(), ..Self::default() }
    }

    pub(crate) fn newest(&self) -> Option<&CheckpointId> {
        self.known.iter().find(|id| !self.unreadable.contains(id))
    }

    fn of_step(&self, step: Option<Step>) -> Option<&CheckpointId> {
        match step {
            None => self.newest(),
            Some(step) => self.known.iter().find(|id| id.step == step),
        }
    }
}

impl Job {
    /// What the next plan starts from if not from what is held: where the job shall go back to, or what it shall begin with.
    pub(crate) fn origin(&self) -> Option<Origin> {
        let checkpoint = &self.spec.checkpoint;
        let first = checkpoint.origin();
        let id = match &self.checkpoints.wish {
            Some(wish) => wish.clone(),
            None => first.clone().filter(|_| !self.record.ever_committed)?,
        };
        let folder = if first.as_ref() == Some(&id) {
            checkpoint.from.clone()
        } else {
            format!("{}/{id}", checkpoint.folder(&self.record.name.0)?)
        };
        Some(Origin { id, folder: folder.into() })
    }

    /// A worker has looked into the job's folder. One that comes back may have done so long ago, and one of an earlier run
    /// under this name knows that run's.
    pub(crate) fn checkpoints_found(
        &mut self,
        ctx: &mut Ctx<'_>,
        key: &WorkerKey,
        mut ids: Vec<CheckpointId>,
        written: Time,
    ) {
        let late = written < self.checkpoints.written;
        ids.extend(self.spec.checkpoint.origin());
        if !self.is_of_this_run(key) || late || self.checkpoints.known == ids {
            return;
        }
        self.checkpoints.written = written;
        let newest = self.checkpoints.known.first().cloned();
        self.checkpoints.known = ids;
        if let Some(id) = self.checkpoints.known.first().filter(|id| Some(*id) != newest.as_ref()) {
            let text = format!("checkpoint of step {} is complete", id.step);
            ctx.notify(&self.record.name, Notice::Note(text));
        }
    }

    /// A worker could not write its part of the checkpoint of `step`, or not read it. Without a part there is no checkpoint;
    /// training goes on.
    pub(crate) fn no_checkpoint(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey, step: Step, reason: &str) {
        if !self.is_of_this_run(key) {
            return;
        }
        let text = format!("no checkpoint of step {step}: {}: {reason}", self.name_of(key));
        ctx.notify(&self.record.name, Notice::Note(text));
        let Stage::Preparing(Preparing { origin: Some(origin), .. }) = &self.stage else { return };
        if origin.id.step != step {
            return;
        }
        let id = origin.id.clone();
        if self.checkpoints.wish.take().is_none() {
            // There is nothing else to begin with.
            self.fail(ctx, &format!("{}: {reason}", self.name_of(key)));
            return;
        }
        self.checkpoints.unreadable.insert(id);
        self.suspect_plane(ctx, key, None, reason);
    }

    fn is_of_this_run(&self, key: &WorkerKey) -> bool {
        self.workers.get(key).is_some() && key.incarnation > self.record.earlier_incarnations
    }

    /// An operator's wish.
    pub(crate) fn restore(&mut self, ctx: &mut Ctx<'_>, step: Option<Step>) {
        if self.why_not_restore(step).is_some() {
            return;
        }
        let Some(id) = self.checkpoints.of_step(step).cloned() else { return };
        self.checkpoints.unreadable.remove(&id);
        if self.incidents.current().next().is_none() {
            self.plan_wish(ctx, &format!("restore of the checkpoint of step {}", id.step));
        }
        let step = id.step;
        self.checkpoints.wish = Some(id);
        if let Stage::Waiting { .. } = self.stage {
            self.plan(ctx);
        } else {
            self.pause(ctx, &format!("the checkpoint of step {step} is restored"));
        }
    }

    pub(crate) fn why_not_restore(&self, step: Option<Step>) -> Option<Refusal> {
        let (name, phase) = (&self.record.name, self.record.phase);
        let refuse = |text| Some(Refusal::FailedPrecondition(text));
        if phase.ended() {
            return refuse(format!(
                "job `{name}` has ended: submit it again with `reknit job submit --from CHECKPOINT`"
            ));
        }
        if self.checkpoints.of_step(step).is_none() {
            let steps: Vec<_> = self.checkpoints.known.iter().map(|id| id.step.to_string()).collect();
            let step = step.map_or(String::new(), |step| format!(" of step {step}"));
            let known = if steps.is_empty() { "none".to_owned() } else { steps.join(", ") };
            return refuse(format!(
                "job `{name}` has no complete checkpoint{step} that can be read; complete: {known} (of steps, the last written \
                 first); [checkpoint] dir and every_steps in the job file say where and when they are written"
            ));
        }
        let waits = matches!(self.stage, Stage::Waiting { .. });
        if waits || self.may_change() {
            return None;
        }
        refuse(format!(
            "job `{name}` is in a change or does not train ({phase:?}): try again when it is running or waiting"
        ))
    }

    /// There is no plan, since units have no live holder: whether the newest checkpoint is gone back to.
    pub(crate) fn fall_back(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let newest = match self.spec.checkpoint.restore {
            Restore::Ask => None,
            Restore::Act => self.checkpoints.newest().cloned(),
        };
        let falls = newest.is_some();
        if falls {
            self.checkpoints.wish = newest;
            self.plan(ctx);
        }
        falls
    }

    /// What an operator can do about units without a live holder.
    pub(crate) fn ways_out(&self, at: Step) -> String {
        let name = &self.record.name;
        match self.checkpoints.newest() {
            Some(id) => format!(
                "it goes on if a worker that holds them is heard again, or from the newest checkpoint, of step {} ({} steps \
                 back): `reknit job restore {name}`",
                id.step,
                at.0.saturating_sub(id.step.0)
            ),
            None => "it goes on only if a worker that holds them is heard again, as it has no checkpoint; otherwise stop \
                     the job and submit it again from its beginning"
                .to_owned(),
        }
    }

    /// The layout that resumes from a checkpoint is committed: the job stands at that step, and what came after it is
    /// given up.
    pub(crate) fn went_back(&mut self, ctx: &mut Ctx<'_>, id: &CheckpointId, epoch: Epoch) {
        let lost = self.committed.0.saturating_sub(id.step.0);
        for incident in self.incidents.recovering(epoch) {
            incident.steps_lost = incident.steps_lost.max(lost);
        }
        let text = match lost {
            0 => format!("begins with the checkpoint of step {}", id.step),
            lost => format!("goes back to the checkpoint of step {}: {lost} steps are lost", id.step),
        };
        ctx.notify(&self.record.name, Notice::Note(text));
        self.record.restored = epoch;
        self.committed = id.step;
        self.vote = None;
        self.checkpoints.wish = None;
        self.ledger = Ledger::new(self.spec.batch.global);
    }
}
