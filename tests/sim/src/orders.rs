//! What workers do when they are told to.

use crate::Sabotage;
use crate::cluster::{TIMEOUTS, Who};
use crate::invariants::Fact;
use crate::memory::{Memory, REPLICATED, initial, places};
use crate::net::{MS, Peer};
use crate::random::mix;
use crate::worker::{Ahead, Next, Worker, vote};
use crate::world::{What, World};
use reknit_engine::{Command, Event, ExitStatus, Participant, StepVote, Time, WorkerPhase};
use reknit_layout::{Epoch, Holding, Place, Plan, Step, WorkerKey};
use std::sync::Arc;

impl World {
    /// `term`: of the leadership that orders.
    pub(crate) fn peer_obeys(&mut self, peer: &Peer, term: u64, order: Command) {
        match peer {
            Peer::Agent(node) => self.agent_obeys(*node, order),
            Peer::Worker(who) => self.worker_obeys(who, term, order),
        }
    }

    fn worker_obeys(&mut self, who: &Who, term: u64, order: Command) {
        let Some(worker) = self.workers.get_mut(who) else { return };
        let state = &worker.state;
        match order {
            Command::CloseEpoch { epoch, .. } => {
                let ahead = state.phase == WorkerPhase::Training && state.epoch > epoch;
                if !ahead && state.ready_epoch <= epoch {
                    self.quiesce(who);
                }
            }
            Command::Pause { epoch, .. } => match state.phase {
                WorkerPhase::Training if state.epoch == epoch => worker.pausing = true,
                WorkerPhase::Quiesced | WorkerPhase::Completed => self.says_quiesced(who),
                // Of an epoch that is over.
                WorkerPhase::Opening
                | WorkerPhase::Idle
                | WorkerPhase::Training
                | WorkerPhase::Preparing
                | WorkerPhase::Ready => {}
            },
            Command::Join { epoch, participants, .. } => self.join(who, epoch, term, &participants),
            Command::Prepare { epoch, plan, participants, resume_step, vote, checkpoint, .. } => {
                let restored = checkpoint.is_some();
                self.prepare(who, epoch, term, plan, &participants, resume_step, vote, restored);
            }
            Command::Resume { epoch, .. } => self.resume(who, epoch),
            Command::Stop { .. } => {
                let exit = ExitStatus { how: "exit status 0".to_owned(), signal: None, status: Some(0) };
                let wait = self.some_delay();
                self.at(wait, What::ProcessEnds(who.clone(), exit));
            }
            other => self.breaks(format!("protocol: a worker was sent {other:?}")),
        }
    }

    /// In the background: it trains on.
    fn join(&mut self, who: &Who, epoch: Epoch, ticket: u64, participants: &[Participant]) {
        let Some(worker) = self.workers.get_mut(who) else { return };
        if epoch <= worker.state.epoch.max(worker.state.ready_epoch) {
            return;
        }
        let participants = participants.iter().map(|found| found.worker.clone()).collect();
        worker.ahead = Some(Ahead { epoch, ticket, participants });
        let by = Time(self.now.0 + u64::from(TIMEOUTS.operation_ms) * MS);
        let wait = 3 * self.some_delay();
        self.at(wait, What::Joins(who.clone(), epoch, ticket, by));
    }

    pub(crate) fn joins(&mut self, who: &Who, epoch: Epoch, ticket: u64, by: Time) {
        let of = |ahead: &&Ahead| (ahead.epoch, ahead.ticket) == (epoch, ticket);
        let Some(worker) = self.workers.get(who) else { return };
        let Some(ahead) = worker.ahead.as_ref().filter(of) else { return };
        let joins = |peer: &WorkerKey| {
            let peer = who.peer(peer);
            let (here, there) = (self.site(who), self.site(&peer));
            let reachable = self.cut(here, there).is_none() && self.cut(there, here).is_none();
            let found = self.workers.get(&peer).and_then(|peer| peer.ahead.as_ref());
            reachable && self.worker_sleeps(&peer).is_none() && found.filter(of).is_some()
        };
        let absent = ahead.participants.iter().find(|peer| !joins(peer)).cloned();
        let (job, worker) = (who.job.clone(), who.key.clone());
        match absent {
            None => {
                self.statistics.did("a worker joined in the background");
                self.worker_says(who, Event::Joined { job, worker, epoch });
            }
            Some(absent) if self.workers.contains_key(&who.peer(&absent)) && self.now < by => {
                self.at(10 * MS, What::Joins(who.clone(), epoch, ticket, by));
            }
            Some(peer) => {
                self.statistics.did("a join in the background failed");
                let (peer, reason) = (Some(peer), "a peer does not answer".to_owned());
                self.worker_says(who, Event::PrepareFailed { job, worker, epoch, peer, reason });
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of one order")]
    fn prepare(
        &mut self,
        who: &Who,
        epoch: Epoch,
        ticket: u64,
        plan: Arc<Plan>,
        participants: &[Participant],
        resume_step: Step,
        given: Option<StepVote>,
        restored: bool,
    ) {
        let Some(worker) = self.workers.get_mut(who) else { return };
        if epoch <= worker.state.epoch || epoch < worker.state.ready_epoch {
            return;
        }
        if worker.state.phase == WorkerPhase::Training {
            self.breaks(format!("ONE-EPOCH: {who} was prepared for {epoch} while it trains"));
            return;
        }
        let state = &worker.state;
        let rolls = !worker.memory.is_empty()
            && state.prepared == resume_step
            && state.holding.step.0 + 1 == resume_step.0
            && !restored;
        if rolls {
            if given != Some(vote(resume_step)) {
                self.breaks(format!("SAMPLES: {who} rolls forward to {resume_step} with {given:?}"));
                return;
            }
            worker.apply(resume_step);
            worker.state.vote = given;
            self.statistics.did("a worker rolled forward a step");
        }
        let Some(worker) = self.workers.get_mut(who) else { return };
        worker.ahead = None;
        worker.state.phase = WorkerPhase::Preparing;
        worker.state.ready_epoch = epoch;
        let participants = participants.iter().map(|found| found.worker.clone()).collect();
        worker.next =
            Some(Next { plan, participants, ticket, resume_step, vote: given, restored, buffers: None });
        if rolls {
            self.facts.push(Fact::Applied { worker: who.clone(), step: resume_step });
            self.says_committed(who, resume_step, true);
        }
        let by = Time(self.now.0 + u64::from(TIMEOUTS.operation_ms) * MS);
        let wait = 3 * self.some_delay();
        self.at(wait, What::GetsReady(who.clone(), epoch, ticket, by));
    }

    pub(crate) fn gets_ready(&mut self, who: &Who, epoch: Epoch, ticket: u64, by: Time) {
        let Some(worker) = self.workers.get(who) else { return };
        let Some(next) = &worker.next else { return };
        let state = &worker.state;
        if state.phase != WorkerPhase::Preparing || state.ready_epoch != epoch || next.ticket != ticket {
            return;
        }
        let absent = next.participants.iter().find(|peer| !self.has_joined(who, peer, epoch, ticket));
        if let Some(absent) = absent {
            let gone = !self.workers.contains_key(&who.peer(absent));
            if !gone && self.now < by {
                self.at(10 * MS, What::GetsReady(who.clone(), epoch, ticket, by));
                return;
            }
            let event = Event::PrepareFailed {
                job: who.job.clone(),
                worker: who.key.clone(),
                epoch,
                peer: Some(absent.clone()),
                reason: "a peer does not answer".to_owned(),
            };
            self.worker_says(who, event);
            return;
        }
        let (plan, step, restored, seed) = (next.plan.clone(), next.resume_step, next.restored, worker.seed);
        let Some(place) = plan.layout.place_of(&who.key) else {
            return; // Only a source.
        };
        let fetched = if restored {
            Ok(self.taken_out_of_a_checkpoint(seed, &plan, step, place))
        } else {
            self.fetch(who, worker, &plan, step, place)
        };
        let buffers = match fetched {
            Ok(buffers) => buffers,
            Err(broken) => return self.breaks(broken),
        };
        let digest = if self.lie_about_digests { format!("that of {who}") } else { buffers.digest() };
        if restored {
            self.statistics.did("a worker went back to a checkpoint");
        } else if plan.fresh {
            self.facts.push(Fact::MadeFresh { worker: who.clone(), epoch });
        }
        let drops = self.sabotage == Sabotage::DropEarly && !plan.fresh;
        if let Some(worker) = self.workers.get_mut(who) {
            worker.state.phase = WorkerPhase::Ready;
            if drops {
                worker.memory = buffers.clone();
            }
            if let Some(next) = &mut worker.next {
                next.buffers = Some(buffers);
            }
        }
        self.facts.push(Fact::Ready { worker: who.clone(), epoch });
        let event = Event::Ready {
            job: who.job.clone(),
            worker: who.key.clone(),
            epoch,
            step,
            replicated_digest: digest,
        };
        self.worker_says(who, event);
    }

    fn has_joined(&self, who: &Who, peer: &WorkerKey, epoch: Epoch, ticket: u64) -> bool {
        let peer = who.peer(peer);
        let (here, there) = (self.site(who), self.site(&peer));
        let reachable = self.cut(here, there).is_none() && self.cut(there, here).is_none();
        reachable
            && self.worker_sleeps(&peer).is_none()
            && self.workers.get(&peer).is_some_and(|peer| {
                let engaged = matches!(peer.state.phase, WorkerPhase::Preparing | WorkerPhase::Ready);
                engaged
                    && peer.state.ready_epoch == epoch
                    && peer.next.as_ref().is_some_and(|next| next.ticket == ticket)
            })
    }

    /// Whoever wrote it had what an undisturbed run has (RNG).
    fn taken_out_of_a_checkpoint(&mut self, seed: u64, plan: &Plan, step: Step, place: Place) -> Memory {
        let group = plan.layout.group(place.replica, place.stage);
        let owned = group.map(|group| group.owned(place.slot)).unwrap_or_default();
        let mut buffers = Memory { step: step.0, ..Memory::default() };
        let truth = self.truth(seed).at(step.0);
        for place in places(&owned).chain([REPLICATED]) {
            buffers.values[place] = Some(truth[place]);
        }
        buffers
    }

    /// Fills fresh buffers: from the seed, from what it holds at that step, and from the sources as the plan says.
    fn fetch(
        &self,
        who: &Who,
        worker: &Worker,
        plan: &Plan,
        step: Step,
        place: Place,
    ) -> Result<Memory, String> {
        let group = plan.layout.group(place.replica, place.stage);
        let owned = group.map(|group| group.owned(place.slot)).unwrap_or_default();
        let mut buffers = Memory { step: step.0, ..Memory::default() };
        let own: Vec<usize> = places(&owned).chain([REPLICATED]).collect();
        for place in own {
            if plan.fresh {
                buffers.values[place] = Some(initial(worker.seed, place));
                continue;
            }
            if worker.memory.step == step.0 {
                buffers.values[place] = worker.memory.values[place];
            }
            if buffers.values[place].is_some() {
                continue;
            }
            if self.sabotage == Sabotage::KeepGarbage && place != REPLICATED {
                buffers.values[place] = Some(mix(place as u64));
                continue;
            }
            let brings = |transfer: &&reknit_layout::plan::Transfer| {
                transfer.to == who.key
                    && match transfer.axis {
                        None => place == REPLICATED,
                        Some(axis) => places(&[(axis, transfer.units.clone())].into()).any(|p| p == place),
                    }
            };
            let transfer = plan.transfers.iter().find(brings).ok_or_else(|| {
                format!("NO-GUESS: nobody brings value {place} to {who} in epoch {}", plan.layout.epoch)
            })?;
            let source = self.workers.get(&who.peer(&transfer.from));
            let copy = source.filter(|source| source.memory.step == step.0);
            let value = copy.and_then(|source| source.memory.values[place]).ok_or_else(|| {
                let from = &transfer.from;
                format!("NO-GUESS: {from} shall send value {place} at {step} to {who} and does not hold it")
            })?;
            buffers.values[place] = Some(value);
        }
        Ok(buffers)
    }

    /// The commit: what it got ready replaces what it trained on.
    fn resume(&mut self, who: &Who, epoch: Epoch) {
        let keeps = self.sabotage == Sabotage::KeepAll;
        let Some(worker) = self.workers.get_mut(who) else { return };
        if worker.state.phase != WorkerPhase::Ready || worker.state.ready_epoch != epoch {
            return;
        }
        let Some(next) = worker.next.take() else { return };
        let Some(buffers) = next.buffers else { return };
        let old = std::mem::replace(&mut worker.memory, buffers);
        if keeps && old.step == worker.memory.step {
            for (value, old) in worker.memory.values.iter_mut().zip(&old.values) {
                *value = value.or(*old);
            }
        }
        let state = &mut worker.state;
        let before = state.epoch;
        state.epoch = epoch;
        state.ready_epoch = Epoch(0);
        state.holding = Holding { step: next.resume_step, units: worker.memory.units() };
        state.prepared = next.resume_step;
        state.attempted = next.resume_step;
        if next.resume_step.0 > 0 {
            let saved = next.restored.then(|| vote(next.resume_step));
            state.vote = next.vote.or(saved).or(state.vote);
        }
        state.phase = WorkerPhase::Training;
        worker.pausing = false;
        worker.reduced = None;
        worker.plan = Some(next.plan.clone());
        let step = next.resume_step;
        self.log(|| format!("{who} resumes {epoch} at {step}"));
        let (worker, old, plan) = (who.clone(), Box::new(old), next.plan);
        self.facts.push(Fact::Resumed { worker, before, epoch, step, old, plan });
        self.goes_on(who);
    }
}
