//! Power: what is drawn, and the limit.

use super::super::protocol::{FastSet, SlowSet};
use super::calls::Calls;
use super::fault::{Fault, Meaning};
use super::query::Query;
use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;

pub(super) fn fast(query: &mut Query<'_>, set: &mut FastSet) -> Result<(), Fault> {
    const CALL: &str = "nvmlDeviceGetPowerUsage";
    match query.calls.post(CALL, || query.device.power_usage()) {
        Ok(milliwatts) => set.power_mw = Some(milliwatts),
        Err(error) => {
            let fault = Fault::new(CALL, error);
            match fault.meaning {
                Meaning::Gone | Meaning::ResetRequired | Meaning::Blind => return Err(fault),
                // A sensor that fails by itself is well known, and says nothing of the rest of the GPU.
                Meaning::Suspect => set.power_unreadable = true,
                Meaning::Withheld => {
                    query.withheld.insert(CALL);
                }
                Meaning::Stale | Meaning::NotFound | Meaning::NoSuchCall | Meaning::NotTold => {}
            }
        }
    }
    Ok(())
}

pub(super) fn slow(query: &mut Query<'_>, set: &mut SlowSet) -> Result<(), Fault> {
    set.power_limit_mw =
        query.told("nvmlDeviceGetPowerManagementLimit", |_, device| device.power_management_limit())?;
    set.power_limit_enforced_mw =
        query.told("nvmlDeviceGetEnforcedPowerLimit", |_, device| device.enforced_power_limit())?;
    Ok(())
}

/// Sets the limit to `wanted` milliwatts, clamped to what the GPU allows, or to its default. Returns the
/// limit that holds then.
pub(super) fn set_limit(
    device: &mut Device<'static>,
    calls: &Calls,
    wanted: Option<u32>,
) -> Result<u32, Fault> {
    fn post<T>(
        calls: &Calls,
        name: &'static str,
        call: impl FnOnce() -> Result<T, NvmlError>,
    ) -> Result<T, Fault> {
        calls.post(name, call).map_err(|error| Fault::new(name, error))
    }
    let limit = match wanted {
        Some(wanted) => {
            let allowed = post(calls, "nvmlDeviceGetPowerManagementLimitConstraints", || {
                device.power_management_limit_constraints()
            })?;
            wanted.min(allowed.max_limit).max(allowed.min_limit)
        }
        None => post(calls, "nvmlDeviceGetPowerManagementDefaultLimit", || {
            device.power_management_limit_default()
        })?,
    };
    post(calls, "nvmlDeviceSetPowerManagementLimit", || device.set_power_management_limit(limit))?;
    post(calls, "nvmlDeviceGetPowerManagementLimit", || device.power_management_limit())
}
