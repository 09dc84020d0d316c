//! How one GPU is asked: every call is posted, every answer judged by the table.

use super::calls::Calls;
use super::fault::{Fault, Meaning};
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;
use std::collections::BTreeSet;

/// One look at one GPU.
#[derive(Debug)]
pub(super) struct Query<'a> {
    pub(super) nvml: &'static Nvml,
    pub(super) device: &'a Device<'static>,
    pub(super) calls: &'a Calls,
    /// Calls that only root may make.
    pub(super) withheld: &'a mut BTreeSet<&'static str>,
}

/// A field and the scope it is asked for, such as the number of a link.
#[derive(Debug, Clone, Copy)]
pub(super) struct Field {
    pub(super) id: u32,
    pub(super) scope: u32,
}

impl Query<'_> {
    /// A reading that some GPUs or drivers do not have, which is no fault of theirs. Fails only where the
    /// answer says something about the GPU as a whole.
    pub(super) fn told<T>(
        &mut self,
        name: &'static str,
        call: impl FnOnce(&Nvml, &Device<'static>) -> Result<T, NvmlError>,
    ) -> Result<Option<T>, Fault> {
        match self.calls.post(name, || call(self.nvml, self.device)) {
            Ok(value) => Ok(Some(value)),
            Err(error) => self.untold(name, error).map(|()| None),
        }
    }

    fn untold(&mut self, name: &'static str, error: NvmlError) -> Result<(), Fault> {
        let fault = Fault::new(name, error);
        match fault.meaning {
            Meaning::Gone | Meaning::ResetRequired | Meaning::Suspect | Meaning::Blind => Err(fault),
            Meaning::Withheld => {
                self.withheld.insert(name);
                Ok(())
            }
            // The handle answered a moment ago: it is an argument that this GPU does not know.
            Meaning::Stale | Meaning::NotFound | Meaning::NoSuchCall | Meaning::NotTold => Ok(()),
        }
    }

    /// The values of `wanted`, in its order. One call for all.
    pub(super) fn fields(&mut self, wanted: &[Field]) -> Result<Vec<Option<i64>>, Fault> {
        const CALL: &str = "nvmlDeviceGetFieldValues";
        let asked = self.told(CALL, |nvml, device| {
            let call = nvml_sym(nvml.lib().nvmlDeviceGetFieldValues.as_ref())?;
            let mut values: Vec<_> = wanted.iter().map(blank).collect();
            let Ok(count) = i32::try_from(values.len()) else {
                return Err(NvmlError::InvalidArg);
            };
            // SAFETY: the handle is a live device's, and `values` holds `count` structs and outlives the call.
            nvml_try(unsafe { call(device.handle(), count, values.as_mut_ptr()) })?;
            Ok(values)
        })?;
        let Some(values) = asked else {
            return Ok(vec![None; wanted.len()]);
        };
        let judged = values.iter().map(|value| match nvml_try(value.nvmlReturn) {
            Ok(()) => Ok(number(value)),
            Err(error) => self.untold(CALL, error).map(|()| None),
        });
        judged.collect()
    }

    /// One field without a scope.
    pub(super) fn field(&mut self, id: u32) -> Result<Option<u32>, Fault> {
        let value = self.fields(&[Field { id, scope: 0 }])?.pop().flatten();
        Ok(value.and_then(|value| u32::try_from(value).ok()))
    }
}

fn blank(field: &Field) -> sys::nvmlFieldValue_t {
    sys::nvmlFieldValue_t {
        fieldId: field.id,
        scopeId: field.scope,
        timestamp: 0,
        latencyUsec: 0,
        valueType: sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
        // What a driver does not touch was not told.
        nvmlReturn: sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED,
        value: sys::nvmlValue_t { ullVal: 0 },
    }
}

/// A field's value, whatever width the driver gave it. No field that is read here is a fraction.
fn number(field: &sys::nvmlFieldValue_t) -> Option<i64> {
    let value = &field.value;
    // SAFETY: every bit pattern is a value of each of these number types, and the union was zeroed.
    unsafe {
        match field.valueType {
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT => Some(value.uiVal.into()),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG => i64::try_from(value.ulVal).ok(),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG => i64::try_from(value.ullVal).ok(),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG => Some(value.sllVal),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_INT => Some(value.siVal.into()),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_SHORT => Some(value.usVal.into()),
            _ => None,
        }
    }
}

/// A struct's version as NVML wants it: its size, and the number in the top byte.
pub(super) fn version<T>(number: u32) -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(0) | (number << 24)
}
