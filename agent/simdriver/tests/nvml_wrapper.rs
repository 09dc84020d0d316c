//! The built library, loaded by an unmodified NVML client.

#![allow(clippy::unwrap_used)]

mod common;

use common::Node;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{
    EccCounter, MemoryError, RetirementCause, TemperatureSensor, TemperatureThreshold,
};
use nvml_wrapper::enum_wrappers::nv_link::ErrorCounter;
use nvml_wrapper::enums::device::{DeviceArchitecture, SampleValue};
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};
use reknit_simdriver::state::State;
use std::thread;
use std::time::{Duration, Instant};

const RECOVERY_ACTION: FieldId = FieldId(230);

/// One library and one variable per process: so one test, told in order.
#[test]
fn a_client_sees_what_the_file_says() {
    let node = Node::new(4);
    let path = node.file();
    let nvml = node.client().unwrap();
    let expected = node.state().gpus;

    assert_eq!(nvml.sys_driver_version().unwrap(), "580.95.05");
    assert_eq!(nvml.device_count().unwrap(), 4);
    for (index, gpu) in expected.iter().enumerate() {
        let device = nvml.device_by_index(index as u32).unwrap();
        assert_eq!(device.uuid().unwrap(), gpu.uuid);
        assert_eq!(device.name().unwrap(), gpu.name);
        assert_eq!(device.index().unwrap(), index as u32);
        assert_eq!(device.minor_number().unwrap(), index as u32);
        assert_eq!(device.pci_info().unwrap().bus_id, gpu.pci_bus_id);
        assert_eq!(device.memory_info().unwrap().total, gpu.memory_bytes);
        assert_eq!(device.power_usage().unwrap(), gpu.power_mw);
        let by_bus = nvml.device_by_pci_bus_id(gpu.pci_bus_id.as_str()).unwrap();
        assert_eq!(by_bus.uuid().unwrap(), gpu.uuid);
        let by_uuid = nvml.device_by_uuid(gpu.uuid.as_str()).unwrap();
        assert_eq!(by_uuid.index().unwrap(), index as u32);
    }

    let device = nvml.device_by_index(2).unwrap();
    node.change(2, "temperature=91");
    node.change(2, "ecc_uncorrected=7");
    node.change(2, "recovery_action=4");
    assert_eq!(device.temperature(TemperatureSensor::Gpu).unwrap(), 91);
    let uncorrected = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
    assert_eq!(uncorrected.unwrap(), 7);
    let fields = device.field_values_for(&[RECOVERY_ACTION, FieldId(83)]).unwrap();
    let action = fields[0].as_ref().unwrap().value.as_ref().unwrap();
    assert!(matches!(action, SampleValue::U32(4)));
    let not_kept = fields[1].as_ref().unwrap();
    assert!(matches!(not_kept.value, Err(NvmlError::NotSupported)));

    health_is_read(&node, &device);
    events_arrive_at_once(&nvml, &node);

    node.change(2, "lost=true");
    assert!(matches!(device.uuid(), Err(NvmlError::GpuLost)));
    assert!(matches!(nvml.device_by_index(2).err(), Some(NvmlError::GpuLost)));
    let by_uuid = nvml.device_by_uuid(expected[3].uuid.as_str());
    assert!(
        matches!(by_uuid.err(), Some(NvmlError::GpuLost)),
        "as with the real library, a lost GPU hides those after it from a search by UUID"
    );
    let others = nvml.device_by_pci_bus_id(expected[3].pci_bus_id.as_str());
    assert_eq!(others.unwrap().uuid().unwrap(), expected[3].uuid);
    node.change(2, "lost=false");
    assert_eq!(device.uuid().unwrap(), expected[2].uuid);

    node.change(2, "reset_required=true");
    assert!(matches!(device.uuid(), Err(NvmlError::ResetRequired)));
    node.change(2, "reset_required=false");

    node.change(0, "absent=true");
    assert_eq!(nvml.device_count().unwrap(), 3);
    assert_eq!(device.index().unwrap(), 1, "indices shift");
    let absent = nvml.device_by_pci_bus_id(expected[0].pci_bus_id.as_str());
    assert!(matches!(absent.err(), Some(NvmlError::NotFound)));

    let hung = nvml.device_by_index(2).unwrap();
    node.change(3, "hang=true");
    thread::scope(|scope| {
        let call = scope.spawn(|| (hung.uuid().unwrap(), Instant::now()));
        assert_eq!(device.uuid().unwrap(), expected[2].uuid, "others answer");
        let released = Instant::now();
        node.change(3, "hang=false");
        let (uuid, returned) = call.join().unwrap();
        assert_eq!(uuid, expected[3].uuid);
        assert!(returned > released, "the call did hang");
    });

    std::fs::remove_file(&path).unwrap();
    assert!(matches!(device.uuid(), Err(NvmlError::DriverNotLoaded)));
}

/// What the health table needs, as far as the wrapper can read it.
fn health_is_read(node: &Node, device: &Device<'_>) {
    node.change(2, r#"throttle=["hw_slowdown", "power_brake"]"#);
    let reasons = ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN;
    assert_eq!(device.current_throttle_reasons().unwrap(), reasons);
    node.change(2, "throttle=none");
    assert!(device.current_throttle_reasons().unwrap().is_empty());

    assert_eq!(device.temperature_threshold(TemperatureThreshold::Slowdown).unwrap(), 90);
    assert_eq!(device.temperature_threshold(TemperatureThreshold::Shutdown).unwrap(), 95);
    let limits = device.power_management_limit_constraints().unwrap();
    assert_eq!((limits.min_limit, limits.max_limit), (200_000, 700_000));
    assert_eq!(device.power_management_limit_default().unwrap(), 700_000);
    assert_eq!(device.architecture().unwrap(), DeviceArchitecture::Hopper);
    assert_eq!(device.current_pcie_link_gen().unwrap(), 5);
    assert_eq!(device.max_pcie_link_width().unwrap(), 16);
    node.change(2, "pcie_width=8");
    assert_eq!(device.current_pcie_link_width().unwrap(), 8);
    node.change(2, "pcie_replays=12");
    assert_eq!(device.pcie_replay_counter().unwrap(), 12);

    let retired = || device.retired_pages(RetirementCause::DoubleBitEccError);
    assert!(matches!(retired(), Err(NvmlError::NotSupported)), "as from Ampere on");
    node.change(2, "retired_double=3");
    assert_eq!(retired().unwrap().len(), 3);
    assert!(!device.are_pages_pending_retired().unwrap());

    let is_up = |link| device.link_wrapper_for(link).is_active();
    assert!((0..18).all(|link| is_up(link).unwrap()));
    assert!(matches!(is_up(18), Err(NvmlError::NotSupported)));
    node.change(2, "nvlink_down=[4]");
    assert!(!is_up(4).unwrap() && is_up(3).unwrap());
    node.change(2, "nvlink_down=2");
    assert!(!is_up(1).unwrap() && is_up(2).unwrap());
    node.change(2, "nvlink_down=true");
    assert!(!(0..18).any(|link| is_up(link).unwrap()));
    node.change(2, "nvlink_down=false");
    node.change(2, "nvlink_replays=9");
    let replays = |link| device.link_wrapper_for(link).error_counter(ErrorCounter::DlReplay);
    assert_eq!((replays(0).unwrap(), replays(1).unwrap()), (9, 0));
    node.change(2, "nvlink_version=5");
    assert!(matches!(replays(0), Err(NvmlError::NotSupported)), "NVLink 5 counts by fields");

    node.change(2, "memory_temperature=88");
    node.change(2, "remap_failure=true");
    node.change(2, "remapped_uncorrectable=6");
    let fields = device.field_values_for(&[FieldId(82), FieldId(145), FieldId(143)]).unwrap();
    let values = fields.into_iter().map(|field| match field.unwrap().value.unwrap() {
        SampleValue::U32(number) => number,
        other => panic!("{other:?} is no 32-bit number"),
    });
    assert_eq!(values.collect::<Vec<_>>(), [88, 1, 6]);
}

fn events_arrive_at_once(nvml: &Nvml, node: &Node) {
    let raise = |gpu, xid| State::update(&node.file(), |state| state.raise_xid(gpu, xid)).unwrap();
    let register = |gpu| {
        let set = nvml.create_event_set().unwrap();
        let device = nvml.device_by_index(gpu).unwrap();
        device.register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|e| e.error).unwrap()
    };
    let xid_of = |set: &nvml_wrapper::EventSet<'_>, ms| {
        set.wait(ms).map(|event| match event.event_data {
            Some(XidError::Value(xid)) => xid,
            Some(XidError::Unknown) | None => panic!("not an XID"),
        })
    };
    raise(1, 13);
    let (one, two) = (register(1), register(2));
    assert!(
        matches!(xid_of(&one, 0), Err(NvmlError::Timeout)),
        "an event from before the registration is not delivered"
    );
    thread::scope(|scope| {
        let raising = scope.spawn(|| {
            // Only so that the wait below has begun; either order must pass.
            thread::sleep(Duration::from_millis(50));
            let raised = Instant::now();
            raise(1, 79);
            raised
        });
        assert_eq!(xid_of(&one, 10_000).unwrap(), 79);
        let seen = Instant::now();
        let raised = raising.join().unwrap();
        let delay = seen - raised;
        println!("XID seen after {delay:?}");
        assert!(delay < Duration::from_millis(200), "{delay:?}");
    });
    raise(1, 48);
    raise(1, 94);
    assert_eq!(xid_of(&one, 1000).unwrap(), 48);
    assert_eq!(xid_of(&one, 1000).unwrap(), 94, "in order, none lost");
    let begun = Instant::now();
    assert!(matches!(xid_of(&two, 60), Err(NvmlError::Timeout)), "another GPU's");
    assert!(begun.elapsed() >= Duration::from_millis(60));

    node.change(1, "lost=true");
    raise(1, 79);
    assert_eq!(xid_of(&one, 1000).unwrap(), 79);
    assert!(matches!(xid_of(&one, 1000), Err(NvmlError::GpuLost)));
    node.change(1, "lost=false");
}
