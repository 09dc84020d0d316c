//! What the losses come to, for programs and for people.

use super::Blow;
use super::trial::{Comeback, Loss, Seen};
use crate::bench::job::count;
use crate::bench::spread::Spread;
use crate::failure::Failure;
use crate::local::{Phases, median};
use crate::output::bytes_text;
use crate::table::Table;
use reknit_layout::JobSpec;
use reknit_layout::job::ModelSpec;
use serde::Serialize;

/// Every figure is measured. Times in milliseconds.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    step_ms: Middle,
    /// In layouts that lack a worker, without the first: while a new process starts, on the same cores. Null when none was
    /// seen.
    uneven_step_ms: Option<Middle>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kill_to_commit_ms: Option<Spread>,
    /// As `kill_to_commit_ms`, of workers that were stopped instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    frozen_to_commit_ms: Option<Spread>,
    /// From the new process' first word, or from the first step without it if that came later, until the first committed
    /// step that it took part in. Null when none came.
    rejoin_ms: Option<Most>,
    /// From the signal until then.
    whole_again_ms: Option<Most>,
    steps_lost_max: u64,
    samples_lost: u64,
    samples_repeated: u64,
    /// Medians.
    phases_ms: Phases,
    /// Bytes that had to move for each loss over the whole of its reshard phase; null when none had to.
    reshard_gb_s: Option<f64>,
    /// From the new process' start to its first word.
    startup_ms: Option<Most>,
    /// What the others lost to each return beyond a step.
    stalled_ms: Option<Most>,
    bytes_moved: u64,
    losses: usize,
    /// Losses that the daemon took for what they were, where they were.
    named: usize,
    signal: Blow,
    #[serde(skip_serializing_if = "Option::is_none")]
    throughput: Option<Kept>,
    job: Job,
    #[serde(skip)]
    kinds: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Middle {
    median: f64,
}

#[derive(Debug, Serialize)]
struct Most {
    median: f64,
    max: f64,
}

/// Tokens a second, with every worker and without the one that left.
#[derive(Debug, Serialize)]
struct Kept {
    before: f64,
    after: f64,
    kept_percent: f64,
    /// Workers left, in percent.
    workers_percent: f64,
    /// Seconds of processor time a second that the lost worker took.
    lost_cores: f64,
    /// The same of what stands in for it.
    stand_in_cores: f64,
}

/// What was trained.
#[derive(Debug, Serialize)]
struct Job {
    data: u32,
    tensor: u32,
    params: u64,
    global_batch: u32,
    model: ModelSpec,
}

impl Most {
    fn of(values: &[f64]) -> Option<Self> {
        Spread::of(values).map(|Spread { median, max, .. }| Self { median, max })
    }
}

impl Figures {
    pub(super) fn of(spec: &JobSpec, blow: Blow, seen: &Seen) -> Result<Self, Failure> {
        let Seen { record, losses, until, throughput } = seen;
        let nothing = || Failure::Failed("no step was measured".to_owned());
        let step_ms = Spread::of(&record.whole_step_ms()).ok_or_else(nothing)?.median;
        let spread = |of: &dyn Fn(&Loss) -> f64| Spread::of(&losses.iter().map(of).collect::<Vec<_>>());
        let comebacks = |of: &dyn Fn(&Comeback) -> f64| {
            let comebacks = losses.iter().filter_map(|loss| loss.comeback.as_ref());
            Most::of(&comebacks.map(of).collect::<Vec<_>>())
        };
        let to_commit = spread(&|loss| loss.to_commit);
        let (kill_to_commit_ms, frozen_to_commit_ms) = match blow {
            Blow::Kill => (to_commit, None),
            Blow::Stop => (None, to_commit),
        };
        let (samples_lost, samples_repeated) = record.samples(0, *until);
        let workers = f64::from(spec.parallel.data * spec.parallel.tensor);
        let throughput = throughput.map(|rates| Kept {
            before: rates.before.round(),
            after: rates.after.round(),
            kept_percent: tenths(rates.after / rates.before * 100.0),
            workers_percent: tenths((workers - 1.0) / workers * 100.0),
            lost_cores: hundredths(rates.lost_cores),
            stand_in_cores: hundredths(rates.stand_in_cores),
        });
        Ok(Self {
            step_ms: Middle { median: step_ms },
            uneven_step_ms: median(&record.uneven_step_ms()).map(|median| Middle { median }),
            kill_to_commit_ms,
            frozen_to_commit_ms,
            rejoin_ms: comebacks(&|comeback| comeback.rejoin),
            whole_again_ms: comebacks(&|comeback| comeback.whole_again),
            steps_lost_max: losses.iter().map(|loss| loss.steps_lost).max().unwrap_or(0),
            samples_lost,
            samples_repeated,
            phases_ms: phases(losses),
            reshard_gb_s: reshard_rate(losses),
            startup_ms: comebacks(&|comeback| comeback.startup),
            stalled_ms: comebacks(&|comeback| (comeback.gap - step_ms).max(0.0)),
            bytes_moved: losses.iter().map(|loss| loss.bytes_moved).sum(),
            losses: losses.len(),
            named: losses.iter().filter(|loss| loss.named).count(),
            signal: blow,
            throughput,
            job: Job {
                data: spec.parallel.data,
                tensor: spec.parallel.tensor,
                params: count(&spec.model),
                global_batch: spec.batch.global,
                model: spec.model.clone(),
            },
            kinds: losses.iter().filter(|loss| !loss.named).map(|loss| loss.kind.clone()).collect(),
        })
    }

    pub(super) fn lines(&self) -> Vec<String> {
        let Job { data, tensor, params, .. } = &self.job;
        let by = match self.signal {
            Blow::Kill => "SIGKILL",
            Blow::Stop => "SIGSTOP",
        };
        let workers = if self.losses == 1 { "worker" } else { "workers" };
        let uneven = self.uneven_step_ms.as_ref();
        let uneven = uneven.map_or(String::new(), |step| format!(", in {:.0} ms without one", step.median));
        let mut lines = vec![
            format!(
                "{data} replicas of {tensor} workers, {:.1} million parameters, a step in {:.0} ms{uneven}; {} {workers} \
                 lost to {by}, one after another",
                *params as f64 / 1e6,
                self.step_ms.median,
                self.losses
            ),
            String::new(),
        ];
        let mut table = Table::new(["MS", "MIN", "MEDIAN", "MAX"]);
        let cell = |value: f64| format!("{value:.1}");
        if let Some(spread) = self.kill_to_commit_ms.or(self.frozen_to_commit_ms) {
            let name = format!("{by} to next step");
            table.row([name, cell(spread.min), cell(spread.median), cell(spread.max)]);
        }
        for (name, median) in self.phases_ms.named() {
            table.row([format!("  {name}"), String::new(), cell(median)]);
        }
        let rest = [
            ("start of the new process", &self.startup_ms),
            ("up, and the others train, to its first step", &self.rejoin_ms),
            ("  that others waited for it", &self.stalled_ms),
            (&*format!("{by} to the next step with everybody"), &self.whole_again_ms),
        ];
        for (name, most) in rest {
            if let Some(most) = most {
                table.row([name.to_owned(), String::new(), cell(most.median), cell(most.max)]);
            }
        }
        lines.extend(table.lines());
        lines.push(String::new());
        lines.push(format!(
            "lost: {} samples, {} repeated; at most {} step run again for a loss; {} of {} losses named rightly",
            self.samples_lost, self.samples_repeated, self.steps_lost_max, self.named, self.losses
        ));
        if let Some(rate) = self.reshard_gb_s {
            let moved = bytes_text(self.bytes_moved / self.losses.max(1) as u64);
            lines.push(format!("moved: {moved} a loss, {rate:.2} GB/s over the whole reshard phase"));
        }
        if let Some(Kept { before, after, kept_percent, workers_percent, lost_cores, stand_in_cores }) =
            &self.throughput
        {
            lines.push(format!(
                "throughput: {before:.0} tokens/s with every worker, {after:.0} without one and its share of the cores: \
                 {kept_percent:.1} % goes on ({workers_percent:.1} % of the workers are left)"
            ));
            lines.push(format!(
                "the lost worker took {lost_cores:.2} cores, and what stands in for it {stand_in_cores:.2}"
            ));
        }
        lines
    }

    /// What must not be; empty when all is well.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if (self.samples_lost, self.samples_repeated) != (0, 0) {
            problems.push(format!(
                "{} samples were lost and {} repeated",
                self.samples_lost, self.samples_repeated
            ));
        }
        if self.steps_lost_max > 1 {
            problems.push(format!("a loss cost {} steps", self.steps_lost_max));
        }
        if !self.kinds.is_empty() {
            problems.push(format!("the daemon took losses for something else: {}", self.kinds.join(", ")));
        }
        problems
    }
}

fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Of each phase, the median.
fn phases(losses: &[Loss]) -> Phases {
    let middle = |of: fn(&Phases) -> f64| {
        let times: Vec<_> = losses.iter().map(|loss| of(&loss.phases)).collect();
        Spread::of(&times).map_or(0.0, |spread| spread.median)
    };
    Phases {
        detect: middle(|phases| phases.detect),
        quiesce: middle(|phases| phases.quiesce),
        fence: middle(|phases| phases.fence),
        plan: middle(|phases| phases.plan),
        reshard: middle(|phases| phases.reshard),
        commit: middle(|phases| phases.commit),
        total: middle(|phases| phases.total),
    }
}

fn reshard_rate(losses: &[Loss]) -> Option<f64> {
    let moved = losses.iter().filter(|loss| loss.bytes_moved > 0 && loss.phases.reshard > 0.0);
    let rates: Vec<_> = moved.map(|loss| loss.bytes_moved as f64 / (loss.phases.reshard * 1e6)).collect();
    median(&rates).map(|rate| (rate * 1e3).round() / 1e3)
}
