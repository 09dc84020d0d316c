//! What the training thread shows to the session's thread.

use crate::messages::{Phase, StepVote, WorkerState};
use reknit_layout::{Epoch, Holding, Step};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The state as of now, for a Hello at any time, and the proof of progress.
#[derive(Debug)]
pub struct Status {
    ticks: Arc<AtomicU64>,
    pause: AtomicU64,
    state: Mutex<WorkerState>,
}

impl Default for Status {
    fn default() -> Self {
        let state = WorkerState {
            phase: Phase::Idle,
            epoch: Epoch(0),
            ready_epoch: Epoch(0),
            holding: Holding::default(),
            prepared: Step(0),
            attempted: Step(0),
            vote: None,
        };
        Self { ticks: Arc::default(), pause: AtomicU64::new(0), state: Mutex::new(state) }
    }
}

impl Status {
    /// Counts every operation done on the data plane: it grows only while training moves.
    pub fn ticks(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.ticks)
    }

    /// The daemon wishes that the epoch's members stop together at the next step boundary.
    pub fn ask_pause(&self, epoch: Epoch) {
        self.pause.store(epoch.0, Ordering::Relaxed);
    }

    pub fn pause_asked(&self, epoch: Epoch) -> bool {
        self.pause.load(Ordering::Relaxed) == epoch.0
    }

    pub fn state(&self) -> WorkerState {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set_state(&self, state: WorkerState) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// A step was committed while training: cheaper than a whole new state.
    pub fn set_committed(&self, step: Step, vote: StepVote) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.holding.step = step;
        state.prepared = step;
        state.attempted = step;
        state.vote = Some(vote);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_committed_step_comes_with_its_own_vote() {
        let status = Status::default();
        let vote = |loss| StepVote { grad_norm_squared: 2.0, loss };
        status.set_state(WorkerState { phase: Phase::Training, vote: Some(vote(3.0)), ..status.state() });
        status.set_committed(Step(7), vote(1.5));
        let state = status.state();
        assert_eq!((state.holding.step, state.prepared, state.attempted), (Step(7), Step(7), Step(7)));
        assert_eq!(state.vote, Some(vote(1.5)), "others may roll forward with it");
    }
}
