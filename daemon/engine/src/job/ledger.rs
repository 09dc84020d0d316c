//! SAMPLES, watched: which samples went into which committed step, as replicas report it.

use super::commit::CommittedStep;
use crate::Notice;
use reknit_layout::{Epoch, Layout, ReplicaId, Step};
use std::collections::{BTreeMap, BTreeSet};

/// A step whose reports are still incomplete when every replica has reported one this many steps later is given up:
/// the missing are named as missing.
const WINDOW: u64 = 8;
/// As many reports as a worker keeps while it has no session.
const LARGEST: usize = 4096;

#[derive(Debug, Clone)]
pub(crate) struct Ledger {
    /// Samples of a step over all replicas.
    global: u32,
    /// The replicas that train in the last few epochs.
    trains: BTreeMap<Epoch, BTreeSet<ReplicaId>>,
    steps: BTreeMap<Step, Entry>,
    /// The newest step that each replica reported.
    newest: BTreeMap<ReplicaId, Step>,
    may_have_missed: Step,
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
        Self {
            global,
            trains: BTreeMap::new(),
            steps: BTreeMap::new(),
            newest: BTreeMap::new(),
            may_have_missed: Step(0),
            settled: Step(0),
        }
    }

    /// Reports of steps up to here may be lost: with a session that ended, with their worker, with a daemon. Nothing
    /// can be said of what was not heard.
    pub(crate) fn may_have_missed(&mut self, step: Step) {
        self.may_have_missed = self.may_have_missed.max(step);
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
        let newest = self.newest.entry(replica).or_default();
        *newest = report.step.max(*newest);
        if report.step <= self.settled {
            return notices;
        }
        let first = !self.steps.contains_key(&report.step);
        let entry = self.steps.entry(report.step).or_insert_with(|| Entry {
            report: *report,
            ranges: BTreeSet::new(),
            done: false,
        });
        // All ranks of a replica report the same.
        if !entry.ranges.insert((replica, report.first_sample, report.samples)) {
            return notices;
        }
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
        let training = self.trains.values().next_back().into_iter().flatten();
        let newest = training.map(|replica| self.newest.get(replica).copied().unwrap_or_default());
        let heard_of_all = newest.min().unwrap_or_default();
        while let Some((step, entry)) = self.steps.first_key_value() {
            // A finished step is kept for a while so that a repeated report of it is recognised.
            let waited = heard_of_all.0.saturating_sub(step.0) >= WINDOW;
            if !waited && self.steps.len() <= LARGEST {
                break;
            }
            if waited && !entry.done && *step > self.may_have_missed {
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
    let (from, to) = (step.0.saturating_sub(1).saturating_mul(global), step.0.saturating_mul(global));
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

    /// Replica 0 alone reports these steps.
    fn alone(ledger: &mut Ledger, steps: std::ops::Range<u64>) -> Vec<Notice> {
        steps.flat_map(|step| ledger.record(ReplicaId(0), &report(step, (step - 1) * 8, 4))).collect()
    }

    #[test]
    fn nothing_is_called_missing_before_every_replica_is_heard() {
        let mut ledger = ledger();
        let early = alone(&mut ledger, 100..150);
        assert_eq!(complete(&early), []);
        let late = (100..150).flat_map(|step| ledger.record(ReplicaId(1), &report(step, step * 8 - 4, 4)));
        let expected: Vec<_> = (100..150).map(|step| (step, 0, 0)).collect();
        assert_eq!(complete(&late.collect::<Vec<_>>()), expected);
    }

    #[test]
    fn what_a_lost_session_swallowed_is_not_called_missing() {
        let mut ledger = ledger();
        alone(&mut ledger, 100..150);
        ledger.may_have_missed(Step(120));
        let notices = ledger.record(ReplicaId(1), &report(150, 1196, 4));
        let expected: Vec<_> = (121..142).map(|step| (step, 4, 0)).collect();
        assert_eq!(complete(&notices), expected);
    }

    #[test]
    fn a_replica_that_is_never_heard_costs_bounded_memory() {
        let mut ledger = ledger();
        assert_eq!(complete(&alone(&mut ledger, 1..10_000)), []);
        assert_eq!(ledger.steps.len(), LARGEST);
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
