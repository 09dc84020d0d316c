//! NVML's events: heard at once, asked for again, and never a storm.

use crate::harness::{Node, PATIENCE};
use crate::process::{Probe, reading_of};
use reknit_simdriver::state::State;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

#[test]
fn a_storm_of_failing_waits_does_not_spin() {
    let node = Node::new(4);
    let probe = Probe::start(&node, 1000);
    node.set_node("wait_error=999");
    let gaps: Vec<Value> = (0..4).map(|_| probe.wait_for("gap", |line| line.get("gap").cloned())).collect();
    for gap in &gaps {
        let what = gap["what"].as_str().unwrap();
        assert!(what.starts_with("XID events: NVML code 999 from nvmlEventSetWait_v2"), "{what}");
    }
    let before = probe.cpu_ticks();
    let said = probe.all(Duration::from_secs(2));
    let used = probe.cpu_ticks() - before;
    println!("{used} ticks of CPU time in 2 s");
    assert!(used <= 10, "{used} ticks in 2 s");
    assert!(said.iter().all(|line| line.get("gap").is_none()), "said once each");
    node.set_node("wait_error=null");
    hears_xids_again(&node, &probe);
}

/// Raises XIDs until one is heard: those from before the GPU's events were registered are lost.
fn hears_xids_again(node: &Node, probe: &Probe) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < deadline, "no XID is heard any more");
        node.xid(0, 31);
        if let Some(xid) = probe.within(Duration::from_millis(100), |line| line.get("xid").cloned()) {
            assert_eq!(xid, json!({"gpu": node.gpus[0], "xid": 31}));
            return;
        }
    }
}

#[test]
fn events_that_cannot_be_had_at_first_are_asked_for_again() {
    let node = Node::new(1);
    node.set(0, "errors={\"nvmlDeviceRegisterEvents\":999}");
    let probe = Probe::start(&node, 20);
    let gap = probe.wait_for("gap", |line| line.get("gap").cloned());
    let what = gap["what"].as_str().unwrap();
    assert!(what.starts_with("XID events: NVML code 999 from nvmlDeviceRegisterEvents"), "{what}");
    assert!(probe.reading(&node.gpus[0]).get("answers").is_some());
    node.set(0, "errors={}");
    hears_xids_again(&node, &probe);
}

#[test]
fn a_gpu_that_comes_back_is_heard_again_at_once() {
    let node = Node::new(1);
    let probe = Probe::start(&node, 20);
    node.set(0, "lost=true");
    probe.wait_for("loss", |line| reading_of(line, &node.gpus[0])?.get("gone").cloned());
    // Long enough for the listener to wait a second between its tries.
    probe.all(Duration::from_secs(2));
    node.set(0, "lost=false");
    probe.wait_for("answer", |line| reading_of(line, &node.gpus[0])?.get("answers").cloned());
    let back = Instant::now();
    hears_xids_again(&node, &probe);
    println!("heard {:?} after it came back", back.elapsed());
    assert!(back.elapsed() < Duration::from_millis(400), "{:?}", back.elapsed());
}

#[test]
fn an_event_has_both_sets_read_at_once() {
    let node = Node::new(2);
    let probe = Probe::start(&node, 60_000);
    for _ in &node.gpus {
        probe.wait_for("first reading", |line| line.get("reading").cloned());
    }
    let began = Instant::now();
    State::update(&node.driver(), |s| s.raise_recovery_action(1)).unwrap();
    let read = probe.reading(&node.gpus[1]);
    assert!(began.elapsed() < Duration::from_millis(200), "{:?}", began.elapsed());
    assert!(!read["answers"]["slow"].is_null());
    assert_eq!(probe.within(Duration::from_millis(300), |line| reading_of(line, &node.gpus[0])), None);
}
