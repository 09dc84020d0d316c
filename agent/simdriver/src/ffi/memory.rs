//! Memory and what is wrong with it: ECC counts, remapped rows, retired pages. And who uses it: nobody.

use super::{device_calls, given, put, put_versioned};
use crate::abi::{
    Bar1Memory, Code, ECC_AGGREGATE, ERROR_UNCORRECTED, LOCATION_DRAM, LOCATION_SRAM, MEMORY_V2, Memory,
    MemoryV2, REPAIR_STATUS_V1, RETIRED_DOUBLE, RETIRED_SINGLE, RemappedRowsV2, RepairStatusV1,
    RowRemapperHistogram, SRAM_ERROR_STATUS_V1, SramErrorStatusV1, UnrepairableMemoryV1,
};
use crate::state::Gpu;
use std::ffi::{c_uint, c_ulonglong, c_void};

/// Banks of rows that the remapper of an H100 looks after.
const REMAPPER_BANKS: c_uint = 2560;
/// A page, which is what is retired at once.
const PAGE: u64 = 64 << 10;

device_calls! {
    fn nvmlDeviceGetMemoryInfo(gpu, out: *mut Memory) {
        put(out, Memory { total: gpu.memory_bytes, free: gpu.memory_bytes, used: 0 })
    }
    fn nvmlDeviceGetMemoryInfo_v2(gpu, out: *mut MemoryV2) {
        let total = gpu.memory_bytes;
        let value = MemoryV2 { version: MEMORY_V2, total, reserved: 0, free: total, used: 0 };
        put_versioned(out, MEMORY_V2, value)
    }
    fn nvmlDeviceGetBAR1MemoryInfo(gpu, out: *mut Bar1Memory) {
        let total = gpu.memory_bytes.next_power_of_two();
        put(out, Bar1Memory { total, free: total, used: 0 })
    }

    fn nvmlDeviceGetEccMode(gpu, current: *mut c_uint, pending: *mut c_uint) {
        put(current, gpu.ecc_mode.into()).and(put(pending, gpu.ecc_mode.into()))
    }
    fn nvmlDeviceGetDefaultEccMode(_gpu, out: *mut c_uint) { put(out, 1) }
    fn nvmlDeviceGetTotalEccErrors(gpu, kind: c_uint, counter: c_uint, out: *mut c_ulonglong) {
        put(out, ecc_errors(&gpu, kind, counter)?)
    }
    fn nvmlDeviceGetMemoryErrorCounter(
        gpu, kind: c_uint, counter: c_uint, location: c_uint, out: *mut c_ulonglong
    ) {
        let all = ecc_errors(&gpu, kind, counter)?;
        match location {
            LOCATION_DRAM => put(out, all),
            LOCATION_SRAM => put(out, 0),
            _ => Err(Code::NOT_SUPPORTED),
        }
    }
    fn nvmlDeviceGetSramEccErrorStatus(gpu, out: *mut SramErrorStatusV1) {
        let value = SramErrorStatusV1 {
            version: SRAM_ERROR_STATUS_V1,
            aggregate_uncorrected_parity: 0,
            aggregate_uncorrected_ecc: 0,
            aggregate_corrected: 0,
            volatile_uncorrected_parity: 0,
            volatile_uncorrected_ecc: 0,
            volatile_corrected: 0,
            bucket_l2: 0,
            bucket_sm: 0,
            bucket_pcie: 0,
            bucket_mcu: 0,
            bucket_other: 0,
            threshold_exceeded: gpu.ecc_sram_threshold.into(),
        };
        put_versioned(out, SRAM_ERROR_STATUS_V1, value)
    }
    fn nvmlDeviceGetUnrepairableMemoryFlag_v1(gpu, out: *mut UnrepairableMemoryV1) {
        put(out, UnrepairableMemoryV1 { unrepairable: gpu.memory_unrepairable.into() })
    }
    fn nvmlDeviceGetRepairStatus(_gpu, out: *mut RepairStatusV1) {
        let value = RepairStatusV1 { version: REPAIR_STATUS_V1, channel_pending: 0, tpc_pending: 0 };
        put_versioned(out, REPAIR_STATUS_V1, value)
    }

    fn nvmlDeviceGetRemappedRows(
        gpu, correctable: *mut c_uint, uncorrectable: *mut c_uint, pending: *mut c_uint, failure: *mut c_uint
    ) {
        put(correctable, gpu.remapped_correctable)?;
        put(uncorrectable, gpu.remapped_uncorrectable)?;
        put(pending, gpu.remap_pending.into())?;
        put(failure, gpu.remap_failure.into())
    }
    fn nvmlDeviceGetRemappedRows_v2(gpu, out: *mut RemappedRowsV2) {
        put(out, RemappedRowsV2 {
            correctable_active: gpu.remapped_correctable,
            correctable_inactive: 0,
            uncorrectable_active: gpu.remapped_uncorrectable,
            uncorrectable_inactive: 0,
            pending: gpu.remap_pending.into(),
            failure: gpu.remap_failure.into(),
        })
    }
    fn nvmlDeviceGetRowRemapperHistogram(gpu, out: *mut RowRemapperHistogram) {
        // A remapping fails where a bank has no spare row left.
        let none = gpu.remap_failure.into();
        put(out, RowRemapperHistogram { max: REMAPPER_BANKS - none, high: 0, partial: 0, low: 0, none })
    }

    fn nvmlDeviceGetRetiredPages(gpu, cause: c_uint, count: *mut c_uint, addresses: *mut c_ulonglong) {
        put_retired_pages(&gpu, cause, count, addresses, std::ptr::null_mut())
    }
    fn nvmlDeviceGetRetiredPages_v2(
        gpu, cause: c_uint, count: *mut c_uint, addresses: *mut c_ulonglong, times: *mut c_ulonglong
    ) {
        put_retired_pages(&gpu, cause, count, addresses, times)
    }
    fn nvmlDeviceGetRetiredPagesPendingStatus(gpu, out: *mut c_uint) {
        let (_, _, pending) = gpu.retired().ok_or(Code::NOT_SUPPORTED)?;
        put(out, pending.into())
    }

    fn nvmlDeviceGetComputeRunningProcesses(_gpu, count: *mut c_uint, _processes: *mut c_void) { put(count, 0) }
    fn nvmlDeviceGetComputeRunningProcesses_v2(_gpu, count: *mut c_uint, _processes: *mut c_void) { put(count, 0) }
    fn nvmlDeviceGetComputeRunningProcesses_v3(_gpu, count: *mut c_uint, _processes: *mut c_void) { put(count, 0) }
    fn nvmlDeviceGetGraphicsRunningProcesses(_gpu, count: *mut c_uint, _processes: *mut c_void) { put(count, 0) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(_gpu, count: *mut c_uint, _processes: *mut c_void) { put(count, 0) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(_gpu, count: *mut c_uint, _processes: *mut c_void) { put(count, 0) }
    fn nvmlDeviceGetMPSComputeRunningProcesses(_gpu, count: *mut c_uint, _processes: *mut c_void) { put(count, 0) }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(_gpu, count: *mut c_uint, _processes: *mut c_void) { put(count, 0) }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(_gpu, count: *mut c_uint, _processes: *mut c_void) { put(count, 0) }
}

/// Volatile and aggregate counts are the same here.
fn ecc_errors(gpu: &Gpu, kind: c_uint, counter: c_uint) -> Result<u64, Code> {
    if kind > ERROR_UNCORRECTED || counter > ECC_AGGREGATE {
        Err(Code::INVALID_ARGUMENT)
    } else if !gpu.ecc_mode {
        Err(Code::NOT_SUPPORTED)
    } else if kind == ERROR_UNCORRECTED {
        Ok(gpu.ecc_uncorrected)
    } else {
        Ok(gpu.ecc_corrected)
    }
}

/// Writes how many pages were retired, and if there is room for them their addresses and, unless `times`
/// is null, when they were: pages from the memory's start, all in the first second of 1970.
fn put_retired_pages(
    gpu: &Gpu,
    cause: c_uint,
    count: *mut c_uint,
    addresses: *mut c_ulonglong,
    times: *mut c_ulonglong,
) -> Result<(), Code> {
    let (single, double, _) = gpu.retired().ok_or(Code::NOT_SUPPORTED)?;
    let pages = match cause {
        RETIRED_SINGLE => single,
        RETIRED_DOUBLE => double,
        _ => return Err(Code::INVALID_ARGUMENT),
    };
    let room = given(count)?;
    put(count, pages)?;
    if room < pages {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    for page in 0..pages as usize {
        put(addresses.wrapping_add(page), page as u64 * PAGE)?;
        if !times.is_null() {
            put(times.wrapping_add(page), 0)?;
        }
    }
    Ok(())
}
