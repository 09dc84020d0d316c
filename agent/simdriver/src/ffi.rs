//! NVML's C interface.
//!
//! Pointers come from the client, who answers for them as with the real library: each is null, which is
//! refused, or valid for what the header says. They are read and written only in `put`, `put_text`,
//! `text_at`, `set_at` and where a struct is both input and output.

#![allow(unsafe_code)]

use crate::abi::{
    Code, Count, DeviceHandle, ERROR_UNCORRECTED, EVENT_XID, EventData, FIELD_RECOVERY_ACTION, FieldValue,
    MEMORY_V2, Memory, MemoryV2, PciInfo, Utilization, VALUE_UNSIGNED_INT, Value,
};
use crate::driver;
use crate::event_set::EventSet;
use crate::state::{BusNumbers, Gpu};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn answer(result: Result<(), Code>) -> c_uint {
    match result {
        Ok(()) => Code::Success as c_uint,
        Err(code) => code as c_uint,
    }
}

fn put<T>(out: *mut T, value: T) -> Result<(), Code> {
    if out.is_null() {
        return Err(Code::InvalidArgument);
    }
    // SAFETY: not null, and the client gave it as room for a `T`.
    unsafe { out.write(value) };
    Ok(())
}

fn put_text(out: *mut c_char, length: c_uint, text: &str) -> Result<(), Code> {
    if out.is_null() {
        return Err(Code::InvalidArgument);
    }
    if text.len() >= length as usize {
        return Err(Code::InsufficientSize);
    }
    // SAFETY: the client gave `length` bytes; the text and its final zero fit, as was just checked.
    unsafe {
        out.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        out.add(text.len()).write(0);
    }
    Ok(())
}

fn text_at<'a>(text: *const c_char) -> Result<&'a str, Code> {
    if text.is_null() {
        return Err(Code::InvalidArgument);
    }
    // SAFETY: not null, and the client gave a C string that outlives the call.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| Code::InvalidArgument)
}

fn set_at<'a>(set: *const EventSet) -> Result<&'a EventSet, Code> {
    // SAFETY: null or a set from `nvmlEventSetCreate` that the client has not freed.
    unsafe { set.as_ref() }.ok_or(Code::InvalidArgument)
}

/// Reads one thing of the GPU and writes it to `out`.
fn read<T>(device: DeviceHandle, out: *mut T, pick: impl FnOnce(&Gpu) -> T) -> c_uint {
    answer(driver::gpu(device).and_then(|gpu| put(out, pick(&gpu))))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> c_uint {
    answer(driver::init())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> c_uint {
    answer(driver::init())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> c_uint {
    answer(driver::shutdown())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: c_uint) -> *const c_char {
    let text = match code {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        15 => c"GPU is lost",
        16 => c"GPU requires reset",
        25 => c"Argument version mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetDriverVersion(out: *mut c_char, length: c_uint) -> c_uint {
    answer(driver::state().and_then(|state| put_text(out, length, &state.driver_version)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetNVMLVersion(out: *mut c_char, length: c_uint) -> c_uint {
    answer(driver::state().and_then(|state| put_text(out, length, &format!("13.{}", state.driver_version))))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion_v2(out: *mut c_int) -> c_uint {
    answer(driver::state().and_then(|_| put(out, 13_000)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(out: *mut c_uint) -> c_uint {
    answer(driver::state().and_then(|state| put(out, driver::enumerated(&state).count() as c_uint)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: *mut DeviceHandle) -> c_uint {
    answer(driver::state().and_then(|state| {
        let place = driver::enumerated(&state).nth(index as usize).ok_or(Code::InvalidArgument)?;
        driver::answering(place)?;
        put(out, driver::handle_of(place))
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: *const c_char, out: *mut DeviceHandle) -> c_uint {
    answer(driver::state().and_then(|state| {
        let wanted = BusNumbers::parse(text_at(bus_id)?).ok_or(Code::InvalidArgument)?;
        let place = driver::enumerated(&state)
            .find(|place| state.gpus[*place].bus_numbers().is_ok_and(|numbers| numbers == wanted))
            .ok_or(Code::NotFound)?;
        driver::answering(place)?;
        put(out, driver::handle_of(place))
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, out: *mut DeviceHandle) -> c_uint {
    answer(driver::state().and_then(|state| {
        let uuid = text_at(uuid)?;
        // The real library looks at every GPU to find one by UUID, and fails if any of them is lost.
        for place in driver::enumerated(&state) {
            if driver::answering(place)?.uuid == uuid {
                return put(out, driver::handle_of(place));
            }
        }
        Err(Code::NotFound)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUUID(device: DeviceHandle, out: *mut c_char, length: c_uint) -> c_uint {
    answer(driver::gpu(device).and_then(|gpu| put_text(out, length, &gpu.uuid)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetName(device: DeviceHandle, out: *mut c_char, length: c_uint) -> c_uint {
    answer(driver::gpu(device).and_then(|gpu| put_text(out, length, &gpu.name)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetIndex(device: DeviceHandle, out: *mut c_uint) -> c_uint {
    answer(index(device).and_then(|index| put(out, index)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMinorNumber(device: DeviceHandle, out: *mut c_uint) -> c_uint {
    answer(driver::gpu(device).and_then(|_| put(out, driver::place_of(device)? as c_uint)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPciInfo_v3(device: DeviceHandle, out: *mut PciInfo) -> c_uint {
    answer(driver::gpu(device).and_then(|gpu| put(out, pci_info(&gpu)?)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo(device: DeviceHandle, out: *mut Memory) -> c_uint {
    read(device, out, |gpu| Memory { total: gpu.memory_bytes, free: gpu.memory_bytes, used: 0 })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: DeviceHandle, out: *mut MemoryV2) -> c_uint {
    // SAFETY: null or the client's struct, whose version it filled in.
    match unsafe { out.as_ref() } {
        None => return Code::InvalidArgument as c_uint,
        Some(memory) if memory.version != MEMORY_V2 => {
            return Code::ArgumentVersionMismatch as c_uint;
        }
        Some(_) => {}
    }
    read(device, out, |gpu| MemoryV2 {
        version: MEMORY_V2,
        total: gpu.memory_bytes,
        reserved: 0,
        free: gpu.memory_bytes,
        used: 0,
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperature(device: DeviceHandle, sensor: c_uint, out: *mut c_uint) -> c_uint {
    if sensor != 0 {
        return Code::InvalidArgument as c_uint;
    }
    read(device, out, |gpu| gpu.temperature)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUtilizationRates(device: DeviceHandle, out: *mut Utilization) -> c_uint {
    read(device, out, |gpu| Utilization { gpu: gpu.utilization, memory: 0 })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPowerUsage(device: DeviceHandle, out: *mut c_uint) -> c_uint {
    read(device, out, |gpu| gpu.power_mw)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: DeviceHandle,
    kind: c_uint,
    counter: c_uint,
    out: *mut c_ulonglong,
) -> c_uint {
    if kind > ERROR_UNCORRECTED || counter > 1 {
        return Code::InvalidArgument as c_uint;
    }
    read(device, out, |gpu| if kind == ERROR_UNCORRECTED { gpu.ecc_uncorrected } else { gpu.ecc_corrected })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetFieldValues(
    device: DeviceHandle,
    count: Count,
    values: *mut FieldValue,
) -> c_uint {
    answer(driver::gpu(device).and_then(|gpu| {
        let count = usize::try_from(count).map_err(|_| Code::InvalidArgument)?;
        if values.is_null() || count == 0 {
            return Err(Code::InvalidArgument);
        }
        // SAFETY: not null, and the client gave `count` structs with the field numbers filled in.
        let values = unsafe { std::slice::from_raw_parts_mut(values, count) };
        for value in values {
            fill(value, &gpu);
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetSupportedEventTypes(device: DeviceHandle, out: *mut c_ulonglong) -> c_uint {
    read(device, out, |_| EVENT_XID)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetCreate(out: *mut *mut EventSet) -> c_uint {
    answer(EventSet::new().and_then(|set| put(out, Box::into_raw(Box::new(set)))))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceRegisterEvents(
    device: DeviceHandle,
    types: c_ulonglong,
    set: *mut EventSet,
) -> c_uint {
    answer(set_at(set).and_then(|set| set.register(driver::place_of(device)?, types)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetWait_v2(set: *mut EventSet, out: *mut EventData, timeout_ms: c_uint) -> c_uint {
    answer(set_at(set).and_then(|set| {
        let event = set.wait(Duration::from_millis(timeout_ms.into()))?;
        put(
            out,
            EventData {
                device: driver::handle_of(event.place),
                event_type: EVENT_XID,
                event_data: event.xid,
                gpu_instance_id: c_uint::MAX,
                compute_instance_id: c_uint::MAX,
            },
        )
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetFree(set: *mut EventSet) -> c_uint {
    if set.is_null() {
        return Code::InvalidArgument as c_uint;
    }
    // SAFETY: a set from `nvmlEventSetCreate`; the client frees it once and uses it no more.
    drop(unsafe { Box::from_raw(set) });
    Code::Success as c_uint
}

fn index(device: DeviceHandle) -> Result<c_uint, Code> {
    let place = driver::place_of(device)?;
    driver::answering(place)?;
    let state = driver::state()?;
    let before = driver::enumerated(&state).take_while(|p| *p < place);
    Ok(before.count() as c_uint)
}

fn pci_info(gpu: &Gpu) -> Result<PciInfo, Code> {
    let BusNumbers { domain, bus, device } = gpu.bus_numbers().map_err(|_| Code::Unknown)?;
    let mut info = PciInfo {
        bus_id_legacy: [0; 16],
        domain,
        bus,
        device,
        pci_device_id: 0x2330_10de,
        pci_sub_system_id: 0x16c1_10de,
        bus_id: [0; 32],
    };
    let legacy = format!("{domain:04X}:{bus:02X}:{device:02X}.0");
    put_text(info.bus_id_legacy.as_mut_ptr(), 16, &legacy)?;
    let bus_id = format!("{domain:08X}:{bus:02X}:{device:02X}.0");
    put_text(info.bus_id.as_mut_ptr(), 32, &bus_id)?;
    Ok(info)
}

fn fill(value: &mut FieldValue, gpu: &Gpu) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    value.timestamp = i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
    value.latency_usec = 0;
    if value.field_id == FIELD_RECOVERY_ACTION {
        value.nvml_return = Code::Success as c_uint;
        value.value_type = VALUE_UNSIGNED_INT;
        value.value = Value { unsigned_int: gpu.recovery_action as c_uint };
    } else {
        value.nvml_return = Code::NotSupported as c_uint;
    }
}
