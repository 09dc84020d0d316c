//! NVML's data as its C header lays it out. Source: NVIDIA's `nvml.h`, release 13.0.

use std::ffi::{c_char, c_double, c_int, c_uint, c_ulonglong, c_void};

/// `nvmlReturn_t`, as far as this driver answers with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Code {
    Success = 0,
    Uninitialized = 1,
    InvalidArgument = 2,
    NotSupported = 3,
    NotFound = 6,
    InsufficientSize = 7,
    DriverNotLoaded = 9,
    Timeout = 10,
    GpuIsLost = 15,
    ResetRequired = 16,
    ArgumentVersionMismatch = 25,
    Unknown = 999,
}

/// `nvmlDevice_t`: opaque to the client; here the GPU's place in the control file, plus one.
pub(crate) type DeviceHandle = *mut c_void;

/// `nvmlEventTypeXidCriticalError`
pub(crate) const EVENT_XID: c_ulonglong = 0x8;
/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`
pub(crate) const FIELD_RECOVERY_ACTION: c_uint = 230;
/// `NVML_VALUE_TYPE_UNSIGNED_INT`
pub(crate) const VALUE_UNSIGNED_INT: c_uint = 1;
/// `NVML_MEMORY_ERROR_TYPE_UNCORRECTED`
pub(crate) const ERROR_UNCORRECTED: c_uint = 1;
/// `nvmlMemory_v2`: the struct's size and its version.
pub(crate) const MEMORY_V2: c_uint = size_of::<MemoryV2>() as c_uint | 2 << 24;

#[repr(C)]
pub(crate) struct PciInfo {
    pub(crate) bus_id_legacy: [c_char; 16],
    pub(crate) domain: c_uint,
    pub(crate) bus: c_uint,
    pub(crate) device: c_uint,
    pub(crate) pci_device_id: c_uint,
    pub(crate) pci_sub_system_id: c_uint,
    pub(crate) bus_id: [c_char; 32],
}

#[repr(C)]
pub(crate) struct Memory {
    pub(crate) total: c_ulonglong,
    pub(crate) free: c_ulonglong,
    pub(crate) used: c_ulonglong,
}

#[repr(C)]
pub(crate) struct MemoryV2 {
    pub(crate) version: c_uint,
    pub(crate) total: c_ulonglong,
    pub(crate) reserved: c_ulonglong,
    pub(crate) free: c_ulonglong,
    pub(crate) used: c_ulonglong,
}

#[repr(C)]
pub(crate) struct Utilization {
    pub(crate) gpu: c_uint,
    pub(crate) memory: c_uint,
}

/// `nvmlValue_t`: a union, as wide as its widest member.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union Value {
    pub(crate) double: c_double,
    pub(crate) unsigned_int: c_uint,
    pub(crate) unsigned_long_long: c_ulonglong,
}

#[repr(C)]
pub(crate) struct FieldValue {
    pub(crate) field_id: c_uint,
    pub(crate) scope_id: c_uint,
    pub(crate) timestamp: i64,
    pub(crate) latency_usec: i64,
    pub(crate) value_type: c_uint,
    pub(crate) nvml_return: c_uint,
    pub(crate) value: Value,
}

#[repr(C)]
pub(crate) struct EventData {
    pub(crate) device: DeviceHandle,
    pub(crate) event_type: c_ulonglong,
    pub(crate) event_data: c_ulonglong,
    pub(crate) gpu_instance_id: c_uint,
    pub(crate) compute_instance_id: c_uint,
}

/// `int` that counts, as the header writes it.
pub(crate) type Count = c_int;

const _: () = {
    assert!(size_of::<PciInfo>() == 68);
    assert!(size_of::<Memory>() == 24);
    assert!(size_of::<MemoryV2>() == 40);
    assert!(size_of::<FieldValue>() == 40);
    assert!(size_of::<EventData>() == 32);
};
