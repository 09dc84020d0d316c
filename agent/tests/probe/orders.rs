//! Power limits, and GPUs that come later.

use crate::harness::Node;
use crate::process::Probe;
use reknit_simdriver::state::SetterCall;
use serde_json::{Value, json};

#[test]
fn a_power_limit_is_clamped_set_and_answered() {
    let node = Node::new(2);
    let gpu = node.gpus[1].clone();
    let mut probe = Probe::start(&node, 20);
    for (wanted, limit) in
        [(Some(500_000), 500_000), (Some(1), 200_000), (Some(9_000_000), 700_000), (None, 700_000)]
    {
        probe.set_power_limit(&gpu, wanted);
        assert_eq!(probe.power_limit(), json!({"gpu": gpu, "set": {"Ok": limit}}));
    }
    let calls = SetterCall::read_all(&node.driver()).unwrap();
    let made: Vec<_> = calls.iter().map(|call| (call.call.as_str(), call.gpu, call.value)).collect();
    let set = "nvmlDeviceSetPowerManagementLimit";
    assert_eq!(made, [(set, 1, 500_000), (set, 1, 200_000), (set, 1, 700_000), (set, 1, 700_000)]);

    node.set(1, "errors={\"nvmlDeviceSetPowerManagementLimit\":4}");
    probe.set_power_limit(&gpu, Some(300_000));
    let refused = probe.power_limit()["set"]["Err"].as_str().unwrap().to_owned();
    assert!(refused.contains("NVML code 4") && refused.contains("as root"), "{refused}");
    probe.set_power_limit("GPU-nowhere", None);
    assert!(probe.power_limit()["set"].get("Err").is_some());
    assert!(probe.reading(&gpu).get("answers").is_some());
}

#[test]
fn a_gpu_that_comes_later_is_watched_too() {
    let node = Node::new(3);
    node.set(0, "absent=true");
    node.set(1, "hang=true");
    node.set(2, "errors={\"nvmlDeviceGetSramEccErrorStatus\":4}");
    let mut probe = Probe::spawn(&node, 20);
    let names = |line: &Value| -> Option<Vec<(Value, Value)>> {
        let gpus = line.get("ready")?["gpus"].as_array()?;
        Some(gpus.iter().map(|gpu| (gpu["uuid"].clone(), gpu["index"].clone())).collect())
    };
    let third = (json!(node.gpus[2]), json!(1));
    let nameless = (json!("unidentified-0"), json!(0));
    assert_eq!(probe.wait_for("ready", names), [nameless, third.clone()]);
    let gap = |line: &Value| line.get("gap").filter(|gap| gap["gpu"] == node.gpus[2]).map(|_| ());
    probe.wait_for("gap", gap);
    assert!(probe.reading(&node.gpus[2]).get("answers").is_some());
    node.set(1, "hang=false");
    let second = (json!(node.gpus[1]), json!(0));
    assert_eq!(probe.wait_for("ready", names), [third.clone(), second.clone()]);
    probe.wait_for("gap, as the supervisor forgot it", gap);
    assert!(probe.reading(&node.gpus[1]).get("answers").is_some());
    node.set(0, "absent=false");
    // The places of before are taken.
    let first = (json!(node.gpus[0]), json!(2));
    assert_eq!(probe.wait_for("ready", names), [third, second, first]);
    assert!(probe.reading(&node.gpus[0]).get("answers").is_some());
    probe.set_power_limit(&node.gpus[0], Some(400_000));
    assert_eq!(probe.power_limit(), json!({"gpu": node.gpus[0], "set": {"Ok": 400_000}}));
}
