//! The agent's time: grows steadily while it runs, and means the same after its restart.

use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Millis(pub(crate) u64);

impl Millis {
    pub(crate) fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(whole_ms(duration)))
    }

    pub(crate) fn before(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(whole_ms(duration)))
    }

    /// Whichever of the two is earlier.
    pub(crate) fn apart(self, other: Self) -> Duration {
        Duration::from_millis(self.0.abs_diff(other.0))
    }

    /// Zero when `earlier` is later.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

fn whole_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The wall clock as it was at the start, carried on without its later jumps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    wall: Millis,
    start: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { wall: Millis(whole_ms(wall)), start: Instant::now() }
    }

    pub(crate) fn now(&self) -> Millis {
        self.wall.after(self.start.elapsed())
    }
}
