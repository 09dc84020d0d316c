//! The one clock.

use reknit_engine::Time;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Microseconds since the Unix epoch as they were at the start, plus what has passed since. It never runs
/// backwards, whatever happens to the machine's wall clock.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    started_at: Time,
    started: Instant,
}

impl Clock {
    pub fn start() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        Self { started_at: Time(since_epoch.unwrap_or_default().as_micros() as u64), started: Instant::now() }
    }

    pub fn now(&self) -> Time {
        self.started_at.after(self.started.elapsed())
    }

    /// How long until `time`; zero when it has passed.
    pub fn until(&self, time: Time) -> Duration {
        Duration::from_micros(time.0.saturating_sub(self.now().0))
    }
}
