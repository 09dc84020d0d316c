//! What is wrong with etcd is said when it begins, and then now and again while it lasts, however often it is found.

use crate::store::StoreError;
use std::collections::HashMap;
use std::mem::{Discriminant, discriminant};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

const AGAIN: Duration = Duration::from_secs(10);

/// When each was last said: what failed, and how.
#[derive(Debug, Default)]
pub(super) struct Complaints(Mutex<HashMap<(&'static str, Discriminant<StoreError>), Instant>>);

impl Complaints {
    /// Whether to say it now, which is noted as done.
    pub(super) fn is_due(&self, what: &'static str, error: &StoreError, now: Instant) -> bool {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (what, discriminant(error));
        let due = said.get(&key).is_none_or(|last| now.saturating_duration_since(*last) >= AGAIN);
        if due {
            said.insert(key, now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_trouble_is_said_at_once_and_again_after_a_while() {
        let complaints = Complaints::default();
        let lost = StoreError::LeadershipLost { problem: "one".to_owned() };
        let other = StoreError::Conflict { place: "there".to_owned() };
        let began = Instant::now();
        let due = |what, error, after| complaints.is_due(what, error, began + after);
        assert!(due("a write", &lost, Duration::ZERO));
        assert!(!due("a write", &lost, AGAIN / 2));
        assert!(due("a write", &other, AGAIN / 2), "it fails in another way");
        assert!(due("the lease", &lost, AGAIN / 2), "something else fails");
        assert!(due("a write", &lost, AGAIN));
        assert!(!due("a write", &lost, AGAIN + AGAIN / 2));
    }
}
