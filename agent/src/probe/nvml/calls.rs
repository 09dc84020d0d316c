//! What one thread is asking of the driver right now, for whoever watches it from outside.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One thread's present call.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    present: Mutex<Option<Posted>>,
}

#[derive(Debug, Clone, Copy)]
struct Posted {
    name: &'static str,
    began: Instant,
    /// It may take this long and nothing be wrong.
    allowed: Duration,
}

impl Calls {
    /// Makes a call, posted under NVML's name for as long as it takes.
    pub(super) fn post<T>(&self, name: &'static str, call: impl FnOnce() -> T) -> T {
        self.post_wait(name, Duration::ZERO, call)
    }

    /// As `post`, for a call that may well take `allowed`.
    pub(super) fn post_wait<T>(&self, name: &'static str, allowed: Duration, call: impl FnOnce() -> T) -> T {
        self.set(Some(Posted { name, began: Instant::now(), allowed }));
        let result = call();
        self.set(None);
        result
    }

    /// The call that has not returned, and for how long, unless it may still take its time.
    pub(crate) fn overdue(&self) -> Option<(&'static str, Duration)> {
        let present = *self.present.lock().unwrap_or_else(PoisonError::into_inner);
        let posted = present?;
        let taken = posted.began.elapsed();
        (taken >= posted.allowed).then_some((posted.name, taken))
    }

    fn set(&self, posted: Option<Posted>) {
        *self.present.lock().unwrap_or_else(PoisonError::into_inner) = posted;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_shows_from_its_start_to_its_end_and_a_wait_once_it_is_late() {
        let calls = Calls::default();
        assert_eq!(calls.overdue(), None);
        calls.post("nvmlDeviceGetUUID", || assert_eq!(calls.overdue().unwrap().0, "nvmlDeviceGetUUID"));
        assert_eq!(calls.overdue(), None);
        let hour = Duration::from_secs(3600);
        calls.post_wait("nvmlEventSetWait_v2", hour, || assert_eq!(calls.overdue(), None));
        calls.post_wait("nvmlEventSetWait_v2", Duration::from_nanos(1), || {
            let began = Instant::now();
            while began.elapsed() < Duration::from_micros(1) {}
            assert!(calls.overdue().unwrap().1 >= Duration::from_nanos(1));
        });
    }
}
