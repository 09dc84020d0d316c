//! NVML's events of one GPU.

use super::super::protocol::GpuIdentity;
use super::calls::Calls;
use super::fault::{Fault, Meaning};
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper::{Device, EventSet, Nvml};
use nvml_wrapper_sys::bindings as sys;
use std::time::Duration;

/// XID errors, and the other events that say something went wrong. Not each corrected error: a bad GPU has
/// thousands a second.
const WANTED: u64 = sys::nvmlEventTypeXidCriticalError as u64
    | sys::nvmlEventTypeDoubleBitEccError as u64
    | sys::nvmlEventTypeSingleBitEccErrorStorm as u64
    | sys::nvmlEventTypeDramRetirementEvent as u64
    | sys::nvmlEventTypeDramRetirementFailure as u64
    | sys::nvmlEventTypeNonFatalPoisonError as u64
    | sys::nvmlEventTypeFatalPoisonError as u64
    | sys::nvmlEventTypeGpuUnavailableError as u64
    | sys::nvmlEventTypeGpuRecoveryAction as u64;
const WAIT_MS: u32 = 1000;
/// A wait that takes longer than it was told, by so much, hangs.
const LATE: Duration = Duration::from_secs(5);

/// What came out of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    Xid(u64),
    /// Another event: the GPU should be read at once. Also one that this version does not know.
    Other,
    Nothing,
}

/// An event set for one GPU: a set that cannot be registered is freed with its registrations, so each GPU
/// has its own.
#[derive(Debug)]
pub(crate) struct Events {
    nvml: &'static Nvml,
    set: EventSet<'static>,
}

impl Events {
    /// Opens a set for the GPU at its place on the bus.
    pub(crate) fn of(nvml: &'static Nvml, gpu: &GpuIdentity, calls: &Calls) -> Result<Self, Fault> {
        Self::open(nvml, &super::device(nvml, gpu, calls)?, calls)
    }

    pub(super) fn open(nvml: &'static Nvml, device: &Device<'static>, calls: &Calls) -> Result<Self, Fault> {
        let supported = post(calls, "nvmlDeviceGetSupportedEventTypes", || supported(nvml, device))?;
        // The wrapper would drop the kinds that it does not know.
        let types = EventTypes::from_bits_retain(supported & WANTED);
        if types.is_empty() {
            let text = "nvmlDeviceGetSupportedEventTypes names none that is wanted".to_owned();
            return Err(Fault { meaning: Meaning::NotTold, text });
        }
        let set = post(calls, "nvmlEventSetCreate", || nvml.create_event_set())?;
        let set = post(calls, "nvmlDeviceRegisterEvents", || {
            device.register_events(types, set).map_err(|failed| failed.error)
        })?;
        Ok(Self { nvml, set })
    }

    /// Waits for an event, a second at most. Not through the wrapper, which turns events that it does not know
    /// into nothing.
    pub(crate) fn wait(&self, calls: &Calls) -> Result<Heard, Fault> {
        const CALL: &str = "nvmlEventSetWait_v2";
        let allowed = Duration::from_millis(WAIT_MS.into()) + LATE;
        match calls.post_wait(CALL, allowed, || self.wait_raw()) {
            Ok(event) if event.eventType & u64::from(sys::nvmlEventTypeXidCriticalError) != 0 => {
                Ok(Heard::Xid(event.eventData))
            }
            Ok(_) => Ok(Heard::Other),
            Err(NvmlError::Timeout) => Ok(Heard::Nothing),
            Err(error) => Err(Fault::new(CALL, error)),
        }
    }

    fn wait_raw(&self) -> Result<sys::nvmlEventData_t, NvmlError> {
        let call = nvml_sym(self.nvml.lib().nvmlEventSetWait_v2.as_ref())?;
        let mut data = sys::nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: 0,
            computeInstanceId: 0,
        };
        // SAFETY: the set is alive, and `data` outlives the call.
        nvml_try(unsafe { call(self.set.handle(), &raw mut data, WAIT_MS) })?;
        Ok(data)
    }
}

fn post<T>(
    calls: &Calls,
    name: &'static str,
    call: impl FnOnce() -> Result<T, NvmlError>,
) -> Result<T, Fault> {
    calls.post(name, call).map_err(|error| Fault::new(name, error))
}

fn supported(nvml: &Nvml, device: &Device<'_>) -> Result<u64, NvmlError> {
    let call = nvml_sym(nvml.lib().nvmlDeviceGetSupportedEventTypes.as_ref())?;
    let mut types = 0;
    // SAFETY: the handle is a live device's, and `types` outlives the call.
    nvml_try(unsafe { call(device.handle(), &raw mut types) })?;
    Ok(types)
}
