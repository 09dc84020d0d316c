//! Holdings files: what is read is what was written, and shared. What is refused is told in the tests of `reknit plan`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use reknit_layout::{Axis, HoldingsFile, JobSpec, Place, Step, Units, job};
use std::sync::Arc;

fn read(text: &str) -> HoldingsFile {
    let job = JobSpec::parse(job::EXAMPLE, "example").unwrap();
    HoldingsFile::read(&job, &mut serde_json::Deserializer::from_str(text)).unwrap()
}

#[test]
fn places_hold_what_is_written() {
    let file = read(
        r#"{
            "0.0.1": {"step": 7, "units": {"attn/3": [[0, 3], [5, 6]], "vocab": [[0, 16]], "ffn/0": []}},
            "1.0.1": {"units": {"vocab": [[0, 16]], "attn/3": [[0, 3], [5, 6]]}, "step": 8},
            "1.0.2": {"step": 9, "units": {"ffn/0": []}}
        }"#,
    );
    assert_eq!(file.seats, None);
    let [a, b] = [&file.holdings[&Place::new(0, 0, 1)], &file.holdings[&Place::new(1, 0, 1)]];
    assert_eq!((a.step, b.step), (Step(7), Step(8)));
    assert_eq!(a.of(Axis::attn(3)), [(0, 3), (5, 6)].into_iter().collect());
    assert_eq!(a.of(Axis::vocab()), Units::range(0, 16));
    assert!(Arc::ptr_eq(&a.units, &b.units), "workers that hold the same share it");
    assert_eq!(file.holdings.len(), 2, "a place that holds nothing is absent");
}

#[test]
fn a_printed_plan_tells_seats_and_holdings() {
    // The first group has lost slot 1; the second does not train.
    let slots = |node: &str, active: [bool; 4]| {
        let slot = |(slot, active): (usize, &bool)| {
            format!(r#"{{"slot": {slot}, "gpu": "{node}/{slot}", "active": {active}}}"#)
        };
        active.iter().enumerate().map(slot).collect::<Vec<_>>().join(",")
    };
    let text = format!(
        r#"{{"version": 1, "recoverable": true, "batch": [], "groups": [
            {{"replica": 0, "stage": 0, "degree": 3, "slots": [{}], "partitions": [
                {{"family": "attn", "layers": [1, 3], "owned": [[[0, 4]], [], [[4, 8]], [[8, 12]]]}},
                {{"family": "vocab", "layers": null, "owned": [[[0, 16]], [], [], []]}}]}},
            {{"partitions": [], "slots": [{}], "stage": 0, "replica": 1}}]}}"#,
        slots("a", [true, false, true, true]),
        slots("b", [false; 4]),
    );
    let file = read(&text);
    let seats = file.seats.unwrap();
    assert_eq!(seats.len(), 8);
    assert_eq!(seats[&Place::new(1, 0, 3)].0, "b/3");
    let places: Vec<_> = file.holdings.keys().map(ToString::to_string).collect();
    assert_eq!(places, ["0.0.0", "0.0.2", "0.0.3"]);
    let first = &file.holdings[&Place::default()];
    let axes: Vec<_> = first.units.keys().map(ToString::to_string).collect();
    assert_eq!(axes, ["attn/1", "attn/2", "vocab"]);
    assert_eq!((first.step, first.of(Axis::attn(2))), (Step(0), Units::range(0, 4)));
}
