//! SAMPLES, watched: which samples went into which committed step, as replicas report it.

use super::commit::CommittedStep;
use crate::Notice;
use reknit_layout::{Epoch, Layout, ReplicaId, Step};
use std::collections::{BTreeMap, BTreeSet};

/// A step whose reports are still incomplete this many steps later is given up: the missing are named as missing.
const WINDOW: u64 = 8;

#[derive(Debug, Clone)]
pub(crate) struct Ledger {
    /// Samples of a step over all replicas.
    global: u32,
    /// The replicas that train in the last few epochs.
    trains: BTreeMap<Epoch, BTreeSet<ReplicaId>>,
    steps: BTreeMap<Step, Entry>,
    /// Steps up to here were reported before this daemon listened: nothing is said about what it did not hear.
    heard_from: Option<Step>,
    /// Every step up to here is settled.
    settled: Step,
}

#[derive(Debug, Clone)]
struct Entry {
    report: CommittedStep,
    ranges: BTreeSet<(ReplicaId, u64, u32)>,
    done: bool,
}

impl Ledger {
    pub(crate) fn new(global: u32) -> Self {
        Self { global, trains: BTreeMap::new(), steps: BTreeMap::new(), heard_from: None, settled: Step(0) }
    }

    /// A new daemon came in the middle: the first step it hears of may be incomplete for it.
    pub(crate) fn listen_late(&mut self, committed: Step) {
        self.heard_from = Some(Step(committed.0 + 1));
        self.settled = self.settled.max(committed);
    }

    pub(crate) fn begin_epoch(&mut self, layout: &Layout) {
        let replicas = (0u32..).zip(&layout.batch);
        let training = replicas.filter(|(_, samples)| **samples > 0).map(|(replica, _)| ReplicaId(replica));
        self.trains.insert(layout.epoch, training.collect());
        while self.trains.len() > 4 {
            self.trains.pop_first();
        }
    }

    /// Notes a report and returns what operators shall hear.
    pub(crate) fn record(&mut self, replica: ReplicaId, report: &CommittedStep) -> Vec<Notice> {
        let mut notices = Vec::new();
        if report.step <= self.settled {
            return notices;
        }
        let first = !self.steps.contains_key(&report.step);
        let entry = self.steps.entry(report.step).or_insert_with(|| Entry {
            report: *report,
            ranges: BTreeSet::new(),
            done: false,
        });
        entry.ranges.insert((replica, report.first_sample, report.samples));
        if first {
            notices.push(notice(&entry.report, false, 0, 0));
        }
        let heard: BTreeSet<_> = entry.ranges.iter().map(|(replica, _, _)| *replica).collect();
        let expected = self.trains.get(&entry.report.epoch);
        if !entry.done && expected.is_some_and(|expected| expected.is_subset(&heard)) {
            entry.done = true;
            let (missing, repeated) = tiling(self.global, report.step, &entry.ranges);
            notices.push(notice(&entry.report, true, missing, repeated));
        }
        self.settle(&mut notices);
        notices
    }

    /// Forgets what is complete in order, and gives up what has waited long enough.
    fn settle(&mut self, notices: &mut Vec<Notice>) {
        let newest = self.steps.keys().next_back().copied().unwrap_or_default();
        while let Some((step, entry)) = self.steps.first_key_value() {
            let old = step.0 + WINDOW <= newest.0;
            // A finished step is kept for a while so that a repeated report of it is recognised.
            if !old {
                break;
            }
            let unheard = self.heard_from.is_some_and(|from| *step <= from);
            if !entry.done && !unheard {
                let (missing, repeated) = tiling(self.global, *step, &entry.ranges);
                notices.push(notice(&entry.report, true, missing, repeated));
            }
            self.settled = *step;
            self.steps.pop_first();
        }
    }
}

fn notice(report: &CommittedStep, complete: bool, missing: u32, repeated: u32) -> Notice {
    Notice::Step {
        epoch: report.epoch,
        step: report.step,
        loss: report.vote.loss,
        tokens: report.tokens,
        step_ms: report.step_ms,
        complete,
        samples_missing: missing,
        samples_repeated: repeated,
    }
}

/// How many samples of the step's range no replica reported, and how many were reported more than once or do not
/// belong to the step. Step k covers the samples `(k-1)*global .. k*global`.
fn tiling(global: u32, step: Step, ranges: &BTreeSet<(ReplicaId, u64, u32)>) -> (u32, u32) {
    let global = u64::from(global);
    let (from, to) = (step.0.saturating_sub(1) * global, step.0 * global);
    let mut sorted: Vec<_> = ranges
        .iter()
        .map(|(_, first, samples)| (*first, first.saturating_add(u64::from(*samples))))
        .collect();
    sorted.sort_unstable();
    let (mut covered, mut given, mut reach) = (0, 0u64, from);
    for (first, end) in sorted {
        given = given.saturating_add(end - first);
        let (first, end) = (first.max(reach), end.min(to));
        if first < end {
            covered += end - first;
            reach = end;
        }
    }
    let small = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
    (small(to - from - covered), small(given - covered))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StepVote;

    fn report(step: u64, first_sample: u64, samples: u32) -> CommittedStep {
        CommittedStep {
            epoch: Epoch(1),
            step: Step(step),
            vote: StepVote { grad_norm_squared: 1.0, loss: 2.0 },
            first_sample,
            samples,
            step_ms: 10,
            tokens: 100,
            rolled_forward: false,
        }
    }

    fn ledger() -> Ledger {
        let mut ledger = Ledger::new(8);
        ledger.trains.insert(Epoch(1), [ReplicaId(0), ReplicaId(1)].into());
        ledger
    }

    fn complete(notices: &[Notice]) -> Vec<(u64, u32, u32)> {
        let steps = notices.iter().filter_map(|notice| {
            let Notice::Step { step, complete, samples_missing, samples_repeated, .. } = notice else {
                return None;
            };
            complete.then_some((step.0, *samples_missing, *samples_repeated))
        });
        steps.collect()
    }

    #[test]
    fn a_step_is_complete_when_every_replica_reported_once() {
        let mut ledger = ledger();
        let first = ledger.record(ReplicaId(0), &report(3, 16, 4));
        assert_eq!((first.len(), complete(&first)), (1, vec![]));
        assert!(ledger.record(ReplicaId(0), &report(3, 16, 4)).is_empty());
        let last = ledger.record(ReplicaId(1), &report(3, 20, 4));
        assert_eq!(complete(&last), [(3, 0, 0)]);
        assert!(ledger.record(ReplicaId(1), &report(3, 20, 4)).is_empty());
    }

    #[test]
    fn gaps_and_repeats_are_counted() {
        let mut ledger = ledger();
        ledger.record(ReplicaId(0), &report(1, 0, 5));
        let notices = ledger.record(ReplicaId(1), &report(1, 4, 3));
        assert_eq!(complete(&notices), [(1, 1, 1)]);
    }

    #[test]
    fn a_step_without_all_reports_is_given_up_honestly_and_memory_stays_bounded() {
        let mut ledger = ledger();
        ledger.record(ReplicaId(0), &report(1, 0, 4));
        let mut notices = Vec::new();
        for step in 2..200 {
            let first = (step - 1) * 8;
            notices.extend(ledger.record(ReplicaId(0), &report(step, first, 4)));
            notices.extend(ledger.record(ReplicaId(1), &report(step, first + 4, 4)));
        }
        let complete = complete(&notices);
        assert_eq!(complete.iter().filter(|c| c.1 != 0).count(), 1);
        assert!(complete.contains(&(1, 4, 0)));
        assert_eq!(complete.len(), 199);
        assert!(ledger.steps.len() <= WINDOW as usize);
    }
}
