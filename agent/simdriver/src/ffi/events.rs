//! Event sets.

use super::{answer, device_calls, put};
use crate::abi::{Code, EventData};
use crate::driver;
use crate::event_set::EventSet;
use crate::state::EVENT_BITS;
use std::ffi::{c_uint, c_ulonglong};
use std::time::Duration;

/// Stands for no GPU instance: the GPU is not divided.
const NO_INSTANCE: c_uint = c_uint::MAX;

device_calls! {
    fn nvmlDeviceGetSupportedEventTypes(_gpu, out: *mut c_ulonglong) { put(out, EVENT_BITS) }
    fn nvmlDeviceRegisterEvents(gpu, types: c_ulonglong, set: *mut EventSet) { set_at(set)?.register(&gpu, types) }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetCreate(out: *mut *mut EventSet) -> c_uint {
    answer(EventSet::new().and_then(|set| put(out, Box::into_raw(Box::new(set)))))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetWait(set: *mut EventSet, out: *mut EventData, timeout_ms: c_uint) -> c_uint {
    answer(wait(set, out, timeout_ms, "nvmlEventSetWait"))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetWait_v2(set: *mut EventSet, out: *mut EventData, timeout_ms: c_uint) -> c_uint {
    answer(wait(set, out, timeout_ms, "nvmlEventSetWait_v2"))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetFree(set: *mut EventSet) -> c_uint {
    if set.is_null() {
        return Code::INVALID_ARGUMENT.0;
    }
    // A driver that hangs holds this call too; a set can be freed though the driver is gone.
    let _ = driver::state();
    // SAFETY: a set from `nvmlEventSetCreate`; the client frees it once and uses it no more.
    drop(unsafe { Box::from_raw(set) });
    Code::SUCCESS.0
}

fn set_at<'a>(set: *const EventSet) -> Result<&'a EventSet, Code> {
    // SAFETY: null or a set from `nvmlEventSetCreate` that the client has not freed.
    unsafe { set.as_ref() }.ok_or(Code::INVALID_ARGUMENT)
}

fn wait(set: *const EventSet, out: *mut EventData, timeout_ms: c_uint, call: &str) -> Result<(), Code> {
    let delivered = set_at(set)?.wait(Duration::from_millis(timeout_ms.into()), call)?;
    put(
        out,
        EventData {
            device: delivered.handle.to_c(),
            event_type: delivered.event.kind.bit(),
            event_data: delivered.event.data,
            gpu_instance: NO_INSTANCE,
            compute_instance: NO_INSTANCE,
        },
    )
}
