//! Temperatures, what they and other things do to the clocks, and how busy the GPU is.

use super::super::protocol::{FastSet, SlowSet};
use super::fault::Fault;
use super::query::{Query, version};
use nvml_wrapper::enum_wrappers::device::{TemperatureSensor, TemperatureThreshold};
use nvml_wrapper::error::{nvml_sym, nvml_try};
use nvml_wrapper_sys::bindings as sys;
use sys::field_id;

pub(super) fn fast(query: &mut Query<'_>, set: &mut FastSet) -> Result<(), Fault> {
    set.throttle = throttle(query)?;
    set.temperature = temperature(query)?;
    set.utilization =
        query.told("nvmlDeviceGetUtilizationRates", |_, device| Ok(device.utilization_rates()?.gpu))?;
    Ok(())
}

pub(super) fn slow(query: &mut Query<'_>, set: &mut SlowSet) -> Result<(), Fault> {
    // Where there is no sensor some drivers say 0, which no memory at work has.
    set.memory_temperature = query.field(field_id::NVML_FI_DEV_MEMORY_TEMP)?.filter(|degrees| *degrees > 0);
    Ok(())
}

fn temperature(query: &mut Query<'_>) -> Result<Option<u32>, Fault> {
    query.told("nvmlDeviceGetTemperature", |_, device| device.temperature(TemperatureSensor::Gpu))
}

/// The wrapper drops bits that it does not know.
fn throttle(query: &mut Query<'_>) -> Result<Option<u64>, Fault> {
    query.told("nvmlDeviceGetCurrentClocksEventReasons", |nvml, device| {
        let lib = nvml.lib();
        let newer = lib.nvmlDeviceGetCurrentClocksEventReasons.as_ref();
        // Its name before driver 535.
        let call = nvml_sym(newer.or(lib.nvmlDeviceGetCurrentClocksThrottleReasons.as_ref()))?;
        let mut reasons = 0;
        // SAFETY: the handle is a live device's, and `reasons` outlives the call.
        nvml_try(unsafe { call(device.handle(), &raw mut reasons) })?;
        Ok(reasons)
    })
}

/// Where the GPU begins to slow down. Newer GPUs tell only how far it is, against a limit of their own:
/// the margin that is left now, and the margin at which they slow down.
pub(super) fn slowdown(query: &mut Query<'_>) -> Result<Option<u32>, Fault> {
    let threshold = query.told("nvmlDeviceGetTemperatureThreshold", |_, device| {
        device.temperature_threshold(TemperatureThreshold::Slowdown)
    })?;
    if threshold.is_some() {
        return Ok(threshold);
    }
    let slowdown = super::query::Field { id: field_id::NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT, scope: 0 };
    let margin_at_slowdown = query.fields(&[slowdown])?.pop().flatten();
    let (Some(margin_at_slowdown), Some(margin), Some(temperature)) =
        (margin_at_slowdown, margin(query)?, temperature(query)?)
    else {
        return Ok(None);
    };
    let slowdown = i64::from(temperature) + i64::from(margin) - margin_at_slowdown;
    Ok(u32::try_from(slowdown).ok())
}

fn margin(query: &mut Query<'_>) -> Result<Option<i32>, Fault> {
    query.told("nvmlDeviceGetMarginTemperature", |nvml, device| {
        let call = nvml_sym(nvml.lib().nvmlDeviceGetMarginTemperature.as_ref())?;
        let version = version::<sys::nvmlMarginTemperature_t>(1);
        let mut margin = sys::nvmlMarginTemperature_t { version, marginTemperature: 0 };
        // SAFETY: the handle is a live device's, and `margin` says its size and outlives the call.
        nvml_try(unsafe { call(device.handle(), &raw mut margin) })?;
        Ok(margin.marginTemperature)
    })
}
