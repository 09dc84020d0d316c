//! NVLink and its fabric.

use super::{device_calls, given, put};
use crate::abi::{
    Code, FABRIC_INFO_V2, FABRIC_INFO_V3, FabricInfo, FabricInfoV2, FabricInfoV3, HEALTH_DEGRADED_SHIFT,
    HEALTH_FALSE, HEALTH_ROUTE_SHIFT, HEALTH_TRUE, NVLINK_1, NVLINK_2, NVLINK_3, NVLINK_4, NVLINK_5,
    NVLINK_CAP_ATOMICS, NVLINK_CAP_COUNT, NVLINK_CAP_P2P, NVLINK_CAP_VALID, NVLINK_CRC_DATA, NVLINK_CRC_FLIT,
    NVLINK_RECOVERY, NVLINK_REPLAY, SUMMARY_HEALTHY, SUMMARY_LIMITED, SUMMARY_UNHEALTHY,
};
use crate::state::{Fabric, FabricState, Gpu};
use std::ffi::{c_uchar, c_uint, c_ulonglong, c_void};

/// From this NVLink on the counters of a link's data layer are no more.
const NO_DATA_LAYER_COUNTERS: u32 = 5;

device_calls! {
    fn nvmlDeviceGetNvLinkState(gpu, link: c_uint, out: *mut c_uint) { put(out, is_up(&gpu, link)?.into()) }
    fn nvmlDeviceGetNvLinkVersion(gpu, link: c_uint, out: *mut c_uint) {
        existing(&gpu, link)?;
        put(out, version(&gpu))
    }
    fn nvmlDeviceGetNvLinkCapability(gpu, link: c_uint, capability: c_uint, out: *mut c_uint) {
        existing(&gpu, link)?;
        match capability {
            NVLINK_CAP_P2P | NVLINK_CAP_ATOMICS | NVLINK_CAP_VALID => put(out, 1),
            0..NVLINK_CAP_COUNT => put(out, 0),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }
    fn nvmlDeviceGetNvLinkErrorCounter(gpu, link: c_uint, counter: c_uint, out: *mut c_ulonglong) {
        put(out, data_layer_errors(&gpu, link, counter)?)
    }
    fn nvmlDeviceGetGpuFabricInfo(gpu, out: *mut FabricInfo) {
        let View { cluster, status, clique, state, .. } = View::of(gpu.fabric.as_ref());
        put(out, FabricInfo { cluster, status, clique, state })
    }
    fn nvmlDeviceGetGpuFabricInfoV(gpu, out: *mut c_void) {
        let View { cluster, status, clique, state, health, summary } = View::of(gpu.fabric.as_ref());
        let version = given(out.cast::<c_uint>())?;
        match version {
            FABRIC_INFO_V2 => put(out.cast(), FabricInfoV2 { version, cluster, status, clique, state, health }),
            FABRIC_INFO_V3 => {
                put(out.cast(), FabricInfoV3 { version, cluster, status, clique, state, health, summary })
            }
            _ => Err(Code::ARGUMENT_VERSION_MISMATCH),
        }
    }
}

fn existing(gpu: &Gpu, link: c_uint) -> Result<(), Code> {
    if link < gpu.nvlinks { Ok(()) } else { Err(Code::NOT_SUPPORTED) }
}

pub(super) fn is_up(gpu: &Gpu, link: c_uint) -> Result<bool, Code> {
    existing(gpu, link)?;
    Ok(!gpu.nvlink_down.has(link))
}

/// `nvmlNvlinkVersion_t`: the header counts in-between versions too. 0 is an invalid one.
pub(super) fn version(gpu: &Gpu) -> c_uint {
    match gpu.nvlink_version {
        1 => NVLINK_1,
        2 => NVLINK_2,
        3 => NVLINK_3,
        4 => NVLINK_4,
        5 => NVLINK_5,
        _ => 0,
    }
}

/// Megabytes a second of one link.
pub(super) fn speed(gpu: &Gpu) -> c_uint {
    match gpu.nvlink_version {
        5 => 53_125,
        4 => 26_562,
        _ => 25_781,
    }
}

/// What link 0 counted; the other links count nothing.
pub(super) fn of_first(gpu: &Gpu, link: c_uint, count: u64) -> Result<u64, Code> {
    existing(gpu, link)?;
    Ok(if link == 0 { count } else { 0 })
}

/// Errors of the links before NVLink 5.
pub(super) fn data_layer_errors(gpu: &Gpu, link: c_uint, counter: c_uint) -> Result<u64, Code> {
    if gpu.nvlink_version >= NO_DATA_LAYER_COUNTERS {
        return Err(Code::NOT_SUPPORTED);
    }
    match counter {
        NVLINK_REPLAY => of_first(gpu, link, gpu.nvlink_replays),
        NVLINK_RECOVERY => of_first(gpu, link, gpu.nvlink_recoveries),
        NVLINK_CRC_FLIT => of_first(gpu, link, gpu.nvlink_crc_errors),
        NVLINK_CRC_DATA => of_first(gpu, link, 0),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

/// What the fabric's structs have in common.
struct View {
    cluster: [c_uchar; 16],
    status: c_uint,
    clique: c_uint,
    state: c_uchar,
    health: c_uint,
    summary: c_uchar,
}

impl View {
    fn of(fabric: Option<&Fabric>) -> Self {
        let Some(fabric) = fabric else {
            let state = FabricState::NotSupported as c_uchar;
            return Self { cluster: [0; 16], status: 0, clique: 0, state, health: 0, summary: 0 };
        };
        let flag = |set, shift| if set { HEALTH_TRUE << shift } else { HEALTH_FALSE << shift };
        let summary = match (fabric.route_unhealthy, fabric.bandwidth_degraded) {
            (true, _) => SUMMARY_UNHEALTHY,
            (false, true) => SUMMARY_LIMITED,
            (false, false) => SUMMARY_HEALTHY,
        };
        Self {
            cluster: *b"reknit-simulated",
            status: Code::SUCCESS.0,
            clique: fabric.clique,
            state: fabric.state as c_uchar,
            health: flag(fabric.bandwidth_degraded, HEALTH_DEGRADED_SHIFT)
                | flag(fabric.route_unhealthy, HEALTH_ROUTE_SHIFT),
            summary: summary as c_uchar,
        }
    }
}
