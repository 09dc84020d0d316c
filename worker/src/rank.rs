//! One rank's state and work: prepare an epoch, resume, train a step.

mod checkpoint;
mod error;

use crate::abort::Aborts;
use crate::ahead::{Joins, join};
use crate::data::Corpus;
use crate::groups::{Joined, Team};
use crate::messages::{Committed, Phase, Prepare, Share, StepPart, StepVote, Timeouts, WorkerState};
use crate::pace::Pace;
use crate::reshard::Reshard;
use crate::saver::Saver;
use crate::session::Outbox;
pub use error::RankError;
use reknit_layout::{Axis, Epoch, Holding, JobSpec, Layout, Place, Step, Units, WorkerKey};
use reknit_model::{Real, Shard};
use reknit_plane::{AbortReason, Element, Plane};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a rank is given once.
#[derive(Clone)]
pub struct Setting {
    pub worker: WorkerKey,
    pub job: Arc<JobSpec>,
    pub timeouts: Timeouts,
    pub plane: Arc<dyn Plane>,
    pub aborts: Arc<Aborts>,
    /// Says what this rank is doing.
    pub pace: Arc<Pace>,
    /// Where it tells of checkpoints.
    pub outbox: Arc<Outbox>,
    /// The threads that compute.
    pub threads: Arc<reknit_model::Team>,
    /// See [`crate::reshard::CHUNK`].
    pub chunk: usize,
}

impl std::fmt::Debug for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Setting(worker {}, job {})", self.worker, self.job.name)
    }
}

/// The state of one rank. Its committed state changes in two places only: a step's commit and [`Rank::resume`].
#[derive(Debug)]
pub struct Rank<T: Real> {
    setting: Setting,
    joins: Arc<Joins<T>>,
    corpus: Arc<Corpus>,
    /// `None`: the job has no checkpoints.
    saver: Option<Saver>,
    epoch: Epoch,
    shard: Option<Shard<T>>,
    team: Option<Team<T>>,
    next: Option<Next<T>>,
    /// Allocated ahead for a rank that holds nothing.
    awaiting: Option<Shard<T>>,
    committed: Step,
    vote: Option<StepVote>,
    /// The step in work: its gradients and, once they are summed, what is needed to roll it forward.
    attempt: Option<Attempt>,
}

/// A step between its begin and its commit.
#[derive(Debug, Clone)]
struct Attempt {
    epoch: Epoch,
    step: Step,
    share: Share,
    begun: Instant,
    /// Every reduced gradient of the step is here.
    prepared: bool,
}

/// Everything for the epoch to come, beside the untouched state of the old one.
#[derive(Debug)]
struct Next<T: Real> {
    epoch: Epoch,
    step: Step,
    /// It comes from a checkpoint.
    gone_back: bool,
    /// Of `step`, where that says it.
    vote: Option<StepVote>,
    team: Option<Team<T>>,
    /// Takes the place of what is held, which else adopts what came for it.
    shard: Option<Box<Shard<T>>>,
}

/// A preparation that is done.
#[derive(Debug)]
pub struct Prepared {
    pub step: Step,
    pub replicated_digest: String,
    pub bytes_received: u64,
}

/// A committed step.
#[derive(Debug)]
pub struct Done {
    pub committed: Committed,
    /// The step's time without the waiting for others.
    pub computed: Duration,
    /// Somebody asked for a pause: every member stops at this boundary.
    pub pause: bool,
}

impl<T: Real + Element> Rank<T> {
    pub fn new(setting: Setting) -> Result<Self, RankError> {
        let JobSpec { data, model, run, parallel, .. } = &*setting.job;
        if parallel.pipeline != 1 {
            let text = "this worker trains jobs with [parallel] pipeline = 1 only";
            return Err(RankError::Refused(text.to_owned()));
        }
        let corpus = Arc::new(Corpus::open(data, model, run.seed)?);
        let joins = Arc::new(Joins::new(setting.clone(), Arc::clone(&corpus)));
        let saver = Saver::start(&setting.job, &setting.worker, &setting.outbox);
        Ok(Self {
            setting,
            joins,
            corpus,
            saver,
            epoch: Epoch(0),
            shard: None,
            team: None,
            next: None,
            awaiting: None,
            committed: Step(0),
            vote: None,
            attempt: None,
        })
    }

    /// What is joined in the background.
    pub fn joins(&self) -> &Arc<Joins<T>> {
        &self.joins
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The epoch for which everything is prepared.
    pub fn ready_epoch(&self) -> Option<Epoch> {
        self.next.as_ref().map(|next| next.epoch)
    }

    pub fn committed(&self) -> Step {
        self.committed
    }

    pub fn finished(&self) -> bool {
        self.committed.0 >= self.setting.job.run.steps
    }

    /// Whether its parts of all checkpoints are written, or never will be. Waits for it, but no longer than this.
    pub fn has_saved_within(&mut self, patience: Duration) -> bool {
        self.saver.as_mut().is_none_or(|saver| saver.is_done_within(patience))
    }

    pub fn shard(&self) -> Option<&Shard<T>> {
        self.shard.as_ref()
    }

    pub fn place(&self) -> Option<Place> {
        self.team.as_ref().map(|team| team.place)
    }

    pub fn replicated_digest(&self) -> String {
        self.shard.as_ref().map(Shard::replicated_digest).unwrap_or_default()
    }

    pub fn state(&self, phase: Phase) -> WorkerState {
        let units = self.shard.as_ref().map(|shard| shard.owned().clone()).unwrap_or_default();
        let attempted = self.attempt.as_ref().map_or(self.committed, |attempt| attempt.step);
        let prepared = self.attempt.as_ref().filter(|attempt| attempt.prepared);
        WorkerState {
            phase,
            epoch: self.epoch,
            ready_epoch: self.ready_epoch().unwrap_or_default(),
            holding: Holding { step: self.committed, units: units.into() },
            prepared: prepared.map_or(self.committed, |attempt| attempt.step),
            attempted,
            vote: self.vote,
        }
    }

    /// Commits the step that others have committed, if this rank had prepared it (the roll-forward rule: whoever
    /// committed it saw that all had). Anything else begun is discarded.
    pub fn roll_forward(&mut self, prepare: &Prepare) -> Result<Option<Committed>, RankError> {
        if prepare.checkpoint.is_some() {
            // It has all of the step, which may also lie further back.
            return Ok(None);
        }
        self.discard_next();
        let prepared =
            self.attempt.as_ref().filter(|attempt| attempt.prepared && attempt.step == prepare.resume_step);
        if self.committed < prepare.resume_step && prepared.is_some() {
            // The optimizer takes gradients and weights as they lay before there was room behind them.
            self.give_up_room();
            let vote = prepare.vote.ok_or_else(|| {
                RankError::Refused(format!("no vote came with step {} to roll forward", prepare.resume_step))
            })?;
            let committed = self.commit(vote, true);
            if let Some(saver) = &mut self.saver {
                saver.missed(self.committed);
            }
            return Ok(committed);
        }
        if self.shard.is_some() && self.committed > prepare.resume_step {
            return Err(RankError::Refused(format!(
                "this worker has committed step {}, which is after step {} to resume from",
                self.committed, prepare.resume_step
            )));
        }
        Ok(None)
    }

    /// Makes room for what a rank that holds nothing will own in an epoch to come.
    pub fn allocate(&mut self, join: &Prepare) {
        if self.shard.is_some() || self.next.is_some() {
            return;
        }
        let layout = join.layout.as_ref();
        let place = layout.and_then(|layout| layout.place_of(&self.setting.worker));
        let owned = layout.zip(place).and_then(|(layout, place)| owned_by(layout, place));
        // A layout that does not fit the model is refused when it is prepared.
        self.awaiting = owned.and_then(|owned| Shard::awaiting(&self.setting.job.model, &owned).ok());
    }

    /// Joins the groups of the new epoch, unless it has in the background, and fetches what this rank shall own, without
    /// touching what it has.
    pub fn prepare(&mut self, prepare: &Prepare) -> Result<Prepared, RankError> {
        self.discard_next();
        let prepared = self.prepare_next(prepare);
        if prepared.is_err() {
            self.give_up_room();
        }
        prepared
    }

    /// What it will own, as far as it can tell, when `lost` is gone from its group.
    pub fn owned_without(&self, lost: &WorkerKey) -> Option<BTreeMap<Axis, Units>> {
        let Team { layout, place, .. } = self.team.as_ref()?;
        let group = layout.group(place.replica, place.stage)?;
        let lost = layout.place_of(lost).filter(|lost| group.place(lost.slot) == *lost && lost != place)?;
        let goes_on = group.degree() > self.setting.job.parallel.min_tensor;
        goes_on.then(|| group.owned_without(lost.slot, place.slot))
    }

    /// Makes room for what it expects to own after a loss, while the plan is being made: touching the memory takes longer
    /// than all else that a change does. Preparing uses the room that is right, and gives back what is too much.
    pub fn expect(&mut self, owned: &BTreeMap<Axis, Units>) {
        if let Some(shard) = self.shard.as_mut().filter(|_| self.next.is_none()) {
            // Of units that the model has.
            let _ = shard.make_room(owned);
        }
    }

    fn prepare_next(&mut self, prepare: &Prepare) -> Result<Prepared, RankError> {
        if self.setting.aborts.is_closed(prepare.epoch) {
            return Err(RankError::Refused(format!("epoch {} is closed already", prepare.epoch)));
        }
        let Joined { reshard, team } = match self.joins.take(prepare.epoch) {
            Some(joined) => joined.at_pace(&self.setting.pace),
            None => join(&self.setting, &self.corpus, prepare, &self.setting.pace)?,
        };
        let model = &self.setting.job.model;
        let owned = team.as_ref().and_then(|team| owned_by(&team.layout, team.place));
        let (step, awaiting) = (prepare.resume_step, self.awaiting.take());
        // State of another step is no use to anyone (SAME-STEP).
        let held = self.shard.as_mut().filter(|_| self.committed == step && !prepare.fresh);

        let mut vote = None;
        let mut new = match (&owned, &prepare.checkpoint) {
            (Some(owned), Some(folder)) => {
                let (shard, saved) =
                    checkpoint::load(&self.setting.aborts, prepare.epoch, model, folder, step, owned)?;
                vote = saved;
                Some(shard)
            }
            (Some(owned), None) if prepare.fresh => {
                Some(Shard::init(model, self.setting.job.run.seed, owned))
            }
            (Some(owned), None) if held.is_none() => {
                let allocated = awaiting.filter(|awaiting| awaiting.awaits(owned));
                Some(allocated.map_or_else(|| Shard::awaiting(model, owned), Ok)?)
            }
            (Some(_) | None, Some(_) | None) => None,
        };
        let mut shard = match (&mut new, held) {
            (Some(new), _) => Some(new),
            (None, Some(held)) => {
                match &owned {
                    Some(owned) => held.make_room(owned)?,
                    None => held.give_up_room(),
                }
                Some(held)
            }
            (None, None) => None,
        };
        let mut bytes_received = 0;
        if let Some(mut comm) = reshard {
            let shard = shard.as_mut().ok_or_else(|| {
                RankError::Refused(format!(
                    "the plan wants state of this worker, which holds none of step {step}"
                ))
            })?;
            let reshard = Reshard {
                model,
                epoch: prepare.epoch,
                transfers: &prepare.transfers,
                chunk: self.setting.chunk,
            };
            bytes_received = reshard.run(&mut comm, shard)?;
            comm.retire();
        }
        let mut replicated_digest = String::new();
        if let Some(shard) = shard {
            shard.check_arrived()?;
            replicated_digest = shard.replicated_digest();
        }
        let gone_back = prepare.checkpoint.is_some();
        self.next =
            Some(Next { epoch: prepare.epoch, step, gone_back, vote, team, shard: new.map(Box::new) });
        Ok(Prepared { step, replicated_digest, bytes_received })
    }

    /// Gives up a preparation; what was held is as it was.
    pub fn discard_next(&mut self) {
        if self.next.take().is_some() {
            self.give_up_room();
        }
    }

    fn give_up_room(&mut self) {
        if let Some(shard) = &mut self.shard {
            shard.give_up_room();
        }
    }

    /// Swaps to the prepared epoch. False when another one, or none, is prepared.
    pub fn resume(&mut self, epoch: Epoch) -> bool {
        match self.next.take() {
            Some(next) if next.epoch == epoch => {
                self.setting.aborts.forget_before(epoch);
                self.epoch = epoch;
                if self.committed != next.step {
                    // What was held, and its vote, are of another step (SAME-STEP).
                    self.shard = None;
                    self.vote = None;
                }
                self.committed = next.step;
                self.vote = next.vote.or(self.vote);
                self.attempt = None;
                self.team = next.team;
                self.shard = next.shard.map(|new| *new).or(self.shard.take());
                if let Some(shard) = &mut self.shard {
                    shard.adopt();
                    shard.set_team(Arc::clone(&self.setting.threads));
                }
                if let Some(saver) = self.saver.as_mut().filter(|_| next.gone_back) {
                    saver.gone_back();
                } else if self.finished() {
                    // No step comes after it: all save it again, since some may not have.
                    self.save(true);
                }
                true
            }
            other => {
                self.next = other;
                false
            }
        }
    }

    /// Ends the communicators of the current epoch and keeps the state.
    pub fn leave_epoch(&mut self) {
        if self.team.take().is_some() {
            self.setting.aborts.close(self.epoch, AbortReason::EpochClosed);
            if let Some(saver) = &mut self.saver {
                saver.broken_off();
            }
        }
    }

    /// Leaves in order: every member is at the same boundary.
    pub fn retire(&mut self) {
        if let Some(team) = self.team.take() {
            team.retire();
        }
    }

    /// One optimizer step with all members of the epoch.
    ///
    /// After an error the communicators are of no use any more; what was held stays.
    /// `ask_pause` is asked as late as can be, just before the vote that carries the wish.
    pub fn train_step(&mut self, ask_pause: &dyn Fn() -> bool) -> Result<Done, RankError> {
        let result = self.attempt_step(ask_pause);
        if result.is_err() {
            // Push the abort to every rank: a peer may be waiting for this one in another group.
            self.setting.aborts.abort_siblings(self.epoch);
        }
        result
    }

    fn attempt_step(&mut self, ask_pause: &dyn Fn() -> bool) -> Result<Done, RankError> {
        let job = Arc::clone(&self.setting.job);
        let (Some(team), Some(shard)) = (&mut self.team, &mut self.shard) else {
            return Err(RankError::Refused("this worker has no place in the epoch".to_owned()));
        };
        let step = Step(self.committed.0 + 1);
        let share = share_of(&team.layout, team.place, &job, step);
        let attempt = Attempt { epoch: self.epoch, step, share, begun: Instant::now(), prepared: false };
        let attempt = self.attempt.insert(attempt);
        let pace = &self.setting.pace;
        let waited_before = pace.waited();

        shard.zero_gradients();
        team.exchange.begin();
        let tokens = f64::from(job.batch.global) * f64::from(job.model.seq_len);
        let mut loss = 0.0;
        let mut done = 0;
        while done < share.count {
            let count = job.batch.micro.min(share.count - done);
            pace.enter_batch(done / job.batch.micro);
            let batch = self.corpus.batch(share.first + u64::from(done), count as usize)?;
            done += count;
            let Team { tensor, exchange, .. } = team;
            loss += if done < share.count {
                shard.forward_backward(&batch, 1.0 / tokens, tensor)?
            } else {
                shard.forward_backward_into(&batch, 1.0 / tokens, tensor, exchange)?
            };
        }
        pace.enter(StepPart::Sums);
        team.exchange.finish(shard, &mut team.tensor)?;
        attempt.prepared = true;

        pace.enter(StepPart::Vote);
        // The vote: success means that every member has every reduced gradient of this step.
        let first = team.tensor.rank() == 0;
        let mut norm = team.exchange.norm_squared();
        if team.speaks_for_norm && first {
            norm += shard.replicated_norm_squared();
        }
        let loss = if first { loss / tokens } else { 0.0 };
        let saver = self.saver.as_mut();
        let due = saver.as_ref().is_some_and(|saver| saver.is_due(step));
        let owed = saver.as_ref().is_some_and(|saver| saver.is_owed());
        let unready = saver.is_some_and(|saver| !saver.is_ready(step));
        let flags = [ask_pause(), owed, unready].map(|raised| f64::from(u8::from(raised)));
        let result = team.sum([&[norm, loss], &flags[..]].concat())?;
        let vote = StepVote { grad_norm_squared: result[0], loss: result[1] };
        let [pause, owed, unready] = [2, 3, 4].map(|flag| result[flag] > 0.0);
        pace.enter(StepPart::Apply);
        let waited = pace.waited() - waited_before;
        let committed = self
            .commit(vote, false)
            .ok_or_else(|| RankError::Refused("the step in work was lost".to_owned()))?;
        // What is owed and cannot be had yet is tried again with the next step.
        if due || owed && !unready {
            self.save(!unready);
        }
        Ok(Done { computed: committed.step_time.saturating_sub(waited), committed, pause })
    }

    /// Applies the optimizer: the step in work is committed.
    fn commit(&mut self, vote: StepVote, rolled_forward: bool) -> Option<Committed> {
        let attempt = self.attempt.take()?;
        let job = &self.setting.job;
        self.shard.as_mut()?.apply(attempt.step, &job.optimizer, vote.grad_norm_squared);
        self.committed = attempt.step;
        self.vote = Some(vote);
        Some(Committed {
            epoch: attempt.epoch,
            step: attempt.step,
            vote,
            share: attempt.share,
            step_time: attempt.begun.elapsed(),
            tokens: u64::from(job.batch.global) * u64::from(job.model.seq_len),
            rolled_forward,
        })
    }
}

fn owned_by(layout: &Layout, place: Place) -> Option<BTreeMap<Axis, Units>> {
    layout.group(place.replica, place.stage).map(|group| group.owned(place.slot))
}

/// The samples of `step` that the replica at `place` takes (SAMPLES: step k is samples (k-1)*global .. k*global).
fn share_of(layout: &Layout, place: Place, job: &JobSpec, step: Step) -> Share {
    let offsets = layout.samples_of(place.replica);
    Share {
        first: (step.0 - 1) * u64::from(job.batch.global) + u64::from(offsets.start),
        count: offsets.end - offsets.start,
    }
}
