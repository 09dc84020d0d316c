//! Calls that do not return, and a supervisor that is gone or mad.

use crate::harness::{Node, PATIENCE, kill, runs};
use crate::process::{Probe, reading_of};
use serde_json::json;
use std::io::Write;
use std::net::Shutdown;
use std::time::{Duration, Instant};

#[test]
fn one_hung_call_is_named_and_hides_no_other_gpu() {
    let node = Node::new(3);
    let mut probe = Probe::start(&node, 20);
    node.set(1, "hangs=[\"nvmlDeviceGetPcieReplayCounter\"]");
    probe.order(json!("read_now"));
    let busy = probe.wait_for("busy call", |line| {
        line["tick"]["busy"].as_array()?.iter().find(|busy| busy["ms"].as_u64() > Some(300)).cloned()
    });
    assert_eq!(
        (&busy["gpu"], &busy["call"]),
        (&json!(node.gpus[1]), &json!("nvmlDeviceGetPcieReplayCounter"))
    );
    let said = probe.all(Duration::from_millis(500));
    let readings = |gpu: &str| said.iter().filter(|line| reading_of(line, gpu).is_some()).count();
    assert!(readings(&node.gpus[0]) > 10 && readings(&node.gpus[2]) > 10);
    assert_eq!(readings(&node.gpus[1]), 0);
    // The hung GPU's orders wait; another's do not.
    probe.set_power_limit(&node.gpus[1], Some(300_000));
    probe.set_power_limit(&node.gpus[2], Some(400_000));
    assert_eq!(probe.power_limit(), json!({"gpu": node.gpus[2], "set": {"Ok": 400_000}}));
    node.set(1, "hangs=[]");
    assert_eq!(probe.power_limit(), json!({"gpu": node.gpus[1], "set": {"Ok": 300_000}}));
    assert!(probe.reading(&node.gpus[1]).get("answers").is_some());
    probe.wait_for("calm", |line| (line["tick"]["busy"] == json!([])).then_some(()));
}

#[test]
fn a_driver_that_hangs_as_a_whole_silences_no_tick_and_no_refusal() {
    let node = Node::new(2);
    let mut probe = Probe::start(&node, 20);
    node.set_node("hang=true");
    probe.wait_for("both busy", |line| {
        let busy = line["tick"]["busy"].as_array()?;
        (busy.len() == 2 && busy.iter().all(|busy| busy["ms"].as_u64() > Some(300))).then_some(())
    });
    for _ in 0..40 {
        probe.set_power_limit(&node.gpus[0], Some(300_000));
    }
    let refused = probe.power_limit()["set"]["Err"].as_str().unwrap().to_owned();
    assert!(refused.contains("hangs in nvml"), "{refused}");
    // Told to end, it ends: nothing waits for the driver.
    kill(probe.child.id(), "TERM");
    assert!(probe.ended(Duration::from_secs(1)));
}

#[test]
fn a_wait_for_events_that_never_returns_is_found_out() {
    let node = Node::new(1);
    let probe = Probe::start(&node, 100);
    node.set(0, "hangs=[\"nvmlEventSetWait_v2\"]");
    let began = Instant::now();
    let call = probe.wait_for("busy wait", |line| {
        // Others are on their way for a moment.
        let hung = line["tick"]["busy"].as_array()?.iter().find(|busy| busy["ms"].as_u64() > Some(1000))?;
        Some(hung["call"].clone())
    });
    assert_eq!(call, "nvmlEventSetWait_v2");
    assert!(began.elapsed() > Duration::from_secs(4), "a wait may take its time");
}

#[test]
fn garbage_is_passed_over_and_the_socket_s_end_ends_it() {
    let node = Node::new(1);
    let mut probe = Probe::start(&node, 60_000);
    probe.reading(&node.gpus[0]);
    probe.socket.write_all(b"\xff\xfe{{{\n\n{\"dance\":1}\n[]\n\"read_now\"\n").unwrap();
    probe.reading(&node.gpus[0]);
    node.set_node("hang=true");
    probe.order(json!("read_now"));
    probe.wait_for("hung call", |line| {
        line["tick"]["busy"].as_array()?.iter().find(|busy| busy["ms"].as_u64() > Some(200)).cloned()
    });
    probe.socket.shutdown(Shutdown::Write).unwrap();
    assert!(probe.ended(Duration::from_secs(1)), "it outlives its supervisor");

    let mut probe = Probe::spawn(&Node::new(1), 20);
    let pid = probe.child.id();
    // A line without end.
    let endless = [b'x'; 1 << 16];
    while probe.socket.write_all(&endless).is_ok() {}
    assert!(probe.ended(PATIENCE) && !runs(pid));
}
