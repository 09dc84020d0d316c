//! What the training thread is doing: written by it, a few atomic stores an operation, and read by the session's thread.

use crate::messages::StepPart;
use reknit_layout::WorkerKey;
use reknit_plane::{Aborter, WAITING_SHOWN};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Where training is, and how long it has waited for others.
#[derive(Debug, Default)]
pub struct Pace {
    ticks: AtomicU64,
    part: AtomicU32,
    micro_batch: AtomicU32,
    /// Microseconds in operations since the worker began.
    waited_us: AtomicU64,
    waiting: Mutex<Option<Wait>>,
}

/// An operation in hand.
#[derive(Debug, Clone)]
struct Wait {
    since: Instant,
    party: Arc<Party>,
}

/// The members of a group, and how to ask its plane.
pub struct Party {
    pub aborter: Arc<dyn Aborter>,
    /// In rank order.
    pub members: Vec<WorkerKey>,
}

impl std::fmt::Debug for Party {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Party({:?})", self.members)
    }
}

/// What the session tells of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Activity {
    pub ticks: u64,
    pub part: Option<StepPart>,
    pub micro_batch: u32,
    /// At most [`WAITING_SHOWN`].
    pub waiting_for: Vec<WorkerKey>,
    /// How long the operation in hand has taken.
    pub waiting: Duration,
}

impl Pace {
    /// A part of the step begins.
    pub fn enter(&self, part: StepPart) {
        self.part.store(part as u32, Ordering::Relaxed);
    }

    pub fn enter_batch(&self, micro_batch: u32) {
        self.micro_batch.store(micro_batch, Ordering::Relaxed);
        self.enter(StepPart::Forward);
    }

    /// An operation was done without anybody else.
    pub fn tick(&self) {
        self.ticks.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs an operation with the party.
    pub fn wait<R>(&self, party: &Arc<Party>, operation: impl FnOnce() -> R) -> R {
        let since = Instant::now();
        self.set_waiting(Some(Wait { since, party: Arc::clone(party) }));
        let result = operation();
        self.set_waiting(None);
        self.waited_us.fetch_add(since.elapsed().as_micros() as u64, Ordering::Relaxed);
        self.tick();
        result
    }

    fn set_waiting(&self, wait: Option<Wait>) {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = wait;
    }

    /// Since the worker began.
    pub fn waited(&self) -> Duration {
        Duration::from_micros(self.waited_us.load(Ordering::Relaxed))
    }

    /// How long the operation in hand has taken.
    pub fn waiting(&self) -> Option<Duration> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|wait| wait.since.elapsed())
    }

    pub fn activity(&self) -> Activity {
        let wait = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let waiting_for = wait.as_ref().map(|Wait { party, .. }| {
            let ranks = party.aborter.waiting_for().into_iter().take(WAITING_SHOWN);
            ranks.filter_map(|rank| party.members.get(rank).cloned()).collect()
        });
        Activity {
            ticks: self.ticks.load(Ordering::Relaxed),
            part: StepPart::numbered(self.part.load(Ordering::Relaxed)),
            micro_batch: self.micro_batch.load(Ordering::Relaxed),
            waiting_for: waiting_for.unwrap_or_default(),
            waiting: wait.map(|wait| wait.since.elapsed()).unwrap_or_default(),
        }
    }
}
