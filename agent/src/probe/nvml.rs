//! NVML through nvml-wrapper, and through its raw symbols where the wrapper loses what is needed.

#![allow(unsafe_code)]

use super::protocol::{FastSet, GpuIdentity, Reading};
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, EventSet, Nvml};
use nvml_wrapper_sys::bindings::{nvmlEventData_t, nvmlReturn_t};
use reknit_layout::GpuId;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`. Source: `nvml.h`, release 13.0.
const RECOVERY_ACTION: FieldId = FieldId(230);
/// `nvmlEventTypeGpuRecoveryAction`, which the wrapper does not know.
const EVENT_RECOVERY_ACTION: u64 = 0x8000;
/// `NVML_ERROR_NOT_READY` and `NVML_ERROR_GPU_NOT_FOUND`, which the wrapper does not know either.
const NOT_READY: u32 = 27;
const GPU_NOT_FOUND: u32 = 28;

/// Loads the library for the life of the process: the wrapper's clean-up panics where a driver is half gone,
/// and a failing driver is never asked to shut down.
pub(super) fn load(path: &Path) -> Result<&'static Nvml, NvmlError> {
    let nvml = Nvml::builder().lib_path(path.as_os_str()).init()?;
    Ok(Box::leak(Box::new(nvml)))
}

/// A GPU to watch.
pub(super) struct Found {
    pub(super) gpu: GpuIdentity,
    pub(super) answers: bool,
    /// Open from before the GPU was first named, so that no event after that is missed.
    pub(super) events: Option<EventSet<'static>>,
}

/// The GPUs that answer within `limit`. One that does not is left out: it has no name to be reported under.
pub(super) fn enumerate(nvml: &'static Nvml, limit: Duration) -> Result<Vec<Found>, NvmlError> {
    let identify = move |index| {
        let device = nvml.device_by_index(index)?;
        let gpu = GpuIdentity {
            uuid: GpuId(device.uuid()?),
            index,
            pci_bus_id: device.pci_info()?.bus_id,
            name: device.name()?,
            architecture: optional(device.architecture())?
                .map_or_else(|| "unknown".to_owned(), |architecture| architecture.to_string().to_lowercase()),
            memory_bytes: optional(device.memory_info())?.map_or(0, |memory| memory.total),
        };
        // Where it fails, the GPU's listener tries again and tells.
        let events = listen(nvml, &device).ok();
        Ok(Found { gpu, answers: true, events })
    };
    let count = nvml.device_count()?;
    let (answer, answers) = mpsc::channel();
    for index in 0..count {
        // A thread for each, as one GPU that hangs must not hide the others.
        let answer = answer.clone();
        thread::spawn(move || answer.send((index, identify(index))));
    }
    let deadline = Instant::now() + limit;
    let mut gpus = Vec::new();
    for _ in 0..count {
        match answers.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((_, Ok(gpu))) => gpus.push(gpu),
            Ok((index, Err(error))) => {
                let error: NvmlError = error;
                tracing::warn!(index, %error, "a GPU does not answer and cannot be identified");
            }
            Err(_) => {
                tracing::warn!("a GPU hangs and cannot be identified");
                break;
            }
        }
    }
    Ok(gpus)
}

/// Finds the GPU by its place on the bus. Another GPU in that place is `NotFound`.
pub(super) fn resolve<'a>(nvml: &'a Nvml, gpu: &GpuIdentity) -> Result<Device<'a>, NvmlError> {
    let device = nvml.device_by_pci_bus_id(gpu.pci_bus_id.as_str())?;
    if device.uuid()? == gpu.uuid.0 { Ok(device) } else { Err(NvmlError::NotFound) }
}

/// Reads what the policy judges.
pub(super) fn read(device: &Device<'_>) -> Result<Reading, NvmlError> {
    // Every GPU has a UUID, so this call says whether the GPU answers at all.
    device.uuid()?;
    let uncorrected = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
    let fast = FastSet {
        recovery_action: optional(recovery_action(device))?.flatten(),
        ecc_uncorrected: optional(uncorrected)?,
        temperature: optional(device.temperature(TemperatureSensor::Gpu))?,
        power_mw: optional(device.power_usage())?,
        ..FastSet::default()
    };
    Ok(Reading::Answers { fast, slow: None, reset: false })
}

fn recovery_action(device: &Device<'_>) -> Result<Option<u32>, NvmlError> {
    let sample = device.field_values_for(&[RECOVERY_ACTION])?.pop();
    let value = match sample {
        Some(sample) => sample?.value?,
        None => return Ok(None),
    };
    Ok(match value {
        SampleValue::U32(action) => Some(action),
        SampleValue::U64(action) => u32::try_from(action).ok(),
        SampleValue::I64(action) => u32::try_from(action).ok(),
        SampleValue::F64(_) => None,
    })
}

/// A reading that this GPU or driver does not have is no fault of the GPU.
fn optional<T>(result: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(
            NvmlError::NotSupported
            | NvmlError::FailedToLoadSymbol(_)
            | NvmlError::FunctionNotFound
            | NvmlError::NoPermission
            | NvmlError::NoData
            | NvmlError::IncorrectBits(_),
        ) => Ok(None),
        // Out of the wrapper's own enums, not of NVML's codes: a value of a newer driver.
        Err(NvmlError::UnexpectedVariant(code)) if code != NOT_READY && code != GPU_NOT_FOUND => Ok(None),
        Err(error) => Err(error),
    }
}

/// What an error says about the GPU it came from.
pub(super) fn reading_of(error: &NvmlError) -> Reading {
    let text = |name: &str| format!("NVML {name}: {error}");
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "the wrapper's list grows with NVML; what is not named here proves nothing"
    )]
    match error {
        NvmlError::GpuLost => Reading::Gone { error: text("code 15") },
        NvmlError::NotFound => Reading::Gone { error: text("code 6") },
        NvmlError::UnexpectedVariant(GPU_NOT_FOUND) => Reading::Gone { error: text("code 28") },
        NvmlError::ResetRequired => Reading::ResetRequired,
        NvmlError::DriverNotLoaded => Reading::Blind { error: text("code 9") },
        NvmlError::LibRmVersionMismatch => Reading::Blind { error: text("code 18") },
        NvmlError::Uninitialized => Reading::Blind { error: text("code 1") },
        NvmlError::OperatingSystem => Reading::Blind { error: text("code 17") },
        NvmlError::NoPermission => Reading::Blind { error: text("code 4") },
        NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_) => {
            Reading::Blind { error: text("library") }
        }
        _ => Reading::Suspect { error: text("answer") },
    }
}

/// An event set for one GPU: a set that cannot be registered is freed with its registrations, so each GPU
/// has its own.
pub(super) fn listen<'a>(nvml: &'a Nvml, device: &Device<'a>) -> Result<EventSet<'a>, NvmlError> {
    let wanted = EventTypes::CRITICAL_XID_ERROR.bits() | EVENT_RECOVERY_ACTION;
    let types = EventTypes::from_bits_retain(supported_events(nvml, device)? & wanted);
    let set = nvml.create_event_set()?;
    device.register_events(types, set).map_err(|e| e.error)
}

fn supported_events(nvml: &Nvml, device: &Device<'_>) -> Result<u64, NvmlError> {
    let call = nvml_sym(nvml.lib().nvmlDeviceGetSupportedEventTypes.as_ref())?;
    let mut types = 0;
    // SAFETY: the handle is a live device's, and `types` outlives the call.
    nvml_try(unsafe { call(device.handle(), &raw mut types) })?;
    Ok(types)
}

/// What came out of a wait. The wrapper's own wait turns events it does not know into nothing.
pub(super) enum Heard {
    Xid(u64),
    /// Another event that was asked for: the GPU should be read at once.
    Other,
    Nothing,
}

pub(super) fn wait(nvml: &Nvml, set: &EventSet<'_>, timeout_ms: u32) -> Result<Heard, NvmlError> {
    let call = nvml_sym(nvml.lib().nvmlEventSetWait_v2.as_ref())?;
    let mut data = nvmlEventData_t {
        device: std::ptr::null_mut(),
        eventType: 0,
        eventData: 0,
        gpuInstanceId: 0,
        computeInstanceId: 0,
    };
    // SAFETY: the set is alive, and `data` outlives the call.
    let code: nvmlReturn_t = unsafe { call(set.handle(), &raw mut data, timeout_ms) };
    match nvml_try(code) {
        Ok(()) if data.eventType & EventTypes::CRITICAL_XID_ERROR.bits() != 0 => {
            Ok(Heard::Xid(data.eventData))
        }
        Ok(()) => Ok(Heard::Other),
        Err(NvmlError::Timeout) => Ok(Heard::Nothing),
        Err(error) => Err(error),
    }
}
