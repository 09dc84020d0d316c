//! What is read, and what codes mean.

use crate::harness::Node;
use crate::process::{Probe, fresh, reading_of};
use serde_json::{Value, json};
use std::time::Duration;

#[test]
fn everything_that_nvml_tells_is_read() {
    let node = Node::new(2);
    let mut probe = Probe::start(&node, 20);
    for change in [
        "recovery_action=4",
        "ecc_uncorrected=3",
        "ecc_corrected=70000",
        "nvlink_down=[2,17]",
        "throttle=[\"hw_thermal\",\"power_brake\"]",
        "temperature=71",
        "slowdown_temperature=88",
        "power_mw=654321",
        "utilization=93",
        "ecc_sram_threshold=true",
        "memory_unrepairable=true",
        "remap_pending=true",
        "remapped_correctable=4",
        "remapped_uncorrectable=5",
        "retired_single=6",
        "retired_double=7",
        "retired_pending=true",
        "nvlink_replays=8",
        "nvlink_recoveries=9",
        "nvlink_crc_errors=10",
        "fabric_route_unhealthy=true",
        "power_limit_mw=600000",
        "power_limit_enforced_mw=450000",
        "memory_temperature=83",
        "pcie_replays=11",
        "pcie_gen=3",
        "pcie_width=8",
    ] {
        node.set(0, change);
    }
    let read = fresh(&mut probe, &node.gpus[0]);
    let expected = json!({
        "recovery_action": 4,
        "ecc_uncorrected": 3,
        "ecc_corrected": 70000,
        "links_active": (1_u32 << 18) - 1 - (1 << 2) - (1 << 17),
        "throttle": 0xc0,
        "temperature": 71,
        "slowdown_temperature": 88,
        "power_mw": 654_321,
        "power_unreadable": false,
        "utilization": 93,
    });
    assert_eq!(read["fast"], expected);
    let expected = json!({
        "ecc_sram_threshold": true,
        "memory_unrepairable": true,
        "remap_pending": true,
        "remap_failure": false,
        "remapped_rows": 9,
        "retired_single": 6,
        "retired_double": 7,
        "retired_pending": true,
        "link_replays": 8,
        "link_recoveries": 9,
        "link_crc_errors": 10,
        "link_ber": 0.0,
        "link_recovery_failures": 0,
        "fabric_route_unhealthy": true,
        "fabric_bandwidth_degraded": false,
        "power_limit_mw": 600_000,
        "power_limit_enforced_mw": 450_000,
        "memory_temperature": 83,
        "pcie_replays": 11,
        "pcie_gen": 3,
        "pcie_gen_max": 5,
        "pcie_width": 8,
        "pcie_width_max": 16,
    });
    assert_eq!(read["slow"], expected);
    // The other GPU is another GPU.
    let other = fresh(&mut probe, &node.gpus[1]);
    assert_eq!(other["fast"]["ecc_uncorrected"], 0);
    assert_eq!(other["fast"]["links_active"], (1_u32 << 18) - 1);
    assert_eq!(other["slow"]["retired_single"], Value::Null, "it retires no pages");
    assert_eq!(other["slow"]["fabric_route_unhealthy"], Value::Null, "it has no fabric");
}

#[test]
fn nvlink_5_tells_rates_and_recoveries() {
    let node = Node::new(1);
    for change in
        ["nvlink_version=5", "nvlink_ber=3e-11", "nvlink_recovery_failures=2", "nvlink_recoveries=7"]
    {
        node.set(0, change);
    }
    let mut probe = Probe::start(&node, 20);
    let slow = fresh(&mut probe, &node.gpus[0])["slow"].clone();
    let rate = slow["link_ber"].as_f64().unwrap();
    assert!((rate - 3e-11).abs() < 1e-15, "{rate}");
    assert_eq!(slow["link_recovery_failures"], 2);
    assert_eq!(slow["link_recoveries"], 7);
}

#[test]
fn the_slow_set_comes_with_every_tenth_reading() {
    let node = Node::new(1);
    let probe = Probe::start(&node, 25);
    let slow = |_| !probe.reading(&node.gpus[0])["answers"]["slow"].is_null();
    let with_slow: Vec<bool> = (0..30).map(slow).collect();
    let first = with_slow.iter().position(|slow| *slow).unwrap();
    let places: Vec<usize> = (0..30).filter(|place| with_slow[*place]).collect();
    assert_eq!(places, [first, first + 10, first + 20]);
}

#[test]
fn a_code_means_the_same_from_any_call() {
    let node = Node::new(1);
    let gpu = &node.gpus[0];
    let probe = Probe::start(&node, 20);
    for call in [
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetPcieReplayCounter",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetGpuFabricInfoV",
    ] {
        for (code, reading) in
            [(15, "gone"), (28, "gone"), (16, "reset_required"), (9, "blind"), (999, "suspect")]
        {
            if (call, code) == ("nvmlDeviceGetPowerUsage", 999) {
                continue;
            }
            // The driver that is away ends the probe after some readings: no more than one is waited for.
            node.set(0, &format!("errors={{\"{call}\":{code}}}"));
            let read = probe.wait_for(&format!("{reading} from {call}"), |line| {
                reading_of(line, gpu).filter(|read| read.get(reading).is_some() || *read == reading)
            });
            node.set(0, "errors={}");
            if let Some(error) = read.get(reading).and_then(|read| read["error"].as_str()) {
                assert!(error.starts_with(&format!("NVML code {code} from {call}: ")), "{error}");
            }
            probe.wait_for("answer", |line| reading_of(line, gpu)?.get("answers").cloned());
        }
    }
}

#[test]
fn a_power_sensor_that_fails_is_told_and_the_rest_is_read() {
    let node = Node::new(1);
    let probe = Probe::start(&node, 20);
    assert_eq!(probe.reading(&node.gpus[0])["answers"]["fast"]["power_unreadable"], false);
    node.set(0, "errors={\"nvmlDeviceGetPowerUsage\":999}");
    let fast = probe.wait_for("unreadable power", |line| {
        let fast = reading_of(line, &node.gpus[0])?["answers"]["fast"].clone();
        (fast["power_unreadable"] == true).then_some(fast)
    });
    assert_eq!((&fast["power_mw"], &fast["temperature"]), (&Value::Null, &json!(40)));
}

#[test]
fn a_stale_handle_is_resolved_again_and_means_a_reset() {
    let node = Node::new(2);
    let probe = Probe::start(&node, 20);
    let reset = |reading: &Value| reading["answers"]["reset"] == true;
    assert!(!reset(&probe.reading(&node.gpus[0])));
    node.set(0, "generation=1");
    let read = probe.wait_for("reset", |line| reading_of(line, &node.gpus[0]).filter(reset));
    assert!(!read["answers"]["slow"].is_null(), "all is read anew: {read}");
    let said = probe.all(Duration::from_millis(300));
    assert!(said.iter().all(|line| reading_of(line, &node.gpus[0]).is_none_or(|read| !reset(&read))));
    assert!(said.iter().all(|line| reading_of(line, &node.gpus[1]).is_none_or(|read| !reset(&read))));
}

#[test]
fn what_only_root_may_ask_is_a_gap_said_once() {
    let node = Node::new(2);
    node.set(0, "errors={\"nvmlDeviceGetSramEccErrorStatus\":4,\"nvmlDeviceRegisterEvents\":4}");
    let mut probe = Probe::start(&node, 20);
    let mut gaps: Vec<(Value, String)> = (0..2)
        .map(|_| probe.wait_for("gap", |line| line.get("gap").cloned()))
        .map(|gap| (gap["gpu"].clone(), gap["what"].as_str().unwrap().to_owned()))
        .collect();
    gaps.sort_by(|a, b| a.1.cmp(&b.1));
    assert!(gaps.iter().all(|(gpu, _)| *gpu == node.gpus[0]));
    assert!(gaps[0].1.starts_with("XID events: NVML code 4 from nvmlDeviceRegisterEvents"), "{gaps:?}");
    assert!(gaps[1].1.starts_with("nvmlDeviceGetSramEccErrorStatus: NVML answers NoPermission"), "{gaps:?}");
    let read = fresh(&mut probe, &node.gpus[0]);
    assert_eq!(read["slow"]["ecc_sram_threshold"], Value::Null);
    assert_eq!(read["slow"]["memory_unrepairable"], false);
    assert!(probe.all(Duration::from_millis(500)).iter().all(|line| line.get("gap").is_none()));
}
