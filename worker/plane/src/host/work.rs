//! How a submitter waits for its operation, and what the threads of a group share.

use super::room::Room;
use super::running::Running;
use crate::{AbortReason, Aborter, Buffer, PlaneError, WAITING_SHOWN, Work};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How much later than the deadline a submitter gives up by itself, should the engine be gone.
const MARGIN: Duration = Duration::from_millis(500);

/// A panic while a lock was held leaves plain data that is still whole.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How an operation ended.
#[derive(Debug)]
pub(super) enum End {
    Done(Buffer),
    /// Why stands in what the group shares.
    Failed,
}

/// Where an operation's end is put.
#[derive(Debug, Default)]
pub(super) struct Slot {
    state: Mutex<SlotState>,
    set: Condvar,
}

#[derive(Debug, Default)]
struct SlotState {
    end: Option<End>,
    /// Somebody sleeps until it is set: only then is the system asked to wake anybody.
    awaited: bool,
}

impl Slot {
    pub(super) fn set(&self, end: End) {
        let mut state = lock(&self.state);
        if state.end.is_none() {
            state.end = Some(end);
            if state.awaited {
                self.set.notify_one();
            }
        }
    }

    pub(super) fn is_set(&self) -> bool {
        lock(&self.state).end.is_some()
    }

    /// `None` when nothing came in time.
    pub(super) fn take(&self, until: Instant) -> Option<End> {
        let mut state = lock(&self.state);
        state.awaited = true;
        loop {
            if state.end.is_some() {
                return state.end.take();
            }
            let left = until.checked_duration_since(Instant::now())?;
            state = self.set.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// What a group's owner, its aborters, its works and the engine all see.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) epoch: u64,
    first_error: Mutex<Option<PlaneError>>,
    pending: AtomicUsize,
    /// Kept by whoever moves the group's data.
    waiting: Mutex<Waiting>,
}

/// Whom the running operation misses, as far as it is told.
#[derive(Debug, Clone, Copy, Default)]
struct Waiting {
    ranks: [usize; WAITING_SHOWN],
    count: usize,
}

/// Held by an operation until it has ended.
#[derive(Debug)]
pub(super) struct Pending(Arc<Shared>);

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.pending.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    pub(super) fn new(id: u64, name: &str, rank: usize, size: usize, epoch: u64) -> Shared {
        Shared {
            id,
            name: name.to_owned(),
            rank,
            size,
            epoch,
            first_error: Mutex::new(None),
            pending: AtomicUsize::new(0),
            waiting: Mutex::default(),
        }
    }

    /// Operations that have not ended.
    pub(super) fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }

    pub(super) fn count(shared: &Arc<Shared>) -> Pending {
        shared.pending.fetch_add(1, Ordering::Relaxed);
        Pending(Arc::clone(shared))
    }

    /// Tells whom the running operation, if any, misses. Each time there is nothing to move.
    pub(super) fn tell_waiting(&self, running: Option<&Running>) {
        let mut waiting = Waiting::default();
        for rank in running.into_iter().flat_map(Running::unfinished) {
            if waiting.count == WAITING_SHOWN {
                break;
            }
            if !waiting.ranks[..waiting.count].contains(&rank) {
                waiting.ranks[waiting.count] = rank;
                waiting.count += 1;
            }
        }
        *lock(&self.waiting) = waiting;
    }

    pub(super) fn error(&self) -> Option<PlaneError> {
        lock(&self.first_error).clone()
    }

    /// The first error stays and is returned.
    pub(super) fn fail(&self, error: PlaneError) -> PlaneError {
        lock(&self.first_error).get_or_insert(error).clone()
    }

    /// What an operation's end is to who waits for it. A peer lost later does not undo what finished before; an abort by
    /// this rank does.
    pub(super) fn outcome(&self, end: End) -> Result<Buffer, PlaneError> {
        match (end, self.error()) {
            (End::Done(_), Some(error @ PlaneError::Aborted { .. })) => Err(error),
            (End::Done(buffer), Some(_) | None) => Ok(buffer),
            (End::Failed, Some(error)) => Err(error),
            (End::Failed, None) => Err(self.io("the group is over")),
        }
    }

    pub(super) fn aborted(&self, reason: AbortReason) -> PlaneError {
        PlaneError::Aborted { group: self.name.clone(), reason }
    }

    pub(super) fn io(&self, detail: impl Into<String>) -> PlaneError {
        PlaneError::Io { group: self.name.clone(), detail: detail.into() }
    }

    pub(super) fn late(&self, running: Option<&Running>, what: String, after: Duration) -> PlaneError {
        PlaneError::Deadline {
            group: self.name.clone(),
            what,
            after,
            waiting_for: running.map(Running::waiting_for).unwrap_or_default(),
        }
    }
}

#[derive(Debug)]
pub(super) struct HostAborter(pub(super) Arc<Room>);

impl Aborter for HostAborter {
    fn abort(&self, reason: AbortReason) {
        let shared = &self.0.shared;
        shared.fail(shared.aborted(reason));
        self.0.ring();
    }

    fn waiting_for(&self) -> Vec<usize> {
        let waiting = *lock(&self.0.shared.waiting);
        waiting.ranks[..waiting.count].to_vec()
    }
}

#[derive(Debug)]
pub(super) struct HostWork {
    pub(super) room: Arc<Room>,
    pub(super) slot: Arc<Slot>,
    pub(super) what: String,
    pub(super) deadline: Instant,
    pub(super) limit: Duration,
}

impl Work for HostWork {
    fn wait(self: Box<Self>) -> Result<Buffer, PlaneError> {
        let (shared, until) = (&self.room.shared, self.deadline + MARGIN);
        if !self.slot.is_set() {
            // Another thread that waits in the same group, or the engine, may be at it.
            self.room.drive(&self.slot, until, None);
        }
        let Some(end) = self.slot.take(until) else {
            let error = shared.fail(shared.late(None, self.what, self.limit));
            self.room.ring();
            return Err(error);
        };
        shared.outcome(end)
    }

    fn is_done(&self) -> bool {
        self.slot.is_set() || Instant::now() >= self.deadline + MARGIN
    }
}
