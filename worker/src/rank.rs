//! One rank's state and work: prepare an epoch, resume, train a step.

mod error;

use crate::abort::Aborts;
use crate::corpus::Corpus;
use crate::groups::{Joined, Joiner, Team, join_all};
use crate::messages::{Committed, Phase, Prepare, Share, StepPart, StepVote, Timeouts, WorkerState};
use crate::pace::Pace;
use crate::reshard::exchange;
pub use error::RankError;
use reknit_layout::{Axis, Epoch, Holding, JobSpec, Layout, Place, Step, Units, WorkerKey};
use reknit_model::{Real, Received, Shard};
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
    corpus: Corpus,
    epoch: Epoch,
    shard: Option<Shard<T>>,
    team: Option<Team<T>>,
    next: Option<Next<T>>,
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
    team: Option<Team<T>>,
    /// `None`: the shard stays as it is.
    shard: Option<Shard<T>>,
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
        let corpus = Corpus::open(&data.files, model.seq_len, run.seed)?;
        Ok(Self {
            setting,
            corpus,
            epoch: Epoch(0),
            shard: None,
            team: None,
            next: None,
            committed: Step(0),
            vote: None,
            attempt: None,
        })
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
        let prepared =
            self.attempt.as_ref().filter(|attempt| attempt.prepared && attempt.step == prepare.resume_step);
        if self.committed < prepare.resume_step && prepared.is_some() {
            let vote = prepare.vote.ok_or_else(|| {
                RankError::Refused(format!("no vote came with step {} to roll forward", prepare.resume_step))
            })?;
            return Ok(self.commit(vote, true));
        }
        if self.shard.is_some() && self.committed > prepare.resume_step {
            return Err(RankError::Refused(format!(
                "this worker has committed step {}, which is after step {} to resume from",
                self.committed, prepare.resume_step
            )));
        }
        Ok(None)
    }

    /// Joins the groups of the new epoch and fetches what this rank shall own, without touching what it has.
    pub fn prepare(&mut self, prepare: &Prepare) -> Result<Prepared, RankError> {
        self.next = None;
        if self.setting.aborts.is_closed(prepare.epoch) {
            return Err(RankError::Refused(format!("epoch {} is closed already", prepare.epoch)));
        }
        let joiner = Joiner {
            job: &self.setting.job,
            me: &self.setting.worker,
            prepare,
            timeouts: self.setting.timeouts,
            pace: &self.setting.pace,
            aborts: &self.setting.aborts,
        };
        let Joined { reshard, mut team } = join_all(joiner, &*self.setting.plane)?;
        if let Some(team) = &mut team {
            // Ranks that read other texts under the same numbers would train a wrong model without a word.
            let nominal = self.setting.job.parallel.tensor as usize;
            self.corpus.check_against(&team.gather(self.corpus.fingerprint(), nominal)?)?;
        }
        // State of another step is no use to anyone (SAME-STEP).
        let held = self.shard.as_ref().filter(|_| self.committed == prepare.resume_step);

        let model = &self.setting.job.model;
        let (received, bytes_received) = match reshard {
            Some(mut comm) => {
                let ranks: Vec<_> = prepare.movers.iter().map(|peer| peer.worker.clone()).collect();
                let moved = exchange(&mut comm, model, prepare.epoch, &prepare.transfers, &ranks, held)?;
                comm.retire();
                moved
            }
            None => (Received::default(), 0),
        };
        let owned = team.as_ref().and_then(|team| owned_by(&team.layout, team.place));
        let shard = match owned {
            None => None,
            Some(owned) if prepare.fresh => Some(Shard::init(model, self.setting.job.run.seed, &owned)),
            Some(owned) if held.is_some_and(|held| *held.owned() == owned) => None,
            Some(owned) => Some(Shard::rebuild(model, &owned, held, &received)?),
        };
        let replicated_digest = shard.as_ref().or(held).map(Shard::replicated_digest).unwrap_or_default();
        self.next = Some(Next { epoch: prepare.epoch, step: prepare.resume_step, team, shard });
        Ok(Prepared { step: prepare.resume_step, replicated_digest, bytes_received })
    }

    /// Gives up a preparation; what was held is as it was.
    pub fn discard_next(&mut self) {
        self.next = None;
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
                self.attempt = None;
                self.team = next.team;
                if let Some(shard) = next.shard {
                    self.shard = Some(shard);
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
    /// After an error the communicators are of no use any more; what was held and what was prepared stays.
    pub fn train_step(&mut self, ask_pause: bool) -> Result<Done, RankError> {
        let result = self.attempt_step(ask_pause);
        if result.is_err() {
            // Push the abort to every rank: a peer may be waiting for this one in another group.
            self.setting.aborts.abort_siblings(self.epoch);
        }
        result
    }

    fn attempt_step(&mut self, ask_pause: bool) -> Result<Done, RankError> {
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
        let norm = match (team.speaks_for_norm, team.tensor.rank()) {
            (true, 0) => team.exchange.norm_squared() + shard.replicated_norm_squared(),
            (true, _) => team.exchange.norm_squared(),
            (false, _) => 0.0,
        };
        let loss = if team.speaks_for_loss { loss / tokens } else { 0.0 };
        let result = team.sum(vec![norm, loss, f64::from(u8::from(ask_pause))])?;
        let vote = StepVote { grad_norm_squared: result[0], loss: result[1] };
        let pause = result[2] > 0.0;
        pace.enter(StepPart::Apply);
        let waited = pace.waited() - waited_before;
        let committed = self
            .commit(vote, false)
            .ok_or_else(|| RankError::Refused("the step in work was lost".to_owned()))?;
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
