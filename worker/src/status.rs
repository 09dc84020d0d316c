//! What the training thread shows to the session's thread.

use crate::messages::{Phase, StepVote, WorkerState};
use crate::pace::Pace;
use reknit_layout::{Epoch, Holding, Step};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The state as of now, for a Hello at any time, and the proof of progress.
#[derive(Debug)]
pub struct Status {
    pace: Arc<Pace>,
    pause: AtomicU64,
    shown: Mutex<Shown>,
}

#[derive(Debug)]
struct Shown {
    state: WorkerState,
    /// Of the steps committed so far.
    computed: Duration,
}

impl Default for Status {
    fn default() -> Self {
        let state = WorkerState {
            phase: Phase::Opening,
            epoch: Epoch(0),
            ready_epoch: Epoch(0),
            holding: Holding::default(),
            prepared: Step(0),
            attempted: Step(0),
            vote: None,
        };
        Self {
            pace: Arc::default(),
            pause: AtomicU64::new(0),
            shown: Mutex::new(Shown { state, computed: Duration::ZERO }),
        }
    }
}

impl Status {
    pub fn pace(&self) -> &Arc<Pace> {
        &self.pace
    }

    /// The daemon wishes that the epoch's members stop together at the next step boundary.
    pub fn ask_pause(&self, epoch: Epoch) {
        self.pause.store(epoch.0, Ordering::Relaxed);
    }

    pub fn pause_asked(&self, epoch: Epoch) -> bool {
        self.pause.load(Ordering::Relaxed) == epoch.0
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn state(&self) -> WorkerState {
        self.shown().state.clone()
    }

    /// While training: the epoch, the committed step, and the time that all steps so far were computed for.
    pub fn trained(&self) -> Option<(Epoch, Step, Duration)> {
        let shown = self.shown();
        let training = shown.state.phase == Phase::Training;
        training.then(|| (shown.state.epoch, shown.state.holding.step, shown.computed))
    }

    pub fn set_state(&self, state: WorkerState) {
        self.shown().state = state;
    }

    /// A step was committed while training: cheaper than a whole new state.
    /// `computed`: how long it took without the waiting for others.
    pub fn set_committed(&self, step: Step, vote: StepVote, computed: Duration) {
        let mut shown = self.shown();
        shown.computed += computed;
        let state = &mut shown.state;
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
        status.set_committed(Step(7), vote(1.5), Duration::from_millis(3));
        let state = status.state();
        assert_eq!((state.holding.step, state.prepared, state.attempted), (Step(7), Step(7), Step(7)));
        assert_eq!(state.vote, Some(vote(1.5)), "others may roll forward with it");
    }
}
