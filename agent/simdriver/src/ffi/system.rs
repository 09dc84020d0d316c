//! The library itself, and which GPUs there are.

use super::{answer, put, put_text, text_at};
use crate::abi::{self, Code, DeviceHandle};
use crate::driver;
use crate::state::{BusNumbers, Gpu};
use std::ffi::{c_char, c_int, c_uint};

/// The version of CUDA that the driver supports, as `1000 * major + 10 * minor`.
const CUDA_VERSION: c_int = 13_000;

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> c_uint {
    answer(driver::init())
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
    abi::error_text(code).as_ptr()
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
extern "C" fn nvmlSystemGetCudaDriverVersion(out: *mut c_int) -> c_uint {
    answer(driver::state().and_then(|_| put(out, CUDA_VERSION)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion_v2(out: *mut c_int) -> c_uint {
    answer(driver::state().and_then(|_| put(out, CUDA_VERSION)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount(out: *mut c_uint) -> c_uint {
    nvmlDeviceGetCount_v2(out)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(out: *mut c_uint) -> c_uint {
    answer(driver::state().and_then(|state| put(out, driver::enumerated(&state).count() as c_uint)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex(index: c_uint, out: *mut DeviceHandle) -> c_uint {
    answer(by_index(index, out, "nvmlDeviceGetHandleByIndex"))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: *mut DeviceHandle) -> c_uint {
    answer(by_index(index, out, "nvmlDeviceGetHandleByIndex_v2"))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByPciBusId(bus_id: *const c_char, out: *mut DeviceHandle) -> c_uint {
    answer(by_bus_id(bus_id, out, "nvmlDeviceGetHandleByPciBusId"))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: *const c_char, out: *mut DeviceHandle) -> c_uint {
    answer(by_bus_id(bus_id, out, "nvmlDeviceGetHandleByPciBusId_v2"))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, out: *mut DeviceHandle) -> c_uint {
    answer(by_text(uuid, out, "nvmlDeviceGetHandleByUUID", |gpu| &gpu.uuid))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleBySerial(serial: *const c_char, out: *mut DeviceHandle) -> c_uint {
    answer(by_text(serial, out, "nvmlDeviceGetHandleBySerial", |gpu| &gpu.serial))
}

fn by_index(index: c_uint, out: *mut DeviceHandle, call: &str) -> Result<(), Code> {
    let state = driver::state()?;
    let place = driver::enumerated(&state).nth(index as usize).ok_or(Code::INVALID_ARGUMENT)?;
    put_handle(out, place, call)
}

fn by_bus_id(bus_id: *const c_char, out: *mut DeviceHandle, call: &str) -> Result<(), Code> {
    let state = driver::state()?;
    let wanted = BusNumbers::parse(text_at(bus_id)?).ok_or(Code::INVALID_ARGUMENT)?;
    let is_wanted = |gpu: &Gpu| gpu.bus_numbers().is_ok_and(|numbers| numbers == wanted);
    let place = driver::enumerated(&state).find(|place| is_wanted(&state.gpus[*place]));
    put_handle(out, place.ok_or(Code::NOT_FOUND)?, call)
}

/// The real library looks at every GPU to find one by a text, and fails if any of them is lost.
fn by_text(
    text: *const c_char,
    out: *mut DeviceHandle,
    call: &str,
    text_of: fn(&Gpu) -> &str,
) -> Result<(), Code> {
    let state = driver::state()?;
    let wanted = text_at(text)?;
    for place in driver::enumerated(&state) {
        let gpu = driver::answering(place, call, None)?;
        if text_of(&gpu) == wanted {
            return put(out, gpu.handle().to_c());
        }
    }
    Err(Code::NOT_FOUND)
}

fn put_handle(out: *mut DeviceHandle, place: usize, call: &str) -> Result<(), Code> {
    put(out, driver::answering(place, call, None)?.handle().to_c())
}
