//! Workers: what they are told and what they hold.

use crate::cluster::{job_name, node_name};
use crate::dial::Link;
use crate::memory::{Memory, Values};
use crate::net::Peer;
use crate::world::World;
use reknit_engine::{Endpoint, Event, StepVote, Time, WorkerPhase, WorkerState};
use reknit_layout::{Epoch, Holding, Plan, Step, WorkerKey};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) node: usize,
    pub(crate) state: WorkerState,
    /// What it trains on. Nothing but commits of steps and of epochs change it.
    pub(crate) memory: Memory,
    /// Reduced gradients of the step it has prepared.
    pub(crate) reduced: Option<(Step, Values)>,
    /// What it trains under.
    pub(crate) plan: Option<Arc<Plan>>,
    pub(crate) next: Option<Next>,
    pub(crate) link: Link,
    pub(crate) frozen_until: Time,
    /// Asked to stop at the next boundary.
    pub(crate) pausing: bool,
    pub(crate) ticks: u64,
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
    /// Fresh buffers; the memory stays as it is before the commit (ONLY-COPY).
    pub(crate) buffers: Option<Memory>,
}

pub(crate) fn vote(step: Step) -> StepVote {
    StepVote { grad_norm_squared: 1.0, loss: 1.0 / step.0 as f64 }
}

impl Worker {
    pub(crate) fn new(node: usize) -> Self {
        Self {
            node,
            state: WorkerState {
                phase: WorkerPhase::Idle,
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
            link: Link::default(),
            frozen_until: Time(0),
            pausing: false,
            ticks: 0,
        }
    }

    /// It trains under this epoch.
    pub(crate) fn trains(&self, epoch: Epoch) -> bool {
        self.state.phase == WorkerPhase::Training && self.state.epoch == epoch
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
    pub(crate) fn worker_sleeps(&self, key: &WorkerKey) -> Option<Time> {
        let until = self.workers.get(key)?.frozen_until;
        Some(until).filter(|until| *until > self.now)
    }

    pub(crate) fn worker_hello(&self, key: &WorkerKey) -> Option<Event> {
        let worker = self.workers.get(key)?;
        Some(Event::WorkerConnected {
            job: job_name(),
            worker: key.clone(),
            node: node_name(worker.node),
            endpoint: Endpoint { node: node_name(worker.node).0, unix: key.to_string(), tcp: String::new() },
            pid: 1,
            state: worker.state.clone(),
        })
    }

    pub(crate) fn worker_says(&mut self, key: &WorkerKey, event: Event) {
        self.says(&Peer::Worker(key.clone()), event);
    }

    /// Everything of the epoch in hand ends; what it holds stays.
    pub(crate) fn quiesce(&mut self, key: &WorkerKey) {
        if let Some(worker) = self.workers.get_mut(key) {
            worker.next = None;
            worker.pausing = false;
            let state = &mut worker.state;
            state.ready_epoch = Epoch(0);
            state.phase = if state.epoch == Epoch(0) { WorkerPhase::Idle } else { WorkerPhase::Quiesced };
        }
        self.says_quiesced(key);
    }

    pub(crate) fn says_quiesced(&mut self, key: &WorkerKey) {
        if let Some(worker) = self.workers.get(key) {
            let state = worker.state.clone();
            self.worker_says(key, Event::Quiesced { job: job_name(), worker: key.clone(), state });
        }
    }
}
