//! Workers: what they are told and what they hold.

use crate::cluster::{Who, node_name};
use crate::dial::Link;
use crate::memory::{BATCH, Memory, REPLICATED, Values};
use crate::net::Peer;
use crate::world::World;
use reknit_engine::{Endpoint, Event, StepVote, Time, WorkerPhase, WorkerState};
use reknit_layout::{Epoch, Holding, JobSpec, Plan, Step, WorkerKey};
use std::sync::Arc;

/// What a healthy worker computes for in a step, in microseconds.
pub(crate) const STEP_US: u64 = 20_000;

#[derive(Debug)]
pub struct Worker {
    pub(crate) node: usize,
    /// Of the job.
    pub(crate) seed: u64,
    pub(crate) last_step: u64,
    pub state: WorkerState,
    /// What it trains on. Nothing but commits of steps and of epochs change it.
    pub(crate) memory: Memory,
    /// Reduced gradients of the step it has prepared.
    pub(crate) reduced: Option<(Step, Values)>,
    /// What it trains under.
    pub(crate) plan: Option<Arc<Plan>>,
    pub(crate) next: Option<Next>,
    /// What it joins, or has joined, in the background.
    pub(crate) ahead: Option<Ahead>,
    pub(crate) link: Link,
    pub(crate) frozen_until: Time,
    /// Asked to stop at the next boundary.
    pub(crate) pausing: bool,
    pub(crate) ticks: u64,
    /// When it had prepared its step: it waits for the others from then on.
    pub(crate) waits_since: Time,
    /// Units times samples of a step when nobody is lost.
    nominal: u64,
    /// Microseconds that it computes in such a step, and in all steps so far.
    pub(crate) step_us: u64,
    pub(crate) computed_us: u64,
}

/// The groups of an epoch to come.
#[derive(Debug)]
pub(crate) struct Ahead {
    pub(crate) epoch: Epoch,
    pub(crate) ticket: u64,
    pub(crate) participants: Vec<WorkerKey>,
}

/// What it gets ready for.
#[derive(Debug)]
pub(crate) struct Next {
    pub(crate) plan: Arc<Plan>,
    pub(crate) participants: Vec<WorkerKey>,
    /// The secret of this epoch: nobody else's preparation of it counts.
    pub(crate) ticket: u64,
    pub(crate) resume_step: Step,
    pub(crate) vote: Option<StepVote>,
    /// State is taken out of a checkpoint.
    pub(crate) restored: bool,
    /// Fresh buffers; the memory stays as it is before the commit (ONLY-COPY).
    pub(crate) buffers: Option<Memory>,
}

pub(crate) fn vote(step: Step) -> StepVote {
    StepVote { grad_norm_squared: 1.0, loss: 1.0 / step.0 as f64 }
}

impl Worker {
    pub(crate) fn new(node: usize, spec: &JobSpec) -> Self {
        Self {
            node,
            seed: spec.run.seed,
            last_step: spec.run.steps,
            state: WorkerState {
                phase: WorkerPhase::Opening,
                epoch: Epoch(0),
                ready_epoch: Epoch(0),
                holding: Holding::default(),
                prepared: Step(0),
                attempted: Step(0),
                vote: None,
            },
            memory: Memory::default(),
            reduced: None,
            plan: None,
            next: None,
            ahead: None,
            link: Link::default(),
            frozen_until: Time(0),
            pausing: false,
            ticks: 0,
            waits_since: Time(0),
            nominal: REPLICATED as u64 * BATCH / u64::from(spec.parallel.tensor * spec.parallel.data),
            step_us: STEP_US,
            computed_us: 0,
        }
    }

    /// It trains under this epoch.
    pub(crate) fn trains(&self, epoch: Epoch) -> bool {
        self.state.phase == WorkerPhase::Training && self.state.epoch == epoch
    }

    /// Its gradients of the step are reduced, and the step is not committed here.
    pub(crate) fn has_prepared(&self, epoch: Epoch, step: Step) -> bool {
        self.trains(epoch) && self.state.prepared == step && self.state.holding.step < step
    }

    /// A step takes longer where the share of the work is larger.
    pub(crate) fn computes(&mut self, who: &Who) {
        let layout = self.plan.as_ref().map(|plan| &plan.layout);
        let place = layout.and_then(|layout| layout.place_of(&who.key));
        if let (Some(layout), Some(place)) = (layout, place) {
            let units = self.memory.values[..REPLICATED].iter().flatten().count() as u64;
            let samples = layout.samples_of(place.replica).len() as u64;
            self.computed_us += self.step_us * units * samples / self.nominal;
        }
    }

    /// The reduced gradients of its prepared step are applied.
    pub(crate) fn apply(&mut self, step: Step) {
        if let Some((reduced, gradients)) = self.reduced.take()
            && reduced == step
        {
            self.memory.apply(step.0, &gradients);
            self.state.holding.step = step;
        }
    }
}

impl World {
    pub(crate) fn worker_sleeps(&self, who: &Who) -> Option<Time> {
        let until = self.workers.get(who)?.frozen_until;
        Some(until).filter(|until| *until > self.now)
    }

    pub(crate) fn worker_hello(&self, who: &Who) -> Option<Event> {
        let worker = self.workers.get(who)?;
        let node = node_name(worker.node);
        Some(Event::WorkerConnected {
            job: who.job.clone(),
            worker: who.key.clone(),
            endpoint: Endpoint { node: node.0.clone(), unix: who.key.to_string(), tcp: String::new() },
            node,
            pid: 1,
            state: worker.state.clone(),
        })
    }

    pub(crate) fn worker_says(&mut self, who: &Who, event: Event) {
        self.says(&Peer::Worker(who.clone()), event);
    }

    /// Everything of the epoch in hand ends; what it holds stays.
    pub(crate) fn quiesce(&mut self, who: &Who) {
        if let Some(worker) = self.workers.get_mut(who) {
            worker.next = None;
            worker.ahead = None;
            worker.pausing = false;
            let state = &mut worker.state;
            state.ready_epoch = Epoch(0);
            state.phase = if state.epoch == Epoch(0) { WorkerPhase::Idle } else { WorkerPhase::Quiesced };
        }
        self.says_quiesced(who);
    }

    /// Its data is open.
    pub(crate) fn opens(&mut self, who: &Who) {
        if let Some(worker) = self.workers.get_mut(who)
            && worker.state.phase == WorkerPhase::Opening
        {
            worker.state.phase = WorkerPhase::Idle;
            self.says_quiesced(who);
        }
    }

    pub(crate) fn says_quiesced(&mut self, who: &Who) {
        if let Some(worker) = self.workers.get(who) {
            let (job, worker, state) = (who.job.clone(), who.key.clone(), worker.state.clone());
            self.worker_says(who, Event::Quiesced { job, worker, state });
        }
    }
}
