//! Closing an epoch, planning the next from what is held, and preparing it.

use super::incidents::Sighting;
use super::worker::epoch_in_hand;
use super::{Closing, Job, Planning, Preparing, Stage};
use crate::state::Ctx;
use crate::{Command, IncidentKind, Participant, Phase, StepVote, WorkerPhase, WorkerState};
use reknit_layout::{DraftError, Epoch, Holding, Plan, PlanError, Step, WorkerKey};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Preparations that may fail because of the same worker before it is fenced.
const STRIKES: u32 = 3;

/// What the survivors can go on from.
pub(crate) struct Held {
    pub(crate) step: Step,
    pub(crate) vote: Option<StepVote>,
    pub(crate) holdings: BTreeMap<WorkerKey, Holding>,
    /// A survivor had begun a step that nobody committed.
    step_lost: bool,
}

impl Job {
    /// Stores that the epoch is over, then tells everyone engaged in it.
    pub(crate) fn close(
        &mut self,
        ctx: &mut Ctx<'_>,
        epoch: Epoch,
        engaged: BTreeSet<WorkerKey>,
        reason: &str,
    ) {
        self.set_phase(ctx, Phase::Quiescing, reason);
        self.ahead = None;
        self.record.last_epoch = self.record.last_epoch.max(epoch);
        self.persist(ctx);
        let deadline = ctx.now.after(ctx.timeouts.quiesce());
        let awaited = self.engage(engaged);
        for worker in &awaited {
            self.send_close(ctx, worker, epoch, reason);
        }
        self.stage = Stage::Closing(Closing {
            epoch,
            paused: false,
            reason: reason.to_owned(),
            awaited,
            deadline: Some(deadline),
        });
    }

    /// Asks all members to stop together at a step boundary.
    pub(crate) fn pause(&mut self, ctx: &mut Ctx<'_>, reason: &str) {
        let epoch = self.epoch();
        self.set_phase(ctx, Phase::Quiescing, reason);
        self.persist(ctx);
        let awaited = self.engage(self.members());
        for worker in &awaited {
            self.send_pause(ctx, worker, epoch);
        }
        self.stage = Stage::Closing(Closing {
            epoch,
            paused: true,
            reason: reason.to_owned(),
            awaited,
            deadline: Some(ctx.now.after(ctx.timeouts.pause())),
        });
    }

    /// Those of `engaged` that are still there; none counts as stopped any more.
    fn engage(&mut self, engaged: BTreeSet<WorkerKey>) -> BTreeSet<WorkerKey> {
        let mut awaited = BTreeSet::new();
        for key in engaged {
            if let Some(mut worker) = self.workers.get_mut(&key) {
                worker.stopped = false;
                awaited.insert(key);
            }
        }
        awaited
    }

    pub(crate) fn send_close(&self, ctx: &mut Ctx<'_>, worker: &WorkerKey, epoch: Epoch, reason: &str) {
        ctx.out.push(Command::CloseEpoch {
            job: self.record.name.clone(),
            worker: worker.clone(),
            epoch,
            reason: reason.to_owned(),
        });
    }

    /// Ends what the worker says it is engaged in. A member that is ready for the committed layout takes it first: the
    /// others may have given up already what it was sent (ONLY-COPY).
    pub(crate) fn close_own(
        &mut self,
        ctx: &mut Ctx<'_>,
        key: &WorkerKey,
        state: &WorkerState,
        reason: &str,
    ) {
        let committed = state.phase == WorkerPhase::Ready && state.ready_epoch == self.epoch();
        if committed && self.is_member(key) {
            self.resume(ctx, key);
        }
        self.send_close(ctx, key, epoch_in_hand(state), reason);
    }

    pub(crate) fn send_pause(&self, ctx: &mut Ctx<'_>, worker: &WorkerKey, epoch: Epoch) {
        ctx.out.push(Command::Pause { job: self.record.name.clone(), worker: worker.clone(), epoch });
    }

    /// A planned change became a loss: nobody may wait for the step boundary any longer.
    pub(crate) fn escalate(&mut self, ctx: &mut Ctx<'_>, reason: &str) {
        let deadline = ctx.now.after(ctx.timeouts.quiesce());
        let Stage::Closing(closing) = &mut self.stage else {
            return;
        };
        if !closing.paused {
            return;
        }
        closing.paused = false;
        closing.deadline = Some(deadline);
        reason.clone_into(&mut closing.reason);
        // What was got ready ends with it.
        closing.epoch = self.ahead.take().map_or(closing.epoch, |ahead| ahead.epoch.max(closing.epoch));
        let (epoch, awaited) = (closing.epoch, closing.awaited.clone());
        self.set_phase(ctx, Phase::Quiescing, reason);
        self.persist(ctx);
        for worker in &awaited {
            self.send_close(ctx, worker, epoch, reason);
        }
    }

    /// Counts who is accounted for; when all are, plans.
    pub(crate) fn account(&mut self, ctx: &mut Ctx<'_>) -> bool {
        // The boundary that they paused at was the end.
        if self.try_complete(ctx) {
            return true;
        }
        let Stage::Closing(closing) = &mut self.stage else {
            return false;
        };
        let late = closing.deadline.is_some_and(|deadline| ctx.now >= deadline);
        if late && closing.paused {
            let sighting = Sighting {
                kind: IncidentKind::Frozen,
                signal: format!(
                    "no common step boundary within {} ms of a pause",
                    ctx.timeouts.pause().as_millis()
                ),
                reporter: "reknitd".to_owned(),
            };
            self.suspect(ctx, sighting);
            self.escalate(ctx, "a member did not pause");
            return true;
        }
        if late {
            closing.deadline = None;
            let silent = closing.awaited.clone();
            self.condemn(ctx, &silent);
            return true;
        }
        // Whoever can still answer has: from here on only confirmations of kills are awaited.
        let expected = closing.awaited.iter().any(|key| {
            let worker = self.workers.get(key);
            worker.is_some_and(|worker| worker.session && !worker.fencing())
        });
        let done = closing.awaited.is_empty();
        if !expected {
            let now = ctx.now;
            for incident in self.incidents.current() {
                let now = incident.not_before(now);
                incident.quiesced.get_or_insert(now);
            }
        }
        if done {
            self.stamp(ctx.now, |incident| &mut incident.fenced);
            match self.take_ahead(ctx) {
                Some((planning, plan)) => self.go_ahead(ctx, planning, plan),
                None => self.plan(ctx),
            }
        }
        done
    }

    /// They neither stopped nor exited in time. One whose units nobody else has is not killed: only while it lives can
    /// the job go on, so it is waited for until it answers or is gone.
    fn condemn(&mut self, ctx: &mut Ctx<'_>, silent: &BTreeSet<WorkerKey>) {
        for key in silent {
            let Some(worker) = self.workers.get(key) else {
                continue;
            };
            if worker.fencing() {
                continue;
            }
            if !self.can_do_without(key) {
                let explanation = format!(
                    "waits for {}, which does not answer: the job cannot go on without what it holds, so it is not killed; if \
                     it is beyond help, stop the job",
                    self.name_of(key)
                );
                self.set_phase(ctx, Phase::Waiting, &explanation);
                self.persist(ctx);
                continue;
            }
            let (kind, why) = if self.is_out_of_reach(ctx.cluster, key) {
                (IncidentKind::NodeLost, "its node did not answer")
            } else {
                (IncidentKind::Frozen, "did not stop")
            };
            let sighting = Sighting {
                kind,
                signal: format!("{why} within {} ms", ctx.timeouts.quiesce().as_millis()),
                reporter: "reknitd".to_owned(),
            };
            self.accuse(ctx, key, sighting);
            self.fence(ctx, key);
        }
    }

    /// The roll-forward rule: if any survivor committed step k, all had prepared k and the others commit it too;
    /// otherwise k is discarded by all and its samples run again.
    pub(crate) fn held(&self) -> Held {
        let states = || {
            let members = self.workers.iter();
            members
                .filter(|(key, worker)| worker.alive() && worker.stopped && self.is_member(key))
                .filter_map(|(key, worker)| worker.state.as_ref().map(|state| (key, state)))
                .filter(|(_, state)| self.plausible_step(state.holding.step) && !self.is_given_up(state))
        };
        let newest = states().map(|(_, state)| state.holding.step).max();
        // A member may have told the daemon of a commit and died: its vote is known all the same. A committed step
        // is never given up: copies behind it are no source (NO-GUESS).
        let step = newest.unwrap_or_default().max(self.committed);
        let own_vote =
            states().filter(|(_, state)| state.holding.step == step).find_map(|(_, state)| state.vote);
        let vote = own_vote.or(self.vote.filter(|_| self.committed == step));
        let mut holdings = BTreeMap::new();
        for (key, state) in states() {
            let behind_by_one = step.0.checked_sub(1) == Some(state.holding.step.0);
            let rolls = behind_by_one && state.prepared == step && vote.is_some();
            if (state.holding.step == step || rolls) && !state.holding.units.is_empty() {
                let mut holding = state.holding.clone();
                holding.step = step;
                holdings.insert(key.clone(), holding);
            }
        }
        let step_lost = states().any(|(_, state)| state.attempted > step);
        Held { step, vote, holdings, step_lost }
    }

    /// Asks for a plan under a fresh epoch, from what is held now.
    pub(crate) fn plan(&mut self, ctx: &mut Ctx<'_>) {
        let origin = self.origin();
        let fresh = !self.record.ever_committed || origin.is_some();
        let members = self.candidates(ctx.cluster);
        let held = if fresh {
            let step = origin.as_ref().map_or(Step(0), |origin| origin.id.step);
            Held { step, vote: None, holdings: BTreeMap::new(), step_lost: false }
        } else {
            self.held()
        };
        for incident in self.incidents.current() {
            // A second attempt finds the step of the first already given up.
            incident.steps_lost = incident.steps_lost.max(u64::from(held.step_lost));
        }
        self.set_phase(ctx, Phase::Resharding, "");
        let epoch = self.reserve_epoch(ctx);
        self.stage = Stage::Planning(Planning {
            epoch,
            members: members.clone(),
            holders: held.holdings.keys().cloned().collect(),
            resume_step: held.step,
            vote: held.vote,
            origin,
        });
        ctx.out.push(Command::Plan {
            job: self.record.name.clone(),
            epoch,
            spec: self.spec.clone(),
            workers: reknit_layout::candidates(members, held.holdings),
            topology: Arc::new(ctx.cluster.topology()),
            fresh,
        });
    }

    pub(crate) fn on_planned(&mut self, ctx: &mut Ctx<'_>, epoch: Epoch, result: Result<Plan, PlanError>) {
        if self.planned_ahead(ctx, epoch, &result) {
            return;
        }
        // Otherwise it answers a question that is no longer asked.
        let Stage::Planning(planning) = &self.stage else {
            return;
        };
        if planning.epoch != epoch {
            return;
        }
        let planning = planning.clone();
        self.stamp(ctx.now, |incident| &mut incident.planned);
        match result {
            Ok(plan) => self.prepare(ctx, planning, Arc::new(plan)),
            Err(PlanError::Unrecoverable(_)) if self.fall_back(ctx) => {}
            Err(error) => self.wait(ctx, planning, &error),
        }
    }

    fn wait(&mut self, ctx: &mut Ctx<'_>, planning: Planning, error: &PlanError) {
        let last = self.losses.iter().max_by_key(|(_, loss)| loss.at);
        let last = last.map_or(String::new(), |(gpu, loss)| match self.place_of_gpu(gpu) {
            Some(place) => format!(" (the last to go was worker {place}: {})", loss.sighting.signal),
            None => String::new(),
        });
        let explanation = match error {
            PlanError::Unrecoverable(_) => format!(
                "{error} at step {}: {}; restarted workers come back empty{last}",
                planning.resume_step,
                self.ways_out(planning.resume_step)
            ),
            PlanError::Draft(DraftError::TooFew { .. }) => {
                format!("{error}: it goes on by itself when enough GPUs are back{last}")
            }
            PlanError::Draft(DraftError::Memory { .. }) => {
                format!("{error}. It goes on by itself when a plan fits the GPUs that are there{last}")
            }
        };
        self.set_phase(ctx, Phase::Waiting, &explanation);
        self.persist(ctx);
        for incident in self.incidents.current() {
            incident.advice.clone_from(&explanation);
        }
        self.persist_incidents(ctx);
        self.stage = Stage::Waiting { tried: planning.members };
    }

    /// Another set of workers is there than the one there was no plan for.
    pub(crate) fn try_again(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let Stage::Waiting { tried } = &self.stage else {
            return false;
        };
        if !self.stirred {
            return false;
        }
        let changed = self.candidates(ctx.cluster) != *tried;
        if changed {
            self.plan(ctx);
        }
        changed
    }

    /// Everybody stopped as it was planned, and has joined already.
    fn go_ahead(&mut self, ctx: &mut Ctx<'_>, planning: Planning, plan: Arc<Plan>) {
        self.set_phase(ctx, Phase::Resharding, "");
        self.stamp(ctx.now, |incident| &mut incident.planned);
        self.prepare(ctx, planning, plan);
    }

    /// Who trains under the plan or sends for it, in the order of workers.
    pub(crate) fn participants(&self, plan: &Plan) -> Arc<Vec<Participant>> {
        let members = plan.layout.members().map(|(_, member)| &member.worker);
        let keys: BTreeSet<_> = members.chain(plan.transfers.iter().map(|transfer| &transfer.from)).collect();
        let found = keys.into_iter().filter_map(|key| {
            let endpoint = self.workers.get(key)?.endpoint.clone()?;
            Some(Participant { worker: key.clone(), endpoint })
        });
        Arc::new(found.collect())
    }

    fn prepare(&mut self, ctx: &mut Ctx<'_>, planning: Planning, plan: Arc<Plan>) {
        let members: BTreeSet<_> = plan.layout.members().map(|(_, member)| member.worker.clone()).collect();
        let participants = self.participants(&plan);
        for incident in self.incidents.current() {
            incident.bytes_moved = plan.bytes_moved;
            incident.bytes_lower_bound = plan.bytes_lower_bound;
        }
        let preparing = Preparing {
            epoch: planning.epoch,
            plan,
            members,
            participants,
            resume_step: planning.resume_step,
            vote: planning.vote,
            deadline: ctx.now.after(match planning.origin {
                Some(_) => ctx.timeouts.load(),
                None => ctx.timeouts.ready(),
            }),
            origin: planning.origin,
            ready: BTreeMap::new(),
        };
        let orders = preparing.participants.iter();
        ctx.out.extend(orders.map(|participant| preparing.order(&self.record.name, &participant.worker)));
        self.stage = Stage::Preparing(preparing);
    }

    /// `blamed` kept a preparation from succeeding. One that does so again and again is fenced.
    pub(crate) fn strike(&mut self, ctx: &mut Ctx<'_>, blamed: &WorkerKey) {
        let strikes = self.strikes.entry(blamed.clone()).or_default();
        *strikes += 1;
        if *strikes < STRIKES {
            return;
        }
        let sighting = Sighting {
            kind: IncidentKind::Frozen,
            signal: format!("{STRIKES} preparations failed because of it"),
            reporter: "reknitd".to_owned(),
        };
        self.accuse(ctx, blamed, sighting);
        self.fence(ctx, blamed);
    }
}
