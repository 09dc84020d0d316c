//! Ends everything of an epoch at once, from the session's thread, while the training thread sits in it.

use reknit_layout::Epoch;
use reknit_plane::{AbortReason, Aborter, Plane};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Every group of every live epoch, and the highest epoch that is closed (ONE-EPOCH: nothing of it starts again).
#[derive(Debug)]
pub struct Aborts {
    plane: PlaneHandle,
    inner: Mutex<Inner>,
}

struct PlaneHandle(Arc<dyn Plane>);

impl std::fmt::Debug for PlaneHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Plane")
    }
}

#[derive(Default)]
struct Inner {
    closed: Epoch,
    live: Vec<(Epoch, Arc<dyn Aborter>)>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "closed {}, {} live groups", self.closed, self.live.len())
    }
}

impl Aborts {
    pub fn new(plane: Arc<dyn Plane>) -> Self {
        Self { plane: PlaneHandle(plane), inner: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Aborts the groups and the joins of every epoch up to and including `epoch`. May be repeated.
    pub fn close(&self, epoch: Epoch, reason: AbortReason) {
        let mut inner = self.lock();
        inner.closed = inner.closed.max(epoch);
        let closed = inner.closed;
        inner.live.retain(|(of, aborter)| {
            if *of <= closed {
                aborter.abort(reason.clone());
            }
            *of > closed
        });
        drop(inner);
        self.plane.0.abort_joins(epoch.0);
    }

    /// Aborts the groups of one epoch that are there now: one of them failed, so the others' peers must not wait.
    pub fn abort_siblings(&self, epoch: Epoch) {
        for (of, aborter) in &self.lock().live {
            if *of == epoch {
                aborter.abort(AbortReason::Sibling);
            }
        }
    }

    /// From now on `aborter` ends with its epoch; at once, if that is closed already.
    pub fn register(&self, epoch: Epoch, aborter: Arc<dyn Aborter>) {
        let mut inner = self.lock();
        if epoch <= inner.closed {
            aborter.abort(AbortReason::EpochClosed);
        } else {
            inner.live.push((epoch, aborter));
        }
    }

    /// Forgets the groups of epochs before `epoch`: they have been left.
    pub fn forget_before(&self, epoch: Epoch) {
        self.lock().live.retain(|(of, _)| *of >= epoch);
    }

    pub fn is_closed(&self, epoch: Epoch) -> bool {
        epoch <= self.lock().closed
    }
}
