//! The status area.

use super::line::{Line, Style};
use super::spark::sparkline;
use crate::demo::job::TENSOR;
use crate::demo::record::Record;
use std::time::Duration;

const RATE_STEPS: usize = 8;

pub(super) fn lines(
    record: &Record,
    steps: u64,
    headline: &str,
    elapsed: Duration,
    width: usize,
) -> Vec<Line> {
    vec![
        Line::new().add(Style::Dim, "─".repeat(width.min(100))),
        progress(record, steps),
        replicas(record),
        Line::new().add(Style::Bold, format!("{:5.1}s ", elapsed.as_secs_f64())).add(Style::Plain, headline),
    ]
}

fn progress(record: &Record, steps: u64) -> Line {
    let committed = record.committed();
    let done = (committed * 20 / steps.max(1)).min(20) as usize;
    let losses: Vec<f64> = record.steps.values().map(|step| step.loss).collect();
    let mut line = Line::new()
        .add(Style::Bold, format!("step {committed:>4}/{steps} "))
        .add(Style::Green, "█".repeat(done))
        .add(Style::Dim, "░".repeat(20 - done));
    if let Some(loss) = losses.last() {
        line = line.add(Style::Plain, format!("  loss {loss:.4} ")).add(Style::Cyan, sparkline(&losses, 16));
    }
    match record.tokens_per_second(RATE_STEPS) {
        Some(rate) => line.add(Style::Plain, format!("  {rate:.0} tokens/s")),
        None => line,
    }
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
        let text: Vec<_> = lines(&record, 120, "a headline", Duration::from_secs(3), 80)
            .iter()
            .map(|line| line.render(false, 80))
            .collect();
        assert_eq!(text[1], "step   60/120 ██████████░░░░░░░░░░  loss 2.5000 ▁");
        assert_eq!(text[2], "replica 0 ████ TP4   replica 1 ███░ TP3   epoch 2");
        assert_eq!(text[3], "  3.0s a headline");
    }
}
