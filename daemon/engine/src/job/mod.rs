//! One job: what is intended, what was observed, and what follows.
//!
//! Handlers record what an event says; `advance` then does whatever follows from what is known and from the time,
//! until nothing more does. Every change of the layout takes one path, whatever its cause:
//!
//! `Closing` (everyone stops) -> `Planning` -> `Preparing` (everyone gets ready) -> commit -> `Running`
//!
//! and every failure on it leads back to `Closing`, under the next epoch, from what is held then. A change that is wished
//! is planned and joined before it closes anything ([`ahead`]), and then goes from `Closing` to `Preparing` at once.
//!
//! A member is accounted for when it answered `Quiesced` or is confirmed gone. One whose fence is not confirmed
//! within the fence deadline (its agent is unreachable) is taken as lost all the same. That is safe without the
//! confirmation: it never learns the ticket of a later epoch, so nobody speaks to it, and alone it can commit
//! nothing, since a step's vote needs every member of its epoch (ONE-EPOCH).

pub(crate) mod ahead;
pub(crate) mod commit;
pub(crate) mod copies;
pub(crate) mod dismissal;
pub(crate) mod ending;
pub(crate) mod incidents;
pub(crate) mod ledger;
pub(crate) mod loss;
pub(crate) mod pace;
pub(crate) mod rebuild;
pub(crate) mod recover;
pub(crate) mod rejoin;
pub(crate) mod restore;
pub(crate) mod session;
pub(crate) mod silence;
pub(crate) mod spares;
pub(crate) mod start;
pub(crate) mod worker;
pub(crate) mod workers;

use crate::cluster::Cluster;
use crate::state::Ctx;
use crate::{Command, JobName, JobRecord, Notice, Participant, Phase, StepVote, Time, Timeouts};
use ahead::Ahead;
use incidents::{Incidents, Sighting};
use ledger::Ledger;
use pace::Pace;
use reknit_layout::{Epoch, GpuId, Incarnation, JobSpec, Layout, Place, Plan, Step, WorkerKey};
use restore::{Checkpoints, Origin};
use silence::Listening;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use worker::Worker;
use workers::Workers;

#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) record: JobRecord,
    pub(crate) spec: Arc<JobSpec>,
    pub(crate) stage: Stage,
    /// The change that gets ready in the background, while the job runs and until its members have paused for it.
    pub(crate) ahead: Option<Ahead>,
    /// Joins in the background that failed with nobody to blame, since the last commit.
    pub(crate) vain_joins: u32,
    /// Every worker that may be alive.
    pub(crate) workers: Workers,
    /// The members of the record's layout: kept by [`Job::set_layout`].
    members: BTreeMap<WorkerKey, Place>,
    /// The step that they resumed at: the epoch's own steps come after it.
    pub(crate) resume_step: Step,
    /// Something happened that a planned change may follow from. Reports of progress alone, by far the most events, change
    /// nothing of that.
    pub(crate) stirred: bool,
    /// Something happened to the cluster or to a place, so that a spare's turn may have come.
    pub(crate) spares_due: bool,
    pub(crate) incidents: Incidents,
    pub(crate) ledger: Ledger,
    pub(crate) pace: Pace,
    listening: Listening,
    /// The newest step seen committed, with its vote and loss.
    pub(crate) committed: Step,
    pub(crate) vote: Option<StepVote>,
    /// The last loss of each GPU.
    pub(crate) losses: BTreeMap<GpuId, Loss>,
    /// How often a worker was the reason why a preparation failed, since the last commit.
    pub(crate) strikes: BTreeMap<WorkerKey, u32>,
    /// How often replicated parameters differed, since the last commit.
    pub(crate) digest_strikes: u32,
    pub(crate) checkpoints: Checkpoints,
}

#[derive(Debug, Clone)]
pub(crate) struct Loss {
    pub(crate) at: Time,
    /// How often in a row its workers did not last.
    pub(crate) relapses: u32,
    pub(crate) sighting: Sighting,
}

/// Where the job stands, with what only matters there. Its name for operators is the record's phase.
#[derive(Debug, Clone)]
pub(crate) enum Stage {
    Pending,
    /// After the deadline it starts with whoever is there.
    Starting {
        deadline: Option<Time>,
    },
    Running,
    Closing(Closing),
    Planning(Planning),
    Preparing(Preparing),
    /// There was no plan for these members.
    Waiting {
        tried: BTreeMap<Place, WorkerKey>,
    },
    Draining {
        not_before: Time,
    },
    Ended,
    Rebuilding {
        deadline: Time,
        /// A GPU that was not heard of when last looked.
        unheard: Option<GpuId>,
    },
}

/// Everyone engaged in `epoch` is asked to stop.
#[derive(Debug, Clone)]
pub(crate) struct Closing {
    pub(crate) epoch: Epoch,
    /// True while a planned change waits for the step boundary; a loss turns it into false.
    pub(crate) paused: bool,
    pub(crate) reason: String,
    /// Neither quiesced nor confirmed gone yet.
    pub(crate) awaited: BTreeSet<WorkerKey>,
    pub(crate) deadline: Option<Time>,
}

#[derive(Debug, Clone)]
pub(crate) struct Planning {
    pub(crate) epoch: Epoch,
    pub(crate) members: BTreeMap<Place, WorkerKey>,
    /// Whose copies the plan may use.
    pub(crate) holders: BTreeSet<WorkerKey>,
    pub(crate) resume_step: Step,
    pub(crate) vote: Option<StepVote>,
    /// The checkpoint that state comes from, and not from those who hold it.
    pub(crate) origin: Option<Origin>,
}

#[derive(Debug, Clone)]
pub(crate) struct Preparing {
    pub(crate) epoch: Epoch,
    pub(crate) plan: Arc<Plan>,
    pub(crate) members: BTreeSet<WorkerKey>,
    /// In the order of workers.
    pub(crate) participants: Arc<Vec<Participant>>,
    pub(crate) resume_step: Step,
    pub(crate) vote: Option<StepVote>,
    pub(crate) origin: Option<Origin>,
    pub(crate) ready: BTreeMap<WorkerKey, (Step, String)>,
    pub(crate) deadline: Time,
}

impl Preparing {
    pub(crate) fn involves(&self, worker: &WorkerKey) -> bool {
        self.participants.binary_search_by(|p| p.worker.cmp(worker)).is_ok()
    }

    pub(crate) fn order(&self, job: &JobName, worker: &WorkerKey) -> Command {
        Command::Prepare {
            job: job.clone(),
            worker: worker.clone(),
            epoch: self.epoch,
            plan: self.plan.clone(),
            participants: self.participants.clone(),
            resume_step: self.resume_step,
            vote: self.vote,
            checkpoint: self.origin.as_ref().map(|origin| Arc::clone(&origin.folder)),
        }
    }
}

impl Job {
    pub(crate) fn new(record: JobRecord) -> Self {
        let mut workers = Workers::default();
        workers.seat(&record.places);
        let checkpoints = Checkpoints::of(&record.spec.checkpoint);
        Self {
            spec: Arc::new(record.spec.clone()),
            ledger: Ledger::new(record.spec.batch.global),
            members: members_of(record.layout.as_deref()),
            resume_step: Step(0),
            record,
            stage: Stage::Pending,
            ahead: None,
            vain_joins: 0,
            workers,
            stirred: true,
            spares_due: true,
            incidents: Incidents::default(),
            pace: Pace::default(),
            listening: Listening::default(),
            committed: Step(0),
            vote: None,
            losses: BTreeMap::new(),
            strikes: BTreeMap::new(),
            digest_strikes: 0,
            checkpoints,
        }
    }

    /// Does what follows from what is known now. `taken`: whether another job has the GPU.
    pub(crate) fn advance(&mut self, ctx: &mut Ctx<'_>, taken: &dyn Fn(&GpuId) -> bool) {
        self.expire_workers(ctx);
        loop {
            let moved = match &self.stage {
                Stage::Pending => self.assign_places(ctx, taken),
                Stage::Starting { deadline } => self.try_start(ctx, *deadline),
                Stage::Running => self.watch(ctx),
                Stage::Closing(_) => self.account(ctx),
                Stage::Preparing(_) => self.tally(ctx),
                Stage::Waiting { .. } => self.try_again(ctx),
                Stage::Draining { not_before } => self.try_end_draining(ctx, *not_before),
                Stage::Rebuilding { deadline, .. } => self.rebuild(ctx, *deadline),
                Stage::Planning(_) | Stage::Ended => false,
            };
            if !moved {
                break;
            }
        }
        if self.spares_due {
            self.take_spares(ctx, taken);
        }
        self.start_missing(ctx);
        self.stirred = false;
    }

    /// Whether a worker may be started. It would only disturb a change under way, or nothing more shall start.
    pub(crate) fn takes_newcomers(&self) -> bool {
        match &self.stage {
            Stage::Starting { .. } | Stage::Running | Stage::Waiting { .. } => true,
            Stage::Pending
            | Stage::Closing(_)
            | Stage::Planning(_)
            | Stage::Preparing(_)
            | Stage::Draining { .. }
            | Stage::Ended
            | Stage::Rebuilding { .. } => false,
        }
    }

    /// No other job may have the GPU: it has a place here, or a worker of this job may still run on it.
    pub(crate) fn has_gpu(&self, gpu: &GpuId) -> bool {
        let seated = !self.record.phase.ended() && self.workers.seat_of(gpu).is_some();
        seated || self.worker_on(gpu).is_some()
    }

    pub(crate) fn running(&self) -> bool {
        matches!(&self.stage, Stage::Running)
    }

    /// What a member says of the epoch that is trained under.
    pub(crate) fn trains_under(&self, epoch: Epoch, worker: &WorkerKey) -> bool {
        self.running() && epoch == self.epoch() && self.is_member(worker)
    }

    pub(crate) fn next_deadline(&self, cluster: &Cluster, timeouts: &Timeouts) -> Option<Time> {
        let stage = match &self.stage {
            Stage::Starting { deadline } => *deadline,
            Stage::Running => {
                let suspicion = self.suspicion(timeouts).map(|(_, at)| at);
                suspicion.into_iter().chain(self.ahead.as_ref().and_then(Ahead::deadline)).min()
            }
            Stage::Closing(closing) => closing.deadline,
            Stage::Preparing(preparing) => Some(preparing.deadline),
            Stage::Draining { not_before } => self.workers.is_empty().then_some(*not_before),
            Stage::Rebuilding { deadline, .. } => Some(*deadline),
            Stage::Pending | Stage::Planning(_) | Stage::Waiting { .. } | Stage::Ended => None,
        };
        let starts = self.next_start(cluster, timeouts);
        self.workers.next_deadline().into_iter().chain(stage).chain(starts).min()
    }

    /// The epoch of the committed layout; 0 before the first.
    pub(crate) fn epoch(&self) -> Epoch {
        self.record.layout.as_ref().map_or(Epoch(0), |layout| layout.epoch)
    }

    pub(crate) fn is_member(&self, worker: &WorkerKey) -> bool {
        self.members.contains_key(worker)
    }

    /// The layout is committed.
    pub(crate) fn set_layout(&mut self, layout: Layout) {
        self.members = members_of(Some(&layout));
        self.record.layout = Some(Arc::new(layout));
    }

    /// How many members the committed layout has.
    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// The members in order, from those on `first` on.
    pub(crate) fn members_from(&self, first: &GpuId) -> impl Iterator<Item = &WorkerKey> {
        let first = WorkerKey { gpu: first.clone(), incarnation: Incarnation(0) };
        self.members.range(first..).map(|(key, _)| key)
    }

    /// Of the committed layout, on this GPU.
    fn member_on(&self, gpu: &GpuId) -> Option<(&WorkerKey, Place)> {
        let [first, last] =
            [0, u64::MAX].map(|number| WorkerKey { gpu: gpu.clone(), incarnation: Incarnation(number) });
        self.members.range(first..=last).next_back().map(|(worker, place)| (worker, *place))
    }

    /// The members of the committed layout.
    pub(crate) fn members(&self) -> BTreeSet<WorkerKey> {
        self.members.keys().cloned().collect()
    }

    pub(crate) fn is_member_on(&self, gpu: &GpuId) -> bool {
        self.member_on(gpu).is_some()
    }

    pub(crate) fn place_of_gpu(&self, gpu: &GpuId) -> Option<Place> {
        // A member whose place a spare shall take still has it.
        self.workers.seat_of(gpu).or_else(|| self.member_on(gpu).map(|(_, place)| place))
    }

    /// "worker 0.0.1", for people.
    pub(crate) fn name_of(&self, worker: &WorkerKey) -> String {
        match self.place_of_gpu(&worker.gpu) {
            Some(place) => format!("worker {place}"),
            None => format!("worker {worker}"),
        }
    }

    /// The worker on the GPU that may still be alive.
    pub(crate) fn worker_on(&self, gpu: &GpuId) -> Option<(&WorkerKey, &Worker)> {
        self.workers.on_gpu(gpu)
    }

    /// Who can take part in a layout now: stopped (or new), reachable, on a GPU that may train. A newcomer that is away
    /// brings nothing worth waiting for.
    pub(crate) fn candidates(&self, cluster: &Cluster) -> BTreeMap<Place, WorkerKey> {
        let able = self.workers.preparable().filter(|key| cluster.may_train(&key.gpu));
        able.filter_map(|key| {
            let place = self.workers.seat_of(&key.gpu)?;
            let (newest, worker) = self.workers.on_gpu(&key.gpu)?;
            let takes_part = newest == key && (worker.session || self.is_member(key));
            takes_part.then(|| (place, key.clone()))
        })
        .collect()
    }

    /// Whether some replica trains when these places are filled.
    pub(crate) fn viable<'a>(&self, places: impl Iterator<Item = &'a Place>) -> bool {
        self.spec.training(places.copied()).is_ok()
    }

    pub(crate) fn persist(&self, ctx: &mut Ctx<'_>) {
        ctx.out.push(Command::Persist(Box::new(self.record.clone())));
    }

    /// Changes the phase and tells people. Storing it is up to the caller.
    pub(crate) fn set_phase(&mut self, ctx: &mut Ctx<'_>, phase: Phase, explanation: &str) {
        if (self.record.phase, self.record.explanation.as_str()) == (phase, explanation) {
            return;
        }
        self.record.phase = phase;
        explanation.clone_into(&mut self.record.explanation);
        ctx.notify(&self.record.name, Notice::Phase { phase, explanation: explanation.to_owned() });
    }

    /// The next epoch, stored before anyone hears of it: epochs never repeat (ONE-EPOCH).
    pub(crate) fn reserve_epoch(&mut self, ctx: &mut Ctx<'_>) -> Epoch {
        self.record.last_epoch.0 += 1;
        self.persist(ctx);
        self.record.last_epoch
    }

    pub(crate) fn notify_worker(&self, ctx: &mut Ctx<'_>, key: &WorkerKey, state: &str) {
        let Some(worker) = self.workers.get(key) else {
            return;
        };
        let notice = Notice::Worker {
            worker: key.clone(),
            place: self.place_of_gpu(&key.gpu),
            node: worker.node.clone(),
            pid: worker.pid,
            state: state.to_owned(),
        };
        ctx.notify(&self.record.name, notice);
    }
}

fn members_of(layout: Option<&Layout>) -> BTreeMap<WorkerKey, Place> {
    let members = layout.into_iter().flat_map(Layout::members);
    members.map(|(place, member)| (member.worker.clone(), place)).collect()
}
