//! The built library, loaded by an unmodified NVML client.

#![allow(clippy::unwrap_used)]

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use reknit_simdriver::state::{STATE_VARIABLE, State};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

const RECOVERY_ACTION: FieldId = FieldId(230);

/// Cargo puts the library beside the test or one folder up.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let found = test
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("libreknit_simdriver.so"))
        .find(|path| path.exists());
    found.expect("cargo builds the library with this test")
}

fn change(path: &Path, gpu: usize, assignment: &str) {
    State::update(path, |state| state.set(gpu, &[assignment.to_owned()])).unwrap();
}

/// One library and one variable per process: so one test, told in order.
#[test]
fn a_client_sees_what_the_file_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.json");
    State::healthy("n0", 4).save(&path).unwrap();
    // SAFETY: this process has one test, and no other thread reads the environment.
    #[allow(unsafe_code)]
    unsafe {
        std::env::set_var(STATE_VARIABLE, &path);
    }
    let library = library();
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init().unwrap();
    let expected = State::load(&path).unwrap().gpus;

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
    change(&path, 2, "temperature=91");
    change(&path, 2, "ecc_uncorrected=7");
    change(&path, 2, "recovery_action=4");
    assert_eq!(device.temperature(TemperatureSensor::Gpu).unwrap(), 91);
    let uncorrected = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
    assert_eq!(uncorrected.unwrap(), 7);
    let fields = device.field_values_for(&[RECOVERY_ACTION, FieldId(83)]).unwrap();
    let action = fields[0].as_ref().unwrap().value.as_ref().unwrap();
    assert!(matches!(action, nvml_wrapper::enums::device::SampleValue::U32(4)));
    let not_kept = fields[1].as_ref().unwrap();
    assert!(matches!(not_kept.value, Err(NvmlError::NotSupported)));

    events_arrive_at_once(&nvml, &path);

    change(&path, 2, "lost=true");
    assert!(matches!(device.uuid(), Err(NvmlError::GpuLost)));
    assert!(matches!(nvml.device_by_index(2).err(), Some(NvmlError::GpuLost)));
    let by_uuid = nvml.device_by_uuid(expected[3].uuid.as_str());
    assert!(
        matches!(by_uuid.err(), Some(NvmlError::GpuLost)),
        "as with the real library, a lost GPU hides those after it from a search by UUID"
    );
    let others = nvml.device_by_pci_bus_id(expected[3].pci_bus_id.as_str());
    assert_eq!(others.unwrap().uuid().unwrap(), expected[3].uuid);
    change(&path, 2, "lost=false");
    assert_eq!(device.uuid().unwrap(), expected[2].uuid);

    change(&path, 2, "reset_required=true");
    assert!(matches!(device.uuid(), Err(NvmlError::ResetRequired)));
    change(&path, 2, "reset_required=false");

    change(&path, 0, "absent=true");
    assert_eq!(nvml.device_count().unwrap(), 3);
    assert_eq!(device.index().unwrap(), 1, "indices shift");
    let absent = nvml.device_by_pci_bus_id(expected[0].pci_bus_id.as_str());
    assert!(matches!(absent.err(), Some(NvmlError::NotFound)));

    let hung = nvml.device_by_index(2).unwrap();
    change(&path, 3, "hang=true");
    thread::scope(|scope| {
        let call = scope.spawn(|| (hung.uuid().unwrap(), Instant::now()));
        assert_eq!(device.uuid().unwrap(), expected[2].uuid, "others answer");
        let released = Instant::now();
        change(&path, 3, "hang=false");
        let (uuid, returned) = call.join().unwrap();
        assert_eq!(uuid, expected[3].uuid);
        assert!(returned > released, "the call did hang");
    });

    std::fs::remove_file(&path).unwrap();
    assert!(matches!(device.uuid(), Err(NvmlError::DriverNotLoaded)));
}

fn events_arrive_at_once(nvml: &Nvml, path: &Path) {
    let raise = |gpu, xid| State::update(path, |state| state.raise_xid(gpu, xid)).unwrap();
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

    change(path, 1, "lost=true");
    raise(1, 79);
    assert_eq!(xid_of(&one, 1000).unwrap(), 79);
    assert!(matches!(xid_of(&one, 1000), Err(NvmlError::GpuLost)));
    change(path, 1, "lost=false");
}
