//! Temperatures, power, clocks, load and the PCIe link.

use super::{device_calls, put, put_versioned};
use crate::abi::{
    CLOCK_GRAPHICS, CLOCK_MEMORY, CLOCK_SM, CLOCK_VIDEO, Code, TEMPERATURE_GPU, TEMPERATURE_V1,
    THRESHOLD_SHUTDOWN, THRESHOLD_SLOWDOWN, TemperatureV1, Utilization,
};
use crate::state::Throttle;
use std::ffi::{c_int, c_uint, c_ulonglong};

device_calls! {
    fn nvmlDeviceGetTemperature(gpu, sensor: c_uint, out: *mut c_uint) {
        if sensor == TEMPERATURE_GPU { put(out, gpu.temperature) } else { Err(Code::INVALID_ARGUMENT) }
    }
    fn nvmlDeviceGetTemperatureV(gpu, out: *mut TemperatureV1) {
        let temperature = c_int::try_from(gpu.temperature).unwrap_or(c_int::MAX);
        let value = TemperatureV1 { version: TEMPERATURE_V1, sensor: TEMPERATURE_GPU, temperature };
        put_versioned(out, TEMPERATURE_V1, value)
    }
    fn nvmlDeviceGetTemperatureThreshold(gpu, threshold: c_uint, out: *mut c_uint) {
        match threshold {
            THRESHOLD_SHUTDOWN => put(out, gpu.shutdown_temperature),
            THRESHOLD_SLOWDOWN => put(out, gpu.slowdown_temperature),
            _ => Err(Code::NOT_SUPPORTED),
        }
    }
    fn nvmlDeviceGetUtilizationRates(gpu, out: *mut Utilization) {
        put(out, Utilization { gpu: gpu.utilization, memory: 0 })
    }

    fn nvmlDeviceGetPowerUsage(gpu, out: *mut c_uint) { put(out, gpu.power_mw) }
    fn nvmlDeviceGetPowerManagementMode(_gpu, out: *mut c_uint) { put(out, 1) }
    fn nvmlDeviceGetPowerManagementLimit(gpu, out: *mut c_uint) { put(out, gpu.power_limit_mw) }
    fn nvmlDeviceGetEnforcedPowerLimit(gpu, out: *mut c_uint) { put(out, gpu.enforced_limit()) }
    fn nvmlDeviceGetPowerManagementDefaultLimit(gpu, out: *mut c_uint) { put(out, gpu.power_limit_default_mw) }
    fn nvmlDeviceGetPowerManagementLimitConstraints(gpu, min: *mut c_uint, max: *mut c_uint) {
        put(min, gpu.power_limit_min_mw).and(put(max, gpu.power_limit_max_mw))
    }

    fn nvmlDeviceGetCurrentClocksEventReasons(gpu, out: *mut c_ulonglong) { put(out, gpu.throttle.0) }
    fn nvmlDeviceGetCurrentClocksThrottleReasons(gpu, out: *mut c_ulonglong) { put(out, gpu.throttle.0) }
    fn nvmlDeviceGetSupportedClocksEventReasons(_gpu, out: *mut c_ulonglong) { put(out, Throttle::ALL.0) }
    fn nvmlDeviceGetSupportedClocksThrottleReasons(_gpu, out: *mut c_ulonglong) { put(out, Throttle::ALL.0) }
    fn nvmlDeviceGetClockInfo(gpu, clock: c_uint, out: *mut c_uint) {
        // A hardware slowdown halves the clocks or more.
        let divisor = if gpu.throttle.is_hardware() { 2 } else { 1 };
        put(out, max_clock(clock)? / divisor)
    }
    fn nvmlDeviceGetMaxClockInfo(_gpu, clock: c_uint, out: *mut c_uint) { put(out, max_clock(clock)?) }

    fn nvmlDeviceGetCurrPcieLinkGeneration(gpu, out: *mut c_uint) { put(out, gpu.pcie_gen) }
    fn nvmlDeviceGetCurrPcieLinkWidth(gpu, out: *mut c_uint) { put(out, gpu.pcie_width) }
    fn nvmlDeviceGetMaxPcieLinkGeneration(gpu, out: *mut c_uint) { put(out, gpu.pcie_gen_max) }
    fn nvmlDeviceGetGpuMaxPcieLinkGeneration(gpu, out: *mut c_uint) { put(out, gpu.pcie_gen_max) }
    fn nvmlDeviceGetMaxPcieLinkWidth(gpu, out: *mut c_uint) { put(out, gpu.pcie_width_max) }
    fn nvmlDeviceGetPcieReplayCounter(gpu, out: *mut c_uint) { put(out, gpu.pcie_replays) }
}

/// Megahertz, an H100's.
fn max_clock(clock: c_uint) -> Result<c_uint, Code> {
    match clock {
        CLOCK_GRAPHICS | CLOCK_SM => Ok(1980),
        CLOCK_MEMORY => Ok(2619),
        CLOCK_VIDEO => Ok(1545),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}
