//! How long each phase of a recovery took.

use reknit_proto::v1::Incident;
use serde::Serialize;

/// Milliseconds. The phases follow each other without gaps, so they add up to `total`: from the fault to the first
/// step committed after it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Phases {
    pub(crate) detect: f64,
    pub(crate) quiesce: f64,
    pub(crate) fence: f64,
    pub(crate) plan: f64,
    pub(crate) reshard: f64,
    /// Includes the first step after it.
    pub(crate) commit: f64,
    pub(crate) total: f64,
}

impl Phases {
    /// `fault_us`: when the fault was made, on the same clock as the incident's times. `None` until a step was
    /// committed after it.
    ///
    /// A time that is missing, or earlier than the one before it, gives a phase of no length.
    pub(crate) fn of(fault_us: u64, incident: &Incident) -> Option<Self> {
        if incident.recovered_us == 0 {
            return None;
        }
        let mut last = fault_us;
        let mut until = |time_us: u64| {
            let length = time_us.saturating_sub(last);
            last += length;
            length as f64 / 1000.0
        };
        Some(Self {
            detect: until(incident.detected_us),
            quiesce: until(incident.quiesced_us),
            fence: until(incident.fenced_us),
            plan: until(incident.planned_us),
            reshard: until(incident.ready_us),
            commit: until(incident.recovered_us),
            total: last.saturating_sub(fault_us) as f64 / 1000.0,
        })
    }

    pub(crate) fn named(&self) -> [(&'static str, f64); 6] {
        [
            ("detect", self.detect),
            ("quiesce", self.quiesce),
            ("fence", self.fence),
            ("plan", self.plan),
            ("reshard", self.reshard),
            ("commit", self.commit),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incident() -> Incident {
        Incident {
            detected_us: 1_003_000,
            quiesced_us: 1_010_500,
            fenced_us: 1_011_000,
            planned_us: 1_012_000,
            ready_us: 1_030_000,
            committed_us: 1_031_000,
            recovered_us: 1_200_000,
            ..Incident::default()
        }
    }

    #[test]
    fn the_phases_add_up_to_the_total() {
        let phases = Phases::of(1_000_000, &incident()).unwrap();
        assert_eq!(phases.detect, 3.0);
        assert_eq!(phases.quiesce, 7.5);
        assert_eq!(phases.fence, 0.5);
        assert_eq!(phases.plan, 1.0);
        assert_eq!(phases.reshard, 18.0);
        assert_eq!(phases.commit, 170.0);
        assert_eq!(phases.total, 200.0);
        assert_eq!(phases.named().map(|(_, ms)| ms).iter().sum::<f64>(), 200.0);
    }

    #[test]
    fn a_fault_seen_before_it_was_written_down_takes_no_time_to_detect() {
        let phases = Phases::of(1_004_000, &incident()).unwrap();
        assert_eq!((phases.detect, phases.quiesce), (0.0, 6.5));
        assert_eq!(phases.total, 196.0);
    }

    #[test]
    fn a_phase_that_was_not_reached_has_no_length() {
        let skipped = Incident { fenced_us: 0, ..incident() };
        let phases = Phases::of(1_000_000, &skipped).unwrap();
        assert_eq!((phases.fence, phases.plan), (0.0, 1.5));
        assert_eq!(phases.total, 200.0);
    }

    #[test]
    fn nothing_is_said_before_the_recovery_is_over() {
        let open = Incident { recovered_us: 0, ..incident() };
        assert_eq!(Phases::of(1_000_000, &open), None);
    }
}
