//! Calls that change something. Each is written to the log beside the control file, whatever its result.

use super::{answer, given};
use crate::abi::{Code, DeviceHandle, POWER_SCOPE_GPU, POWER_VALUE_V2, PowerValueV2};
use crate::driver::{self, Answering, Handle};
use crate::state::{SetterCall, State};
use std::ffi::c_uint;

/// Defines calls that set one number of a device.
macro_rules! setter_calls {
    ($(fn $name:ident($gpu:ident, $value:ident) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name(device: DeviceHandle, $value: c_uint) -> c_uint {
            let name = stringify!($name);
            logged(device, name, $value, driver::gpu(device, name).and_then(|$gpu| $body))
        }
    )*};
}

setter_calls! {
    fn nvmlDeviceSetPowerManagementLimit(gpu, milliwatts) { set_power_limit(&gpu, milliwatts) }
    fn nvmlDeviceSetPersistenceMode(_gpu, mode) { Err(Code::NOT_SUPPORTED) }
    fn nvmlDeviceSetComputeMode(_gpu, mode) { Err(Code::NOT_SUPPORTED) }
    fn nvmlDeviceSetEccMode(_gpu, mode) { Err(Code::NOT_SUPPORTED) }
    fn nvmlDeviceClearEccErrorCounts(_gpu, counter) { Err(Code::NOT_SUPPORTED) }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceSetPowerManagementLimit_v2(device: DeviceHandle, limit: *mut PowerValueV2) -> c_uint {
    let name = "nvmlDeviceSetPowerManagementLimit_v2";
    // The version first: a struct of another one may be shorter.
    match given(limit.cast::<c_uint>()) {
        Ok(POWER_VALUE_V2) => {}
        Ok(_) => return logged(device, name, 0, Err(Code::ARGUMENT_VERSION_MISMATCH)),
        Err(code) => return logged(device, name, 0, Err(code)),
    }
    let result = given(limit);
    let milliwatts = result.map_or(0, |limit| limit.milliwatts);
    let result = driver::gpu(device, name).and_then(|gpu| {
        if u32::from(result?.scope) != POWER_SCOPE_GPU {
            return Err(Code::NOT_SUPPORTED);
        }
        set_power_limit(&gpu, milliwatts)
    });
    logged(device, name, milliwatts, result)
}

fn set_power_limit(gpu: &Answering, milliwatts: u32) -> Result<(), Code> {
    if !(gpu.power_limit_min_mw..=gpu.power_limit_max_mw).contains(&milliwatts) {
        return Err(Code::INVALID_ARGUMENT);
    }
    let change = [format!("power_limit_mw={milliwatts}")];
    State::update(&driver::state_path()?, |state| state.set(gpu.place, &change)).map_err(|e| {
        eprintln!("simulated NVML driver: {e}");
        Code::UNKNOWN
    })
}

fn logged(device: DeviceHandle, call: &str, value: c_uint, result: Result<(), Code>) -> c_uint {
    let result = answer(result);
    if let (Ok(handle), Ok(path)) = (Handle::from_c(device), driver::state_path()) {
        let setter = SetterCall { call: call.to_owned(), gpu: handle.place, value, result };
        if let Err(e) = setter.append(&path) {
            eprintln!("simulated NVML driver: {e}");
        }
    }
    result
}
