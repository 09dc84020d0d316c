//! The fabric between the nodes of a rack.

use super::super::protocol::SlowSet;
use super::fault::Fault;
use super::query::{Query, version};
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

/// Source of these: `nvml.h`, `NVML_GPU_FABRIC_STATE_*` and `NVML_GPU_FABRIC_HEALTH_MASK_*`.
const COMPLETED: sys::nvmlGpuFabricState_t = 3;
const SHIFT_DEGRADED_BANDWIDTH: u32 = 0;
const SHIFT_ROUTE_UNHEALTHY: u32 = 4;

pub(super) fn slow(query: &mut Query<'_>, set: &mut SlowSet) -> Result<(), Fault> {
    let info = query.told("nvmlDeviceGetGpuFabricInfoV", |nvml, device| {
        let newest = info(nvml, device, version::<sys::nvmlGpuFabricInfo_v3_t>(3));
        match newest {
            // A driver before version 3, of which version 2 is the beginning.
            Err(NvmlError::UnexpectedVariant(sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH)) => {
                info_v2(nvml, device)
            }
            told => told,
        }
    })?;
    if let Some(info) = info.filter(|info| info.state == COMPLETED) {
        set.fabric_bandwidth_degraded = flag(info.healthMask, SHIFT_DEGRADED_BANDWIDTH);
        set.fabric_route_unhealthy = flag(info.healthMask, SHIFT_ROUTE_UNHEALTHY);
    }
    Ok(())
}

fn info_v2(nvml: &Nvml, device: &Device<'_>) -> Result<sys::nvmlGpuFabricInfoV_t, NvmlError> {
    info(nvml, device, version::<sys::nvmlGpuFabricInfo_v2_t>(2))
}

fn info(nvml: &Nvml, device: &Device<'_>, version: u32) -> Result<sys::nvmlGpuFabricInfoV_t, NvmlError> {
    let call = nvml_sym(nvml.lib().nvmlDeviceGetGpuFabricInfoV.as_ref())?;
    let mut info = sys::nvmlGpuFabricInfoV_t {
        version,
        clusterUuid: [0; 16],
        status: 0,
        cliqueId: 0,
        state: 0,
        healthMask: 0,
        healthSummary: 0,
    };
    // SAFETY: the handle is a live device's, `info` is at least as large as its version says and outlives the
    // call.
    nvml_try(unsafe { call(device.handle(), &raw mut info) })?;
    Ok(info)
}

/// Two bits: not supported, yes, no.
const fn flag(mask: u32, shift: u32) -> Option<bool> {
    match mask >> shift & 3 {
        1 => Some(true),
        2 => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_tells_yes_no_or_nothing() {
        // Bandwidth not degraded, route recovery not in progress, route unhealthy.
        let mask = 0b01_10_10;
        assert_eq!(flag(mask, SHIFT_DEGRADED_BANDWIDTH), Some(false));
        assert_eq!(flag(mask, SHIFT_ROUTE_UNHEALTHY), Some(true));
        assert_eq!(flag(0, SHIFT_ROUTE_UNHEALTHY), None);
        assert_eq!(flag(0b11_00_01, SHIFT_ROUTE_UNHEALTHY), None);
        assert_eq!(flag(0b11_00_01, SHIFT_DEGRADED_BANDWIDTH), Some(true));
    }
}
