//! `reknit incidents JOB --id N`: everything of one.

use super::{gpu, milliseconds};
use crate::output::{bytes_text, or_none, time_text};
use crate::table::Table;
use reknit_proto::v1::Incident;

/// Cells of the timeline.
const WIDTH: usize = 40;
/// More replicas are told as counts.
const FEW: usize = 16;

pub(super) fn as_lines(incident: &Incident, state: &str) -> Vec<String> {
    let mut rows = vec![
        ("INCIDENT", format!("{} of job {}", incident.id, incident.job)),
        ("KIND", incident.kind.clone()),
        (
            "STATE",
            match milliseconds(incident) {
                Some(ms) => format!("{state} after {ms:.1} ms"),
                None => state.to_owned(),
            },
        ),
        ("FIRST SIGN", time_text(incident.detected_us)),
        ("SEEN BY", or_none(&incident.first_reporter)),
        ("CAUSE", or_none(&incident.signal)),
        ("PLACE", or_none(&incident.place)),
        (
            "GPU",
            match (gpu(incident), incident.gpu.as_str()) {
                (shown, uuid) if uuid.is_empty() || shown == uuid => or_none(&shown),
                (shown, uuid) => format!("{shown} ({uuid})"),
            },
        ),
        (
            "DEGREES",
            change(incident.told, &degrees(&incident.degrees_before), &degrees(&incident.degrees_after)),
        ),
    ];
    if !incident.told {
        let after = if incident.epoch_after == 0 { String::new() } else { incident.epoch_after.to_string() };
        rows.extend([
            ("EPOCH", change(false, &incident.epoch_before.to_string(), &after)),
            ("RUN AGAIN", format!("{} steps", incident.steps_lost)),
            (
                "MOVED",
                format!(
                    "{}, of which no plan could save {}",
                    bytes_text(incident.bytes_moved),
                    bytes_text(incident.bytes_lower_bound)
                ),
            ),
        ]);
    }
    rows.push(("TO DO", or_none(&incident.advice)));
    let mut table = Table::plain();
    for (name, value) in rows {
        table.row([name.to_owned(), value]);
    }
    let mut lines = table.lines();
    let phases = phases(incident);
    if !phases.is_empty() {
        lines.push(String::new());
        lines.extend(timeline(&phases).lines());
    }
    lines
}

/// `[4, 4] -> [3, 4]`; what only was told changed nothing.
fn change(told: bool, before: &str, after: &str) -> String {
    match (told, after) {
        (true, _) => before.to_owned(),
        (false, "") => format!("{before} -> not known yet"),
        (false, after) => format!("{before} -> {after}"),
    }
}

/// `[4, 3]`, or `1023 x 4, 1 x 3` when there are many; empty when there are none.
fn degrees(of: &[u32]) -> String {
    if of.is_empty() {
        return String::new();
    }
    if of.len() <= FEW {
        return format!("{of:?}");
    }
    let runs = of.chunk_by(|a, b| a == b).map(|run| format!("{} x {}", run.len(), run[0]));
    runs.collect::<Vec<_>>().join(", ")
}

/// The phases that have ended and their lengths in microseconds, as docs/recovery.md names them; each begins where the one
/// before ended.
fn phases(incident: &Incident) -> Vec<(&'static str, u64)> {
    let ends = [
        ("quiesce", incident.quiesced_us),
        ("fence", incident.fenced_us),
        ("plan", incident.planned_us),
        ("reshard", incident.ready_us),
        ("commit", incident.recovered_us),
    ];
    if incident.told {
        return Vec::new();
    }
    let mut last = incident.detected_us;
    let mut lengths = Vec::new();
    for (name, end) in ends.into_iter().filter(|(_, end)| *end != 0) {
        let length = end.saturating_sub(last);
        last += length;
        lengths.push((name, length));
    }
    lengths
}

/// One under the other, each to the right of the one before.
fn timeline(phases: &[(&str, u64)]) -> Table {
    let total: u64 = phases.iter().map(|(_, length)| length).sum();
    let cell = |us: u64| (us as f64 / total.max(1) as f64 * WIDTH as f64).round() as usize;
    let mut table = Table::new(["PHASE", "MS", ""]);
    let mut from = 0;
    for (name, length) in phases {
        let (start, end) = (cell(from), cell(from + length));
        from += length;
        let bar = format!("{}{}", " ".repeat(start), "█".repeat(end - start));
        table.row([(*name).to_owned(), format!("{:.1}", *length as f64 / 1e3), bar]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recovered() -> Incident {
        Incident {
            id: 7,
            job: "demo".to_owned(),
            kind: "gpu_lost".to_owned(),
            place: "0.0.1".to_owned(),
            gpu: "GPU-a".to_owned(),
            node: "node-0".to_owned(),
            index: Some(1),
            signal: "XID 79".to_owned(),
            first_reporter: "agent of node-0".to_owned(),
            epoch_before: 3,
            epoch_after: 4,
            detected_us: 1_796_008_398_123_456,
            quiesced_us: 1_796_008_398_143_456,
            fenced_us: 1_796_008_398_144_456,
            planned_us: 1_796_008_398_153_456,
            ready_us: 1_796_008_398_183_456,
            committed_us: 1_796_008_398_184_000,
            recovered_us: 1_796_008_398_323_456,
            steps_lost: 1,
            bytes_moved: 7_372_800,
            bytes_lower_bound: 7_372_800,
            degrees_before: vec![4, 4],
            degrees_after: vec![3, 4],
            advice: "Reset the GPU.".to_owned(),
            told: false,
        }
    }

    #[test]
    fn everything_of_a_recovery() {
        assert_eq!(
            as_lines(&recovered(), "recovered"),
            [
                "INCIDENT    7 of job demo",
                "KIND        gpu_lost",
                "STATE       recovered after 200.0 ms",
                "FIRST SIGN  2026-11-30T03:13:18.123Z",
                "SEEN BY     agent of node-0",
                "CAUSE       XID 79",
                "PLACE       0.0.1",
                "GPU         node-0/1 (GPU-a)",
                "DEGREES     [4, 4] -> [3, 4]",
                "EPOCH       3 -> 4",
                "RUN AGAIN   1 steps",
                "MOVED       7.0 MiB, of which no plan could save 7.0 MiB",
                "TO DO       Reset the GPU.",
                "",
                "PHASE    MS",
                "quiesce  20.0   ████",
                "fence    1.0",
                "plan     9.0        ██",
                "reshard  30.0         ██████",
                "commit   140.0              ████████████████████████████",
            ]
        );
    }

    #[test]
    fn one_under_way_shows_what_has_ended() {
        let open = Incident {
            planned_us: 0,
            ready_us: 0,
            committed_us: 0,
            recovered_us: 0,
            epoch_after: 0,
            degrees_after: vec![],
            ..recovered()
        };
        let lines = as_lines(&open, "planning");
        assert!(lines.contains(&"STATE       planning".to_owned()), "{lines:?}");
        assert!(lines.contains(&"DEGREES     [4, 4] -> not known yet".to_owned()), "{lines:?}");
        assert_eq!(phases(&open), [("quiesce", 20_000), ("fence", 1_000)]);
    }

    #[test]
    fn what_was_only_told_has_changed_nothing() {
        let told = Incident { told: true, degrees_after: vec![], epoch_after: 0, ..recovered() };
        let lines = as_lines(&told, "over");
        assert_eq!(lines.last().map(String::as_str), Some("TO DO       Reset the GPU."));
        assert!(lines.contains(&"DEGREES     [4, 4]".to_owned()), "{lines:?}");
        assert!(!lines.iter().any(|line| line.starts_with("EPOCH") || line.contains("->")), "{lines:?}");
    }

    #[test]
    fn many_replicas_are_counted() {
        let mut of = vec![8; 2047];
        of.push(7);
        assert_eq!(degrees(&of), "2047 x 8, 1 x 7");
    }
}
