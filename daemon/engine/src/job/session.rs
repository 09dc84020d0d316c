//! A worker's session: it comes and goes without disturbing training, and on its return views are compared.

use super::incidents::Sighting;
use super::worker::{Completed, Worker, epoch_in_hand};
use super::{Job, Stage};
use crate::state::Ctx;
use crate::{Command, Endpoint, IncidentKind, JobName, WorkerPhase, WorkerState};
use reknit_layout::{NodeName, WorkerKey};

impl Job {
    pub(crate) fn worker_spawned(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey, pid: u32) {
        let Some(mut worker) = self.workers.get_mut(key) else {
            return;
        };
        worker.pid = pid;
        drop(worker);
        self.notify_worker(ctx, key, "started");
    }

    /// A member trains on without a session. A newcomer must be back in time to be of use.
    pub(crate) fn disconnected(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey) {
        let member = self.is_member(key);
        let Some(mut worker) = self.workers.get_mut(key) else {
            return;
        };
        worker.session = false;
        if !member {
            worker.joined_by = Some(ctx.now.after(ctx.timeouts.start()));
        }
        let ended = worker.unlisted.then(|| worker.node.clone());
        drop(worker);
        self.forget_ahead_with(key);
        if let Some(node) = ended {
            self.had_ended(ctx, &node, key);
        }
    }

    /// Whether a worker nothing is known of may be one that an earlier daemon started, or, while the job waits, a member of
    /// its layout that was taken as lost and is not: what it holds may be all that is missing.
    pub(crate) fn plausible(&self, key: &WorkerKey) -> bool {
        match &self.stage {
            Stage::Rebuilding { .. } => {
                self.place_of_gpu(&key.gpu).is_some() && key.incarnation <= self.record.last_incarnation
            }
            Stage::Waiting { .. } => self.is_member(key),
            Stage::Pending
            | Stage::Starting { .. }
            | Stage::Running
            | Stage::Closing(_)
            | Stage::Planning(_)
            | Stage::Preparing(_)
            | Stage::Draining { .. }
            | Stage::Ended => false,
        }
    }

    /// False when the worker is none of this job: a zombie.
    pub(crate) fn connected(
        &mut self,
        ctx: &mut Ctx<'_>,
        key: &WorkerKey,
        node: &NodeName,
        endpoint: Endpoint,
        pid: u32,
        state: WorkerState,
    ) -> bool {
        if self.workers.get(key).is_none() {
            if !self.plausible(key) {
                return false;
            }
            let worker = Worker::new(node.clone(), ctx.now);
            self.workers.insert(key.clone(), worker);
        }
        self.learn_committed(key, &state);
        let member = self.is_member(key);
        if member {
            self.ledger.may_have_missed(state.holding.step);
        }
        let Some(mut worker) = self.workers.get_mut(key) else {
            return false;
        };
        worker.endpoint = Some(endpoint);
        worker.pid = pid;
        worker.session = true;
        worker.unlisted = false;
        if state.phase != WorkerPhase::Opening {
            worker.joined_by = None;
        }
        worker.last_progress = ctx.now;
        worker.spoke = worker.spoke.map(|_| ctx.now);
        if member {
            worker.member_since.get_or_insert(ctx.now);
        }
        if !worker.alive() {
            drop(worker);
            self.repeat_end(ctx, key);
            return true;
        }
        if state.phase == WorkerPhase::Idle {
            worker.stopped = true;
        }
        worker.state.get_or_insert_with(|| state.clone());
        drop(worker);
        self.reconcile(ctx, key, state);
        if let Some(worker) = self.workers.get(key) {
            self.notify_worker(ctx, key, worker.describe());
        }
        true
    }

    /// Its agent's list of running workers: who is not on it has ended meanwhile, at the latest when its
    /// session ends.
    pub(crate) fn agent_listed(
        &mut self,
        ctx: &mut Ctx<'_>,
        node: &NodeName,
        listed: &[(JobName, WorkerKey, u32)],
    ) {
        let runs =
            |key: &WorkerKey| listed.iter().any(|(job, worker, _)| *job == self.record.name && worker == key);
        let (there, away): (Vec<_>, Vec<_>) = self.workers.on_node(node).partition(|(key, _)| runs(key));
        let again: Vec<_> =
            there.into_iter().filter(|(_, worker)| worker.fencing()).map(|(key, _)| key.clone()).collect();
        let away: Vec<_> = away.into_iter().map(|(key, worker)| (key.clone(), worker.session)).collect();
        for worker in again {
            let (node, job, epoch) = (node.clone(), self.record.name.clone(), self.record.last_epoch);
            ctx.out.push(Command::Fence { node, job, worker, epoch });
        }
        for (key, session) in away {
            if !session {
                self.had_ended(ctx, node, &key);
            } else if let Some(mut worker) = self.workers.get_mut(&key) {
                worker.unlisted = true;
            }
        }
    }

    fn had_ended(&mut self, ctx: &mut Ctx<'_>, node: &NodeName, key: &WorkerKey) {
        let sighting = Sighting {
            kind: IncidentKind::WorkerExited,
            signal: "had ended when its agent came back".to_owned(),
            reporter: format!("agent of {node}"),
        };
        self.gone(ctx, key, sighting);
    }

    /// It was told to leave, or is being killed, and speaks again.
    fn repeat_end(&self, ctx: &mut Ctx<'_>, key: &WorkerKey) {
        ctx.out.push(Command::Stop {
            job: self.record.name.clone(),
            worker: key.clone(),
            epoch: self.record.last_epoch,
            reason: "it has no place any more".to_owned(),
        });
    }

    /// What it says of itself against what it was told.
    fn reconcile(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey, state: WorkerState) {
        match &self.stage {
            Stage::Running if self.is_member(key) => self.reconcile_member(ctx, key, state),
            Stage::Closing(closing) if closing.awaited.contains(key) => {
                let (epoch, paused) = (closing.epoch, closing.paused);
                let reason = closing.reason.clone();
                match state.phase {
                    WorkerPhase::Opening => self.await_no_more(key),
                    WorkerPhase::Quiesced | WorkerPhase::Completed | WorkerPhase::Idle => {
                        self.quiesced(ctx, key, state);
                    }
                    WorkerPhase::Training if paused => self.send_pause(ctx, key, epoch),
                    WorkerPhase::Training | WorkerPhase::Preparing | WorkerPhase::Ready => {
                        self.close_own(ctx, key, &state, &reason);
                    }
                }
            }
            Stage::Preparing(preparing) if preparing.involves(key) => {
                let counted = preparing.ready.contains_key(key);
                let same = state.ready_epoch == preparing.epoch;
                match state.phase {
                    WorkerPhase::Preparing if same => {}
                    WorkerPhase::Ready if same && counted => {}
                    // Its Ready was lost with the old session, and with it the digest: once more under a new epoch.
                    WorkerPhase::Ready if same => {
                        self.suspect_plane(ctx, key, None, "its session ended while it got ready");
                    }
                    // What it said before was older than it looked, and the plan is made of it.
                    WorkerPhase::Training => {
                        self.suspect_plane(ctx, key, None, "it trains and was taken to have stopped");
                    }
                    WorkerPhase::Opening
                    | WorkerPhase::Idle
                    | WorkerPhase::Quiesced
                    | WorkerPhase::Completed
                    | WorkerPhase::Preparing
                    | WorkerPhase::Ready => {
                        ctx.out.push(preparing.order(&self.record.name, key));
                    }
                }
            }
            Stage::Running
            | Stage::Starting { .. }
            | Stage::Waiting { .. }
            | Stage::Planning(_)
            | Stage::Closing(_)
            | Stage::Preparing(_) => self.keep_stopped(ctx, key, state),
            Stage::Rebuilding { .. } => {
                if let Some(mut worker) = self.workers.get_mut(key) {
                    worker.state = Some(state);
                }
            }
            Stage::Draining { .. } => self.stop_worker(ctx, key, "the job is stopped"),
            Stage::Ended => self.stop_worker(ctx, key, "the job has ended"),
            Stage::Pending => {}
        }
    }

    /// Somebody without a part in a layout: new, or stopped and waiting. Anything else of it is over.
    fn keep_stopped(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey, state: WorkerState) {
        let stopped = match state.phase {
            WorkerPhase::Opening => false,
            WorkerPhase::Idle | WorkerPhase::Quiesced | WorkerPhase::Completed => true,
            WorkerPhase::Training | WorkerPhase::Preparing | WorkerPhase::Ready => {
                self.close_own(ctx, key, &state, "this epoch is over for the worker");
                false
            }
        };
        if let Some(mut worker) = self.workers.get_mut(key) {
            worker.state = Some(state);
            worker.stopped |= stopped;
        }
    }

    fn reconcile_member(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey, state: WorkerState) {
        let epoch = self.epoch();
        match state.phase {
            WorkerPhase::Training if state.epoch == epoch => {}
            WorkerPhase::Completed if state.epoch == epoch => {
                if let Some(mut worker) = self.workers.get_mut(key) {
                    worker.completed.get_or_insert(Completed { digest: None });
                }
            }
            WorkerPhase::Ready if state.ready_epoch == epoch => self.resume(ctx, key),
            WorkerPhase::Opening
            | WorkerPhase::Idle
            | WorkerPhase::Training
            | WorkerPhase::Quiesced
            | WorkerPhase::Preparing
            | WorkerPhase::Ready
            | WorkerPhase::Completed => {
                let phase = state.phase;
                self.suspect_plane(ctx, key, None, "it came back without training");
                match phase {
                    WorkerPhase::Opening
                    | WorkerPhase::Idle
                    | WorkerPhase::Quiesced
                    | WorkerPhase::Completed => self.quiesced(ctx, key, state),
                    WorkerPhase::Training | WorkerPhase::Preparing | WorkerPhase::Ready => {
                        let own = epoch_in_hand(&state);
                        if own != epoch {
                            self.send_close(ctx, key, own, "this epoch is over");
                        }
                    }
                }
            }
        }
    }
}
