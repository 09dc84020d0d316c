//! NVML through nvml-wrapper, and through its raw symbols where the wrapper loses what is needed.

#![allow(unsafe_code)]

mod calls;
mod ecc;
pub(super) mod events;
mod fabric;
mod fault;
mod links;
mod pcie;
mod power;
mod query;
mod thermal;

pub(super) use calls::Calls;
pub(super) use fault::{Fault, Meaning};

use super::protocol::{FastSet, GpuIdentity, Reading, SlowSet};
use events::Events;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::field_id;
use query::Query;
use reknit_layout::GpuId;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

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
    pub(super) events: Option<Events>,
}

/// The GPUs of this node. One that does not answer within `limit` has no name but its place in the count.
pub(super) fn enumerate(nvml: &'static Nvml, limit: Duration) -> Result<Vec<Found>, NvmlError> {
    let count = nvml.device_count()?;
    let (answer, answers) = mpsc::channel();
    for index in 0..count {
        // A thread for each, as one GPU that hangs must not hide the others.
        let answer = answer.clone();
        thread::spawn(move || {
            // An answer that comes too late is nobody's.
            let _too_late = answer.send((index, identify(nvml, index)));
        });
    }
    let deadline = Instant::now() + limit;
    let mut gpus: Vec<Found> = Vec::new();
    for _ in 0..count {
        match answers.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((_, Ok(gpu))) => gpus.push(gpu),
            Ok((index, Err(fault))) => {
                let why = fault.text;
                tracing::warn!(index, why, "a GPU does not answer and cannot be identified");
            }
            Err(_) => {
                tracing::warn!("a GPU hangs and cannot be identified");
                break;
            }
        }
    }
    for index in 0..count {
        if gpus.iter().all(|found| found.gpu.index != index) {
            gpus.push(Found { gpu: GpuIdentity::unidentified(index), answers: false, events: None });
        }
    }
    Ok(gpus)
}

/// The GPUs that answer and are not among `known`. Waits for those that hang.
pub(super) fn newcomers(nvml: &'static Nvml, known: &[GpuIdentity]) -> Vec<Found> {
    let is_new = |index: &u32| {
        let uuid = nvml.device_by_index(*index).and_then(|device| device.uuid());
        uuid.is_ok_and(|uuid| known.iter().all(|known| known.uuid.0 != uuid))
    };
    let count = nvml.device_count().unwrap_or(0);
    (0..count).filter(is_new).filter_map(|index| identify(nvml, index).ok()).collect()
}

/// What kept a GPU from being identified; it keeps it no longer when there is no fault.
pub(super) fn answers_at(nvml: &'static Nvml, index: u32, calls: &Calls) -> Result<(), Fault> {
    const CALL: &str = "nvmlDeviceGetHandleByIndex_v2";
    let device = calls.post(CALL, || nvml.device_by_index(index)).map_err(|error| Fault::new(CALL, error))?;
    answers(&device, calls).map(drop)
}

fn identify(nvml: &'static Nvml, index: u32) -> Result<Found, Fault> {
    // Nobody watches these calls: the GPU has no name yet, and its answer has a deadline.
    let (calls, mut withheld) = (Calls::default(), BTreeSet::new());
    let required = |name: &str, error| Fault::new(name, error);
    let device = nvml.device_by_index(index).map_err(|e| required("nvmlDeviceGetHandleByIndex_v2", e))?;
    let uuid = device.uuid().map_err(|e| required("nvmlDeviceGetUUID", e))?;
    let pci = device.pci_info().map_err(|e| required("nvmlDeviceGetPciInfo_v3", e))?;
    let mut query = Query { nvml, device: &device, calls: &calls, withheld: &mut withheld };
    let name = query.told("nvmlDeviceGetName", |_, device| device.name())?;
    let architecture = query.told("nvmlDeviceGetArchitecture", |_, device| {
        // One that the wrapper does not know has no name here.
        Ok(device.architecture().map(|architecture| architecture.to_string().to_lowercase()))
    })?;
    let memory = query.told("nvmlDeviceGetMemoryInfo", |_, device| device.memory_info())?;
    let gpu = GpuIdentity {
        uuid: GpuId(uuid),
        index,
        pci_bus_id: pci.bus_id,
        // What a terminal would act on is no name.
        name: name.unwrap_or_default().replace(char::is_control, ""),
        architecture: architecture.and_then(Result::ok).unwrap_or_else(|| "unknown".to_owned()),
        memory_bytes: memory.map_or(0, |memory| memory.total),
    };
    // Where it fails, the GPU's listener tries again and tells.
    let events = Events::open(nvml, &device, &calls).ok();
    Ok(Found { gpu, answers: true, events })
}

/// One GPU's handle, and what is asked only once of it.
#[derive(Debug)]
pub(super) struct Handle {
    nvml: &'static Nvml,
    device: Device<'static>,
    links: u32,
    slowdown_temperature: Option<u32>,
}

impl Handle {
    /// Finds the GPU by its place on the bus. Another GPU in that place is `NotFound`.
    pub(super) fn resolve(
        nvml: &'static Nvml,
        gpu: &GpuIdentity,
        calls: &Calls,
        withheld: &mut BTreeSet<&'static str>,
    ) -> Result<Self, Fault> {
        let device = device(nvml, gpu, calls)?;
        let links = links::count(&mut Query { nvml, device: &device, calls, withheld })?;
        Ok(Self { nvml, device, links, slowdown_temperature: None })
    }

    /// Reads what the policy judges: the fast set, and the slow one where it is asked for. Calls that only
    /// root may make are added to `withheld`.
    pub(super) fn read(
        &mut self,
        slow: bool,
        calls: &Calls,
        withheld: &mut BTreeSet<&'static str>,
    ) -> Result<Reading, Fault> {
        answers(&self.device, calls)?;
        let query = &mut Query { nvml: self.nvml, device: &self.device, calls, withheld };
        if slow {
            self.slowdown_temperature = thermal::slowdown(query)?;
        }
        let mut fast = FastSet { slowdown_temperature: self.slowdown_temperature, ..FastSet::default() };
        fast.recovery_action = query.field(field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)?;
        ecc::fast(query, &mut fast)?;
        links::fast(query, self.links, &mut fast)?;
        thermal::fast(query, &mut fast)?;
        power::fast(query, &mut fast)?;
        if !slow {
            return Ok(Reading::Answers { fast, slow: None, reset: false });
        }
        let mut slow = Box::<SlowSet>::default();
        ecc::slow(query, &mut slow)?;
        links::slow(query, self.links, &mut slow)?;
        fabric::slow(query, &mut slow)?;
        thermal::slow(query, &mut slow)?;
        power::slow(query, &mut slow)?;
        pcie::slow(query, &mut slow)?;
        Ok(Reading::Answers { fast, slow: Some(slow), reset: false })
    }

    /// In milliwatts, or the GPU's default. Returns the limit that holds then.
    pub(super) fn set_power_limit(&mut self, limit: Option<u32>, calls: &Calls) -> Result<u32, Fault> {
        answers(&self.device, calls)?;
        power::set_limit(&mut self.device, calls, limit)
    }
}

fn device(nvml: &'static Nvml, gpu: &GpuIdentity, calls: &Calls) -> Result<Device<'static>, Fault> {
    const CALL: &str = "nvmlDeviceGetHandleByPciBusId_v2";
    let found = calls.post(CALL, || nvml.device_by_pci_bus_id(gpu.pci_bus_id.as_str()));
    let device = found.map_err(|error| Fault::new(CALL, error))?;
    if answers(&device, calls)? == gpu.uuid.0 {
        Ok(device)
    } else {
        Err(Fault { meaning: Meaning::NotFound, text: format!("another GPU is at {}", gpu.pci_bus_id) })
    }
}

/// Every GPU has a UUID, so this call says whether the GPU answers at all.
fn answers(device: &Device<'_>, calls: &Calls) -> Result<String, Fault> {
    const CALL: &str = "nvmlDeviceGetUUID";
    calls.post(CALL, || device.uuid()).map_err(|error| Fault::new(CALL, error))
}
