//! What a demo comes to, for programs and for people.

use crate::local::{FaultKind, Phases, Record, degrees_text, median};
use crate::output::bytes_text;
use crate::table::Table;
use serde::Serialize;

/// The shape of `reknit demo --format json`. Every figure is measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) faults: Vec<FaultSummary>,
    pub(crate) degrees_seen: Vec<Vec<u32>>,
    /// Committed.
    pub(crate) steps: u64,
    /// Outside recoveries.
    pub(crate) step_ms_median: Option<f64>,
    pub(crate) loss_first: Option<f64>,
    pub(crate) loss_last: Option<f64>,
    /// The largest relative difference of any step's loss from the same step without faults; null without `--verify`.
    pub(crate) parity_max_rel: Option<f64>,
    pub(crate) checkpoint_loads: u64,
    pub(crate) bytes_moved: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct FaultSummary {
    pub(crate) kind: FaultKind,
    pub(crate) steps_lost: u64,
    pub(crate) samples_lost: u64,
    pub(crate) samples_repeated: u64,
    /// Null when the job never recovered.
    pub(crate) recovery_ms: Option<Phases>,
}

impl Summary {
    pub(crate) fn of(record: &Record, parity_max_rel: Option<f64>) -> Self {
        let faults = record.faults.iter().enumerate().map(|(index, fault)| {
            let (samples_lost, samples_repeated) = record.samples_of_fault(index);
            FaultSummary {
                kind: fault.kind,
                steps_lost: fault.incident.as_ref().map_or(0, |incident| incident.steps_lost),
                samples_lost,
                samples_repeated,
                recovery_ms: record.phases(index),
            }
        });
        let mut losses = record.steps.values().map(|step| step.loss);
        Self {
            faults: faults.collect(),
            degrees_seen: record.degrees_seen(),
            steps: record.steps.len() as u64,
            step_ms_median: median(&record.step_ms()),
            loss_first: losses.next(),
            loss_last: losses.next_back(),
            parity_max_rel,
            checkpoint_loads: record.went_back,
            bytes_moved: record.bytes_moved(),
        }
    }

    /// The table of faults and the figures under it, for a screen of 80 columns.
    pub(crate) fn lines(&self, record: &Record) -> Vec<String> {
        let mut table =
            Table::new(["MS", "AT", "DETECT", "QUIESCE", "FENCE", "PLAN", "RESHARD", "COMMIT", "TOTAL"]);
        for (summary, fault) in self.faults.iter().zip(&record.faults) {
            let ms = |of: fn(&Phases) -> f64| match &summary.recovery_ms {
                Some(phases) => format!("{:.1}", of(phases)),
                None => "-".to_owned(),
            };
            table.row([
                fault.kind.name().to_owned(),
                fault.place.clone(),
                ms(|phases| phases.detect),
                ms(|phases| phases.quiesce),
                ms(|phases| phases.fence),
                ms(|phases| phases.plan),
                ms(|phases| phases.reshard),
                ms(|phases| phases.commit),
                ms(|phases| phases.total),
            ]);
        }
        let number = |value: Option<f64>, digits: usize| match value {
            Some(value) => format!("{value:.digits$}"),
            None => "-".to_owned(),
        };
        let degrees: Vec<_> = self.degrees_seen.iter().map(|degrees| degrees_text(degrees)).collect();
        let mut lines = table.lines();
        lines.push(String::new());
        for (summary, fault) in self.faults.iter().zip(&record.faults) {
            lines.push(format!(
                "{:<15}after step {}: {} {} run again, {} samples lost, {} repeated",
                fault.kind.name(),
                fault.after_step,
                summary.steps_lost,
                if summary.steps_lost == 1 { "step" } else { "steps" },
                summary.samples_lost,
                summary.samples_repeated
            ));
        }
        lines.push(format!("degrees        {}", degrees.join(" -> ")));
        lines.push(format!(
            "steps          {}, median {} ms outside recoveries; loss {} -> {}",
            self.steps,
            number(self.step_ms_median, 0),
            number(self.loss_first, 4),
            number(self.loss_last, 4)
        ));
        lines.push(format!(
            "moved          {} between GPUs in {} layouts; went back to an older state: {}",
            bytes_text(self.bytes_moved),
            record.layouts.len(),
            self.checkpoint_loads
        ));
        lines.push(match self.parity_max_rel {
            Some(parity) => {
                format!("parity         loss of every step within {parity:.1e} of the run without faults")
            }
            None => "parity         not compared".to_owned(),
        });
        lines
    }

    /// What is wrong with the run; empty when it did all it should.
    pub(crate) fn problems(&self, record: &Record, steps: u64) -> Vec<String> {
        let mut problems = Vec::new();
        if record.committed() != steps || self.steps != steps {
            problems.push(format!(
                "{} steps were seen, up to step {}, where {steps} were to be committed",
                self.steps,
                record.committed()
            ));
        }
        if !record.standing().whole {
            problems.push(format!("the last layout is {}, not whole", degrees_text(record.degrees())));
        }
        let (lost, repeated) = record.samples(0, steps);
        if (lost, repeated) != (0, 0) {
            problems.push(format!("{lost} samples were lost and {repeated} repeated"));
        }
        if self.checkpoint_loads != 0 {
            problems.push(format!("the job went back to an older state {} times", self.checkpoint_loads));
        }
        for fault in &record.faults {
            let seen = fault.incident.as_ref().map(|incident| incident.kind.as_str());
            if seen != Some(fault.kind.name()) {
                problems.push(format!(
                    "the daemon recorded the {} at {} as {}",
                    fault.kind.name(),
                    fault.place,
                    seen.unwrap_or("nothing")
                ));
            }
        }
        for (fault, summary) in record.faults.iter().zip(&self.faults) {
            if summary.recovery_ms.is_none() {
                problems.push(format!("no step was seen after the fault at {}", fault.place));
            }
            if summary.steps_lost > 1 {
                problems.push(format!("the fault at {} cost {} steps", fault.place, summary.steps_lost));
            }
        }
        if let Some(parity) = self.parity_max_rel.filter(|parity| parity.is_nan() || *parity > PARITY_LIMIT) {
            problems.push(format!(
                "the loss differs from the run without faults by {parity:.1e}, more than {PARITY_LIMIT:.0e}"
            ));
        }
        problems
    }
}

/// Rounding of f32 sums in another order, over a few hundred steps.
pub(crate) const PARITY_LIMIT: f64 = 1e-4;

#[cfg(test)]
#[path = "summary_tests.rs"]
mod tests;
