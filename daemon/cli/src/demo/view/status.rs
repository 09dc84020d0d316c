//! The status area.

use super::line::{Line, Style};
use super::spark::sparkline;
use crate::demo::job::TENSOR;
use crate::local::Record;
use std::time::Duration;

const RATE_STEPS: usize = 8;
const SPARKS: usize = 16;
/// The least that still looks like a bar.
const LEAST_BAR: usize = 8;

/// `run`: which run of the demo this is, if there are two.
pub(super) fn lines(record: &Record, steps: u64, run: &str, elapsed: Duration, width: usize) -> Vec<Line> {
    vec![rule(run, elapsed, width), progress(record, steps, width), replicas(record)]
}

/// Between the log and the status.
fn rule(run: &str, elapsed: Duration, width: usize) -> Line {
    let run = if run.is_empty() { String::new() } else { format!("{run} ") };
    let said = format!("{:.1}s {run}", elapsed.as_secs_f64());
    let rest = width.saturating_sub(3 + said.chars().count());
    Line::new().add(Style::Dim, "── ").add(Style::Bold, said).add(Style::Dim, "─".repeat(rest))
}

/// The bar takes the width that the rest leaves, and the rest has fixed widths, so that the bar stands still.
fn progress(record: &Record, steps: u64, width: usize) -> Line {
    let committed = record.committed();
    let losses: Vec<f64> = record.steps.values().map(|step| step.loss).collect();
    let rate = record.tokens_per_second(RATE_STEPS);
    let rate = rate.map_or(String::new(), |rate| format!("  {rate:.0} tokens/s"));
    let digits = steps.to_string().len();
    let before = format!("step {committed:>digits$}/{steps} ");
    let loss = losses.last().map_or(String::new(), |loss| format!("  loss {loss:.4} "));
    let after = "  loss 5.5555 ".len() + SPARKS + "  9999999 tokens/s".len();
    let bar = width.saturating_sub(before.len() + after).max(LEAST_BAR);
    let done = (committed.min(steps) as usize * bar) / steps.max(1) as usize;
    Line::new()
        .add(Style::Bold, before)
        .add(Style::Green, "█".repeat(done))
        .add(Style::Dim, "░".repeat(bar - done))
        .add(Style::Plain, loss)
        .add(Style::Cyan, format!("{:<SPARKS$}", sparkline(&losses, SPARKS)))
        .add(Style::Plain, rate)
}

fn replicas(record: &Record) -> Line {
    let mut line = Line::new();
    for (replica, &degree) in record.degrees().iter().enumerate() {
        let full = degree.min(TENSOR) as usize;
        let style = if degree < TENSOR { Style::Yellow } else { Style::Green };
        line = line
            .add(Style::Plain, format!("replica {replica} "))
            .add(style, "█".repeat(full))
            .add(Style::Dim, "░".repeat(TENSOR as usize - full))
            .add(style, format!(" TP{degree}   "));
    }
    let epoch = record.layouts.last().map_or(0, |layout| layout.epoch);
    line.add(Style::Dim, format!("epoch {epoch}  {}", record.phase))
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_proto::v1::job_event::Event;
    use reknit_proto::v1::{JobEvent, LayoutCommitted, StepCommitted};

    #[test]
    fn what_one_sees() {
        let mut record = Record::new(vec![4, 4], 16);
        let mut observe = |event| record.observe(&JobEvent { event: Some(event), ..JobEvent::default() });
        observe(Event::Layout(LayoutCommitted {
            epoch: 2,
            degrees: vec![4, 3],
            ..LayoutCommitted::default()
        }));
        observe(Event::Step(StepCommitted { step: 60, epoch: 2, loss: 2.5, ..StepCommitted::default() }));
        let text = |run: &str, width: usize| -> Vec<_> {
            let lines = lines(&record, 120, run, Duration::from_secs(3), width);
            lines.iter().map(|line| line.render(false, width)).collect()
        };
        let narrow = text("run 1 of 2: with faults", 60);
        assert_eq!(narrow[0], "── 3.0s run 1 of 2: with faults ────────────────────────────");
        assert_eq!(narrow[1], "step  60/120 ████░░░░  loss 2.5000 ▁");
        assert_eq!(narrow[2], "replica 0 ████ TP4   replica 1 ███░ TP3   epoch 2");
        let wide = text("", 101);
        assert_eq!(wide[0], format!("── 3.0s {}", "─".repeat(93)));
        assert_eq!(wide[1], format!("step  60/120 {}{}  loss 2.5000 ▁", "█".repeat(20), "░".repeat(20)));
    }
}
