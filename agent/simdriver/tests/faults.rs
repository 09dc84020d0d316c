//! Faults of the driver itself: return codes, delays, hangs and handles that go stale, each by the call.

#![allow(clippy::unwrap_used)]

mod common;

use common::Node;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use reknit_simdriver::state::{SetterCall, State, Target};
use std::thread;
use std::time::{Duration, Instant};

/// One library and one variable per process: so one test, told in order.
#[test]
fn the_driver_fails_as_the_file_says() {
    let node = Node::new(3);
    init_fails_and_hangs(&node);
    let nvml = node.client().unwrap();
    let device = |index| nvml.device_by_index(index).unwrap();

    calls_answer_codes(&node, &device(0), &device(1));
    calls_take_their_time(&node, &device(0), &device(1));
    one_call_hangs(&node, &device(0));
    all_calls_hang(&node, &nvml, &device(2));
    handles_go_stale(&node, &nvml);
    waits_fail(&node, &nvml);
    limits_are_set_and_logged(&node, &nvml);
}

fn init_fails_and_hangs(node: &Node) {
    for (code, is_it) in [
        (9, (|e| matches!(e, NvmlError::DriverNotLoaded)) as fn(&NvmlError) -> bool),
        (18, |e| matches!(e, NvmlError::LibRmVersionMismatch)),
        (4, |e| matches!(e, NvmlError::NoPermission)),
    ] {
        node.change(Target::Node, &format!("init_error={code}"));
        let error = node.client().map(drop).unwrap_err();
        assert!(is_it(&error), "{code}: {error}");
    }
    node.change(Target::Node, "init_error=null");
    hangs_until(
        || node.client().map(drop),
        || node.change(Target::Node, "hang=true"),
        || {
            node.change(Target::Node, "hang=false");
        },
    )
    .unwrap();
}

/// Runs `call` after `hold`, sees that it does not return before `release`, and gives its result.
fn hangs_until<T: Send>(call: impl FnOnce() -> T + Send, hold: impl FnOnce(), release: impl FnOnce()) -> T {
    hold();
    thread::scope(|scope| {
        let call = scope.spawn(|| (call(), Instant::now()));
        // Time in which a call that does not hang would return.
        thread::sleep(Duration::from_millis(100));
        assert!(!call.is_finished(), "the call hangs");
        let released = Instant::now();
        release();
        let (result, returned) = call.join().unwrap();
        assert!(returned > released);
        result
    })
}

fn calls_answer_codes(node: &Node, device: &Device<'_>, other: &Device<'_>) {
    node.change(0, r#"errors={"nvmlDeviceGetPowerUsage": 999}"#);
    assert!(matches!(device.power_usage(), Err(NvmlError::Unknown)));
    assert!(device.uuid().is_ok() && other.power_usage().is_ok(), "this call on this GPU alone");
    node.change(0, r#"errors={"*": 15, "nvmlDeviceGetUUID": 11}"#);
    assert!(matches!(device.power_usage(), Err(NvmlError::GpuLost)));
    assert!(matches!(device.uuid(), Err(NvmlError::IrqIssue)), "the call's own code goes first");
    node.change(0, "errors={}");
    assert!(device.power_usage().is_ok());

    let misspelt = [r#"errors={"nvmlDeviceGetPowerUse": 999}"#.to_owned()];
    let refused = State::update(&node.file(), |state| state.set(0, &misspelt)).unwrap_err();
    assert!(refused.to_string().contains("answers no call `nvmlDeviceGetPowerUse`"), "{refused}");
}

fn calls_take_their_time(node: &Node, device: &Device<'_>, other: &Device<'_>) {
    node.change(0, r#"delays_ms={"nvmlDeviceGetPowerUsage": 80}"#);
    let begun = Instant::now();
    device.power_usage().unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(80));
    let begun = Instant::now();
    device.uuid().unwrap();
    other.power_usage().unwrap();
    assert!(begun.elapsed() < Duration::from_millis(80), "{:?}", begun.elapsed());
    node.change(0, "delays_ms={}");
}

fn one_call_hangs(node: &Node, device: &Device<'_>) {
    let release = || {
        assert!(device.uuid().is_ok(), "other calls answer");
        node.change(0, "hangs=[]");
    };
    hangs_until(|| device.power_usage(), || node.change(0, r#"hangs=["nvmlDeviceGetPowerUsage"]"#), release)
        .unwrap();
}

fn all_calls_hang(node: &Node, nvml: &Nvml, device: &Device<'_>) {
    let hold = || node.change(Target::Node, "hang=true");
    let release = || node.change(Target::Node, "hang=false");
    hangs_until(|| nvml.sys_driver_version(), hold, release).unwrap();
    hangs_until(|| device.uuid(), hold, release).unwrap();
    hangs_until(|| nvml.device_count(), hold, release).unwrap();
}

fn handles_go_stale(node: &Node, nvml: &Nvml) {
    let before = nvml.device_by_index(1).unwrap();
    node.change(1, "generation=1");
    assert!(matches!(before.uuid(), Err(NvmlError::InvalidArg)));
    let after = nvml.device_by_index(1).unwrap();
    assert_eq!(after.uuid().unwrap(), node.state().gpus[1].uuid);
    assert!(nvml.device_by_index(0).unwrap().uuid().is_ok());
}

fn waits_fail(node: &Node, nvml: &Nvml) {
    let register = |index| {
        let (device, set) = (nvml.device_by_index(index).unwrap(), nvml.create_event_set().unwrap());
        device.register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|e| e.error).unwrap()
    };
    let (zero, one) = (register(0), register(1));
    node.change(Target::Node, "wait_error=999");
    let begun = Instant::now();
    assert!(matches!(zero.wait(60_000), Err(NvmlError::Unknown)));
    assert!(begun.elapsed() < Duration::from_secs(1), "at once");
    node.change(Target::Node, "wait_error=null");
    node.change(0, r#"errors={"nvmlEventSetWait_v2": 11}"#);
    assert!(matches!(zero.wait(60_000), Err(NvmlError::IrqIssue)));
    assert!(matches!(one.wait(0), Err(NvmlError::Timeout)), "of another GPU");
    node.change(0, "errors={}");
    hangs_until(
        move || zero.wait(0).map(drop),
        || node.change(0, r#"hangs=["nvmlEventSetWait_v2"]"#),
        || node.change(0, "hangs=[]"),
    )
    .unwrap_err();
}

fn limits_are_set_and_logged(node: &Node, nvml: &Nvml) {
    let mut device = nvml.device_by_index(2).unwrap();
    assert_eq!(SetterCall::read_all(&node.file()).unwrap(), []);
    device.set_power_management_limit(450_000).unwrap();
    assert_eq!(device.power_management_limit().unwrap(), 450_000);
    assert_eq!(device.enforced_power_limit().unwrap(), 450_000);
    assert_eq!(node.state().gpus[2].power_limit_mw, 450_000);
    let too_low = device.set_power_management_limit(100_000);
    assert!(matches!(too_low, Err(NvmlError::InvalidArg)));
    node.change(2, "power_limit_enforced_mw=300000");
    assert_eq!(device.enforced_power_limit().unwrap(), 300_000);
    assert_eq!(device.power_management_limit().unwrap(), 450_000, "what was asked for");
    node.change(2, "lost=true");
    assert!(matches!(device.set_power_management_limit(500_000), Err(NvmlError::GpuLost)));
    let call = |value, result| SetterCall {
        call: "nvmlDeviceSetPowerManagementLimit".to_owned(),
        gpu: 2,
        value,
        result,
    };
    let expected = [call(450_000, 0), call(100_000, 2), call(500_000, 15)];
    assert_eq!(SetterCall::read_all(&node.file()).unwrap(), expected);
    assert_eq!(node.state().gpus[2].power_limit_mw, 450_000);
}
