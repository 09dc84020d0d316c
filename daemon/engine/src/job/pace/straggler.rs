//! Whose steps take longer to compute than its share of the work explains.

use reknit_layout::Step;
use std::collections::VecDeque;

/// A member this many times as slow as its peers is named.
const NAMED: f64 = 1.3;
/// One that was named is below this again: it is no straggler any more.
const CLEARED: f64 = 1.15;
/// Named again when the factor is so many times what was told, or told is so many times the factor.
const CHANGED: f64 = 1.3;
/// Whatever is said was seen so many times in a row.
const SUSTAINED: u32 = 3;
/// Reports whose median counts.
const WINDOW: usize = 7;
const LEAST: usize = 5;

/// One member's computing over the last reports.
#[derive(Debug, Clone, Default)]
pub(crate) struct Track {
    last: Option<(Step, u64)>,
    /// Microseconds a step.
    samples: VecDeque<f64>,
    seen: u32,
    told: Option<f64>,
}

/// What follows from one more look.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Verdict {
    Nothing,
    /// For the first time, or by a factor that has changed.
    Named,
    Cleared,
}

impl Track {
    /// It was named by an earlier daemon, whatever its factor was then.
    pub(crate) fn told_before() -> Self {
        Self { told: Some(NAMED), ..Self::default() }
    }

    /// All committed steps took `computed_us` to compute, up to and including `step`.
    pub(crate) fn sample(&mut self, step: Step, computed_us: u64) {
        if let Some((before, computed)) = self.last
            && step > before
            && computed_us >= computed
        {
            self.samples.push_back((computed_us - computed) as f64 / (step.0 - before.0) as f64);
            if self.samples.len() > WINDOW {
                self.samples.pop_front();
            }
        }
        self.last = Some((step, computed_us));
    }

    /// The work is another: what was measured before tells nothing.
    pub(crate) fn begin(&mut self) {
        self.last = None;
        self.samples.clear();
        self.seen = 0;
    }

    /// Microseconds a step; `None` before there are enough reports.
    pub(crate) fn typical(&self) -> Option<f64> {
        (self.samples.len() >= LEAST).then(|| median(self.samples.iter().copied()))?
    }

    pub(crate) fn told(&self) -> bool {
        self.told.is_some()
    }

    pub(crate) fn judge(&mut self, factor: f64) -> Verdict {
        let telling = match self.told {
            None => factor >= NAMED,
            Some(_) if factor < CLEARED => true,
            Some(told) => factor >= told * CHANGED || factor <= told / CHANGED,
        };
        self.seen = if telling { self.seen + 1 } else { 0 };
        if self.seen < SUSTAINED {
            return Verdict::Nothing;
        }
        self.seen = 0;
        if self.told.is_some() && factor < CLEARED {
            self.told = None;
            Verdict::Cleared
        } else {
            self.told = Some(factor);
            Verdict::Named
        }
    }
}

/// The upper one of two in the middle; `None` of nothing.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<_> = values.collect();
    let middle = values.len() / 2;
    if values.is_empty() {
        return None;
    }
    let (_, value, _) = values.select_nth_unstable_by(middle, f64::total_cmp);
    Some(*value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_once_again_when_it_changes_and_cleared_late() {
        let looks = [
            // A burst that does not last.
            (1.0, ' '),
            (2.0, ' '),
            (2.0, ' '),
            (1.1, ' '),
            (1.5, ' '),
            (1.6, ' '),
            (1.5, 'n'),
            (1.5, ' '),
            (1.6, ' '),
            (1.4, ' '),
            (1.5, ' '),
            // Not named again for little, nor cleared near the limit.
            (1.2, ' '),
            (1.25, ' '),
            (1.18, ' '),
            (1.9, ' '),
            (2.4, ' '),
            (2.4, ' '),
            (2.5, 'n'),
            (2.4, ' '),
            (1.1, ' '),
            (1.0, ' '),
            (1.1, 'c'),
            (1.1, ' '),
        ];
        let mut track = Track::default();
        for (at, (factor, expected)) in looks.into_iter().enumerate() {
            let verdict = match track.judge(factor) {
                Verdict::Nothing => ' ',
                Verdict::Named => 'n',
                Verdict::Cleared => 'c',
            };
            assert_eq!(verdict, expected, "look {at}, factor {factor}");
        }
    }

    #[test]
    fn a_step_of_several_reports_is_their_mean_and_one_long_step_means_little() {
        let mut track = Track::default();
        let mut computed = 0;
        for (report, took) in [10, 10, 10, 400, 10, 10, 10].into_iter().enumerate() {
            assert_eq!(track.typical().is_none(), report < 6, "before report {report}");
            computed += took * 2;
            track.sample(Step(report as u64 * 2), computed);
        }
        assert_eq!(track.typical(), Some(10.0));
        // A step that is no later, or another process: no sample.
        track.sample(Step(12), 5);
        track.sample(Step(3), 7);
        assert_eq!(track.samples.len(), 6);
        track.begin();
        assert_eq!(track.typical(), None);
    }
}
