//! How likely a GPU is to fail soon: points that are forgotten by half in a given time.

use crate::clock::Millis;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Less is forgotten whole.
const LEAST: f64 = 0.1;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct RiskScore {
    points: BTreeMap<String, f64>,
    /// When `points` were right.
    at: Option<Millis>,
}

impl RiskScore {
    pub(super) fn add(&mut self, now: Millis, half_life: Duration, cause: &str, points: f64) {
        if points <= 0.0 {
            return;
        }
        let left = self.left(now, half_life);
        self.points.retain(|_, points| {
            *points *= left;
            *points >= LEAST
        });
        // An event may be told late, such as from the kernel log.
        self.at = self.at.max(Some(now));
        *self.points.entry(cause.to_owned()).or_insert(0.0) += points;
    }

    pub(super) fn total(&self, now: Millis, half_life: Duration) -> f64 {
        self.points.values().sum::<f64>() * self.left(now, half_life)
    }

    /// The largest parts first, such as `XID 94: contained memory error 60, a memory row was remapped 45`.
    pub(super) fn words(&self, now: Millis, half_life: Duration) -> String {
        let left = self.left(now, half_life);
        let mut parts: Vec<_> = self.points.iter().collect();
        parts.sort_by(|a, b| b.1.total_cmp(a.1).then(a.0.cmp(b.0)));
        let parts = parts.iter().map(|(cause, points)| format!("{cause} {:.0}", *points * left));
        parts.collect::<Vec<_>>().join(", ")
    }

    /// The part of the points that time has left.
    fn left(&self, now: Millis, half_life: Duration) -> f64 {
        let age = self.at.map_or(Duration::ZERO, |at| now.since(at));
        0.5_f64.powf(age.as_secs_f64() / half_life.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_add_up_and_are_forgotten() {
        let hour = Duration::from_secs(3600);
        let start = Millis(0);
        let mut risk = RiskScore::default();
        risk.add(start, hour, "a", 40.0);
        risk.add(start, hour, "b", 20.0);
        assert!((risk.total(start, hour) - 60.0).abs() < 1e-9);
        let later = start.after(hour);
        assert!((risk.total(later, hour) - 30.0).abs() < 1e-9);
        risk.add(later, hour, "b", 30.0);
        assert!((risk.total(later, hour) - 60.0).abs() < 1e-9);
        assert_eq!(risk.words(later, hour), "b 40, a 20");
        let much_later = start.after(100 * hour);
        risk.add(much_later, hour, "c", 1.0);
        assert_eq!(risk.words(much_later, hour), "c 1");
    }
}
