//! Memory errors: ECC counts, remapped rows, retired pages.

use super::super::protocol::{FastSet, SlowSet};
use super::fault::Fault;
use super::query::{Query, version};
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try, nvml_try_count};
use nvml_wrapper_sys::bindings as sys;
use std::ffi::c_uint;

pub(super) fn fast(query: &mut Query<'_>, set: &mut FastSet) -> Result<(), Fault> {
    const CALL: &str = "nvmlDeviceGetTotalEccErrors";
    let volatile = EccCounter::Volatile;
    set.ecc_uncorrected =
        query.told(CALL, |_, device| device.total_ecc_errors(MemoryError::Uncorrected, volatile))?;
    set.ecc_corrected =
        query.told(CALL, |_, device| device.total_ecc_errors(MemoryError::Corrected, volatile))?;
    Ok(())
}

pub(super) fn slow(query: &mut Query<'_>, set: &mut SlowSet) -> Result<(), Fault> {
    set.ecc_sram_threshold = sram_threshold(query)?;
    set.memory_unrepairable = memory_unrepairable(query)?;
    if let Some(rows) = remapped_rows(query)? {
        set.remap_pending = Some(rows.pending != 0);
        set.remap_failure = Some(rows.failure != 0);
        set.remapped_rows = Some(rows.corrected.saturating_add(rows.uncorrected));
    }
    let single = sys::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS;
    let double = sys::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR;
    set.retired_single = retired_pages(query, single)?;
    set.retired_double = retired_pages(query, double)?;
    set.retired_pending = query
        .told("nvmlDeviceGetRetiredPagesPendingStatus", |_, device| device.are_pages_pending_retired())?;
    Ok(())
}

fn sram_threshold(query: &mut Query<'_>) -> Result<Option<bool>, Fault> {
    query.told("nvmlDeviceGetSramEccErrorStatus", |nvml, device| {
        let call = nvml_sym(nvml.lib().nvmlDeviceGetSramEccErrorStatus.as_ref())?;
        let mut status = sys::nvmlEccSramErrorStatus_t {
            version: version::<sys::nvmlEccSramErrorStatus_t>(1),
            aggregateUncParity: 0,
            aggregateUncSecDed: 0,
            aggregateCor: 0,
            volatileUncParity: 0,
            volatileUncSecDed: 0,
            volatileCor: 0,
            aggregateUncBucketL2: 0,
            aggregateUncBucketSm: 0,
            aggregateUncBucketPcie: 0,
            aggregateUncBucketMcu: 0,
            aggregateUncBucketOther: 0,
            bThresholdExceeded: 0,
        };
        // SAFETY: the handle is a live device's, and `status` says its size and outlives the call.
        nvml_try(unsafe { call(device.handle(), &raw mut status) })?;
        Ok(status.bThresholdExceeded != 0)
    })
}

/// `nvmlUnrepairableMemoryStatus_v1_t`, which the bindings do not know. In `nvml.h`, release 13.5, it is the flag alone;
/// NVIDIA's Python binding of that release has a version before it. So there is room for both.
#[repr(C)]
struct UnrepairableMemory {
    flag_or_version: c_uint,
    flag: c_uint,
}

impl UnrepairableMemory {
    /// Versioned structs begin with their size and the version from bit 24 on.
    const VERSION: c_uint = size_of::<Self>() as c_uint | 1 << 24;

    const fn is_set(&self) -> bool {
        self.flag != 0 || (self.flag_or_version != Self::VERSION && self.flag_or_version != 0)
    }
}

type GetUnrepairableMemoryFlag =
    unsafe extern "C" fn(sys::nvmlDevice_t, *mut UnrepairableMemory) -> sys::nvmlReturn_t;

fn memory_unrepairable(query: &mut Query<'_>) -> Result<Option<bool>, Fault> {
    query.told("nvmlDeviceGetUnrepairableMemoryFlag_v1", |nvml, device| {
        // SAFETY: the type is the one that `nvml.h` gives this name.
        let call = unsafe {
            nvml.lib().__library.get::<GetUnrepairableMemoryFlag>(b"nvmlDeviceGetUnrepairableMemoryFlag_v1\0")
        };
        let call = call.map_err(|_| NvmlError::FunctionNotFound)?;
        let mut status = UnrepairableMemory { flag_or_version: UnrepairableMemory::VERSION, flag: 0 };
        // SAFETY: the handle is a live device's, and `status` has room for either form and outlives the call.
        nvml_try(unsafe { call(device.handle(), &raw mut status) })?;
        Ok(status.is_set())
    })
}

struct RemappedRows {
    corrected: u32,
    uncorrected: u32,
    pending: u32,
    failure: u32,
}

fn remapped_rows(query: &mut Query<'_>) -> Result<Option<RemappedRows>, Fault> {
    query.told("nvmlDeviceGetRemappedRows", |nvml, device| {
        let call = nvml_sym(nvml.lib().nvmlDeviceGetRemappedRows.as_ref())?;
        let mut rows = RemappedRows { corrected: 0, uncorrected: 0, pending: 0, failure: 0 };
        // SAFETY: the handle is a live device's, and the four numbers outlive the call.
        nvml_try(unsafe {
            call(
                device.handle(),
                &raw mut rows.corrected,
                &raw mut rows.uncorrected,
                &raw mut rows.pending,
                &raw mut rows.failure,
            )
        })?;
        Ok(rows)
    })
}

/// How many pages were retired for `cause`. Their addresses are not asked for.
fn retired_pages(query: &mut Query<'_>, cause: sys::nvmlPageRetirementCause_t) -> Result<Option<u32>, Fault> {
    query.told("nvmlDeviceGetRetiredPages", |nvml, device| {
        let call = nvml_sym(nvml.lib().nvmlDeviceGetRetiredPages.as_ref())?;
        let (mut count, mut unused) = (0, 0);
        // SAFETY: the handle is a live device's, there is room for as many addresses as `count` says, none,
        // and both numbers outlive the call.
        nvml_try_count(unsafe { call(device.handle(), cause, &raw mut count, &raw mut unused) })?;
        Ok(count)
    })
}
