//! NVML's data as its C header lays it out, written from NVIDIA's `nvml.h` 13.5.
//!
//! Each struct and constant stands beside its name in the header, so that [`table`] can tell a C compiler,
//! which has the header, what to compare.

use crate::state::{Architecture, EventKind, FabricState, RecoveryAction};
use std::ffi::{
    c_char, c_double, c_int, c_longlong, c_uchar, c_uint, c_ulong, c_ulonglong, c_ushort, c_void,
};
use std::mem::{offset_of, size_of};

/// `nvmlDevice_t`: opaque to the client.
pub(crate) type DeviceHandle = *mut c_void;

macro_rules! structs {
    ($($(#[$doc:meta])* $c_name:ident $name:ident { $($c_field:ident $field:ident: $type:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub(crate) struct $name {
                $(pub(crate) $field: $type,)*
            }
        )*

        fn struct_rows() -> Vec<(&'static str, u64)> {
            vec![$(
                (concat!("sizeof(", stringify!($c_name), ")"), size_of::<$name>() as u64),
                $(
                    (
                        concat!("offsetof(", stringify!($c_name), ", ", stringify!($c_field), ")"),
                        offset_of!($name, $field) as u64,
                    ),
                    (
                        concat!("sizeof(((", stringify!($c_name), " *)0)->", stringify!($c_field), ")"),
                        size_of::<$type>() as u64,
                    ),
                )*
            )*]
        }
    };
}

macro_rules! constants {
    ($type:ty, $rows:ident: $($c_name:ident $name:ident = $value:expr;)*) => {
        $(pub(crate) const $name: $type = $value;)*

        fn $rows() -> Vec<(&'static str, u64)> {
            vec![$((stringify!($c_name), u64::from($name)),)*]
        }
    };
}

/// `nvmlReturn_t`: any number, as the control file can name any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) c_uint);

macro_rules! codes {
    ($($c_name:ident $name:ident = $value:literal, $text:literal;)*) => {
        // The header's codes are all here, for their texts; this driver gives some by itself.
        #[allow(dead_code)]
        impl Code {
            $(pub(crate) const $name: Self = Self($value);)*
        }

        /// `nvmlErrorString`
        pub(crate) fn error_text(code: c_uint) -> &'static std::ffi::CStr {
            match code {
                $($value => $text,)*
                _ => c"Unknown Error",
            }
        }

        fn code_rows() -> Vec<(&'static str, u64)> {
            vec![$((stringify!($c_name), $value),)*]
        }
    };
}

codes! {
    NVML_SUCCESS SUCCESS = 0, c"Success";
    NVML_ERROR_UNINITIALIZED UNINITIALIZED = 1, c"Uninitialized";
    NVML_ERROR_INVALID_ARGUMENT INVALID_ARGUMENT = 2, c"Invalid Argument";
    NVML_ERROR_NOT_SUPPORTED NOT_SUPPORTED = 3, c"Not Supported";
    NVML_ERROR_NO_PERMISSION NO_PERMISSION = 4, c"Insufficient Permissions";
    NVML_ERROR_ALREADY_INITIALIZED ALREADY_INITIALIZED = 5, c"Already Initialized";
    NVML_ERROR_NOT_FOUND NOT_FOUND = 6, c"Not Found";
    NVML_ERROR_INSUFFICIENT_SIZE INSUFFICIENT_SIZE = 7, c"Insufficient Size";
    NVML_ERROR_INSUFFICIENT_POWER INSUFFICIENT_POWER = 8, c"Insufficient External Power";
    NVML_ERROR_DRIVER_NOT_LOADED DRIVER_NOT_LOADED = 9, c"Driver Not Loaded";
    NVML_ERROR_TIMEOUT TIMEOUT = 10, c"Timeout";
    NVML_ERROR_IRQ_ISSUE IRQ_ISSUE = 11, c"Interrupt Request Issue";
    NVML_ERROR_LIBRARY_NOT_FOUND LIBRARY_NOT_FOUND = 12, c"NVML Shared Library Not Found";
    NVML_ERROR_FUNCTION_NOT_FOUND FUNCTION_NOT_FOUND = 13, c"Function Not Found";
    NVML_ERROR_CORRUPTED_INFOROM CORRUPTED_INFOROM = 14, c"Corrupted infoROM";
    NVML_ERROR_GPU_IS_LOST GPU_IS_LOST = 15, c"GPU is lost";
    NVML_ERROR_RESET_REQUIRED RESET_REQUIRED = 16, c"GPU requires reset";
    NVML_ERROR_OPERATING_SYSTEM OPERATING_SYSTEM = 17, c"GPU access blocked by the operating system";
    NVML_ERROR_LIB_RM_VERSION_MISMATCH LIB_RM_VERSION_MISMATCH = 18, c"Driver/library version mismatch";
    NVML_ERROR_IN_USE IN_USE = 19, c"In use by another client";
    NVML_ERROR_MEMORY MEMORY = 20, c"Insufficient memory";
    NVML_ERROR_NO_DATA NO_DATA = 21, c"No data";
    NVML_ERROR_VGPU_ECC_NOT_SUPPORTED VGPU_ECC_NOT_SUPPORTED = 22, c"ECC is not supported by this vGPU";
    NVML_ERROR_INSUFFICIENT_RESOURCES INSUFFICIENT_RESOURCES = 23, c"Insufficient resources";
    NVML_ERROR_FREQ_NOT_SUPPORTED FREQ_NOT_SUPPORTED = 24, c"Frequency not supported";
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH ARGUMENT_VERSION_MISMATCH = 25, c"Argument version mismatch";
    NVML_ERROR_DEPRECATED DEPRECATED = 26, c"Deprecated";
    NVML_ERROR_NOT_READY NOT_READY = 27, c"Not ready";
    NVML_ERROR_GPU_NOT_FOUND GPU_NOT_FOUND = 28, c"GPU not found";
    NVML_ERROR_INVALID_STATE INVALID_STATE = 29, c"Invalid state";
    NVML_ERROR_UNKNOWN UNKNOWN = 999, c"Unknown Error";
}

structs! {
    nvmlPciInfo_t PciInfo {
        busIdLegacy bus_id_legacy: [c_char; 16],
        domain domain: c_uint,
        bus bus: c_uint,
        device device: c_uint,
        pciDeviceId pci_device_id: c_uint,
        pciSubSystemId pci_sub_system_id: c_uint,
        busId bus_id: [c_char; 32],
    }
    nvmlMemory_t Memory {
        total total: c_ulonglong,
        free free: c_ulonglong,
        used used: c_ulonglong,
    }
    nvmlMemory_v2_t MemoryV2 {
        version version: c_uint,
        total total: c_ulonglong,
        reserved reserved: c_ulonglong,
        free free: c_ulonglong,
        used used: c_ulonglong,
    }
    nvmlBAR1Memory_t Bar1Memory {
        bar1Total total: c_ulonglong,
        bar1Free free: c_ulonglong,
        bar1Used used: c_ulonglong,
    }
    nvmlUtilization_t Utilization {
        gpu gpu: c_uint,
        memory memory: c_uint,
    }
    nvmlTemperature_v1_t TemperatureV1 {
        version version: c_uint,
        sensorType sensor: c_uint,
        temperature temperature: c_int,
    }
    nvmlPowerValue_v2_t PowerValueV2 {
        version version: c_uint,
        powerScope scope: c_uchar,
        powerValueMw milliwatts: c_uint,
    }
    nvmlEccSramErrorStatus_v1_t SramErrorStatusV1 {
        version version: c_uint,
        aggregateUncParity aggregate_uncorrected_parity: c_ulonglong,
        aggregateUncSecDed aggregate_uncorrected_ecc: c_ulonglong,
        aggregateCor aggregate_corrected: c_ulonglong,
        volatileUncParity volatile_uncorrected_parity: c_ulonglong,
        volatileUncSecDed volatile_uncorrected_ecc: c_ulonglong,
        volatileCor volatile_corrected: c_ulonglong,
        aggregateUncBucketL2 bucket_l2: c_ulonglong,
        aggregateUncBucketSm bucket_sm: c_ulonglong,
        aggregateUncBucketPcie bucket_pcie: c_ulonglong,
        aggregateUncBucketMcu bucket_mcu: c_ulonglong,
        aggregateUncBucketOther bucket_other: c_ulonglong,
        bThresholdExceeded threshold_exceeded: c_uint,
    }
    nvmlUnrepairableMemoryStatus_v1_t UnrepairableMemoryV1 {
        bUnrepairableMemory unrepairable: c_uint,
    }
    nvmlRepairStatus_v1_t RepairStatusV1 {
        version version: c_uint,
        bChannelRepairPending channel_pending: c_uint,
        bTpcRepairPending tpc_pending: c_uint,
    }
    nvmlRemappedRowsInfo_v2_t RemappedRowsV2 {
        corrActiveRemaps correctable_active: c_uint,
        corrInactiveRemaps correctable_inactive: c_uint,
        uncActiveRemaps uncorrectable_active: c_uint,
        uncInactiveRemaps uncorrectable_inactive: c_uint,
        bPending pending: c_uint,
        bFailureOccurred failure: c_uint,
    }
    nvmlRowRemapperHistogramValues_t RowRemapperHistogram {
        max max: c_uint,
        high high: c_uint,
        partial partial: c_uint,
        low low: c_uint,
        none none: c_uint,
    }
    nvmlGpuFabricInfo_t FabricInfo {
        clusterUuid cluster: [c_uchar; 16],
        status status: c_uint,
        cliqueId clique: c_uint,
        state state: c_uchar,
    }
    nvmlGpuFabricInfo_v2_t FabricInfoV2 {
        version version: c_uint,
        clusterUuid cluster: [c_uchar; 16],
        status status: c_uint,
        cliqueId clique: c_uint,
        state state: c_uchar,
        healthMask health: c_uint,
    }
    nvmlGpuFabricInfo_v3_t FabricInfoV3 {
        version version: c_uint,
        clusterUuid cluster: [c_uchar; 16],
        status status: c_uint,
        cliqueId clique: c_uint,
        state state: c_uchar,
        healthMask health: c_uint,
        healthSummary summary: c_uchar,
    }
    nvmlFieldValue_t FieldValue {
        fieldId field: c_uint,
        scopeId scope: c_uint,
        timestamp timestamp: c_longlong,
        latencyUsec latency_usec: c_longlong,
        valueType value_type: c_uint,
        nvmlReturn code: c_uint,
        value value: Value,
    }
    nvmlEventData_t EventData {
        device device: DeviceHandle,
        eventType event_type: c_ulonglong,
        eventData event_data: c_ulonglong,
        gpuInstanceId gpu_instance: c_uint,
        computeInstanceId compute_instance: c_uint,
    }
}

/// `nvmlValue_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union Value {
    pub(crate) double: c_double,
    pub(crate) signed_int: c_int,
    pub(crate) unsigned_int: c_uint,
    pub(crate) unsigned_long: c_ulong,
    pub(crate) unsigned_long_long: c_ulonglong,
    pub(crate) signed_long_long: c_longlong,
    pub(crate) unsigned_short: c_ushort,
}

/// `NVML_STRUCT_VERSION`: a struct's size and its version.
const fn version_of<T>(version: c_uint) -> c_uint {
    size_of::<T>() as c_uint | version << 24
}

constants! { c_uint, constant_rows:
    nvmlMemory_v2 MEMORY_V2 = version_of::<MemoryV2>(2);
    nvmlTemperature_v1 TEMPERATURE_V1 = version_of::<TemperatureV1>(1);
    nvmlPowerValue_v2 POWER_VALUE_V2 = version_of::<PowerValueV2>(2);
    nvmlEccSramErrorStatus_v1 SRAM_ERROR_STATUS_V1 = version_of::<SramErrorStatusV1>(1);
    nvmlRepairStatus_v1 REPAIR_STATUS_V1 = version_of::<RepairStatusV1>(1);
    nvmlGpuFabricInfo_v2 FABRIC_INFO_V2 = version_of::<FabricInfoV2>(2);
    nvmlGpuFabricInfo_v3 FABRIC_INFO_V3 = version_of::<FabricInfoV3>(3);
    NVML_TEMPERATURE_GPU TEMPERATURE_GPU = 0;
    NVML_TEMPERATURE_THRESHOLD_SHUTDOWN THRESHOLD_SHUTDOWN = 0;
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN THRESHOLD_SLOWDOWN = 1;
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED ERROR_UNCORRECTED = 1;
    NVML_AGGREGATE_ECC ECC_AGGREGATE = 1;
    NVML_MEMORY_LOCATION_DRAM LOCATION_DRAM = 2;
    NVML_MEMORY_LOCATION_SRAM LOCATION_SRAM = 7;
    NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS RETIRED_SINGLE = 0;
    NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR RETIRED_DOUBLE = 1;
    NVML_NVLINK_ERROR_DL_REPLAY NVLINK_REPLAY = 0;
    NVML_NVLINK_ERROR_DL_RECOVERY NVLINK_RECOVERY = 1;
    NVML_NVLINK_ERROR_DL_CRC_FLIT NVLINK_CRC_FLIT = 2;
    NVML_NVLINK_ERROR_DL_CRC_DATA NVLINK_CRC_DATA = 3;
    NVML_NVLINK_CAP_P2P_SUPPORTED NVLINK_CAP_P2P = 0;
    NVML_NVLINK_CAP_P2P_ATOMICS NVLINK_CAP_ATOMICS = 2;
    NVML_NVLINK_CAP_VALID NVLINK_CAP_VALID = 5;
    NVML_NVLINK_CAP_COUNT NVLINK_CAP_COUNT = 6;
    NVML_NVLINK_STATE_ACTIVE NVLINK_ACTIVE = 1;
    NVML_NVLINK_VERSION_1_0 NVLINK_1 = 1;
    NVML_NVLINK_VERSION_2_0 NVLINK_2 = 2;
    NVML_NVLINK_VERSION_3_0 NVLINK_3 = 4;
    NVML_NVLINK_VERSION_4_0 NVLINK_4 = 6;
    NVML_NVLINK_VERSION_5_0 NVLINK_5 = 7;
    NVML_NVLINK_BER_MANTISSA_SHIFT BER_MANTISSA_SHIFT = 8;
    NVML_NVLINK_BER_MANTISSA_WIDTH BER_MANTISSA_MASK = 0xf;
    NVML_NVLINK_BER_EXP_WIDTH BER_EXPONENT_MASK = 0xff;
    NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE HEALTH_TRUE = 1;
    NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_FALSE HEALTH_FALSE = 2;
    NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW HEALTH_DEGRADED_SHIFT = 0;
    NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY HEALTH_ROUTE_SHIFT = 4;
    NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY SUMMARY_HEALTHY = 1;
    NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY SUMMARY_UNHEALTHY = 2;
    NVML_GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY SUMMARY_LIMITED = 3;
    NVML_CLOCK_GRAPHICS CLOCK_GRAPHICS = 0;
    NVML_CLOCK_SM CLOCK_SM = 1;
    NVML_CLOCK_MEM CLOCK_MEMORY = 2;
    NVML_CLOCK_VIDEO CLOCK_VIDEO = 3;
    NVML_BRAND_NVIDIA BRAND = 14;
    NVML_POWER_SCOPE_GPU POWER_SCOPE_GPU = 0;
    NVML_VALUE_TYPE_UNSIGNED_INT VALUE_UNSIGNED_INT = 1;
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG VALUE_UNSIGNED_LONG_LONG = 3;
    NVML_FI_DEV_ECC_CURRENT FIELD_ECC_CURRENT = 1;
    NVML_FI_DEV_ECC_PENDING FIELD_ECC_PENDING = 2;
    NVML_FI_DEV_ECC_SBE_VOL_TOTAL FIELD_ECC_CORRECTED = 3;
    NVML_FI_DEV_ECC_DBE_VOL_TOTAL FIELD_ECC_UNCORRECTED = 4;
    NVML_FI_DEV_ECC_SBE_AGG_TOTAL FIELD_ECC_CORRECTED_AGGREGATE = 5;
    NVML_FI_DEV_ECC_DBE_AGG_TOTAL FIELD_ECC_UNCORRECTED_AGGREGATE = 6;
    NVML_FI_DEV_RETIRED_SBE FIELD_RETIRED_SINGLE = 29;
    NVML_FI_DEV_RETIRED_DBE FIELD_RETIRED_DOUBLE = 30;
    NVML_FI_DEV_RETIRED_PENDING FIELD_RETIRED_PENDING = 31;
    NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL FIELD_NVLINK_CRC_FLIT_TOTAL = 38;
    NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL FIELD_NVLINK_REPLAY_TOTAL = 52;
    NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL FIELD_NVLINK_RECOVERY_TOTAL = 59;
    NVML_FI_DEV_MEMORY_TEMP FIELD_MEMORY_TEMPERATURE = 82;
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON FIELD_NVLINK_SPEED_COMMON = 90;
    NVML_FI_DEV_NVLINK_LINK_COUNT FIELD_NVLINK_COUNT = 91;
    NVML_FI_DEV_PCIE_REPLAY_COUNTER FIELD_PCIE_REPLAYS = 94;
    NVML_FI_DEV_REMAPPED_COR FIELD_REMAPPED_CORRECTABLE = 142;
    NVML_FI_DEV_REMAPPED_UNC FIELD_REMAPPED_UNCORRECTABLE = 143;
    NVML_FI_DEV_REMAPPED_PENDING FIELD_REMAP_PENDING = 144;
    NVML_FI_DEV_REMAPPED_FAILURE FIELD_REMAP_FAILURE = 145;
    NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY FIELD_NVLINK_REPLAYS = 161;
    NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY FIELD_NVLINK_RECOVERIES = 162;
    NVML_FI_DEV_NVLINK_ERROR_DL_CRC FIELD_NVLINK_CRC = 163;
    NVML_FI_DEV_NVLINK_GET_SPEED FIELD_NVLINK_SPEED = 164;
    NVML_FI_DEV_NVLINK_GET_STATE FIELD_NVLINK_STATE = 165;
    NVML_FI_DEV_NVLINK_GET_VERSION FIELD_NVLINK_VERSION = 166;
    NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS FIELD_PCIE_CORRECTABLE = 173;
    NVML_FI_DEV_PCIE_COUNT_NAKS_RECEIVED FIELD_PCIE_NAKS_RECEIVED = 174;
    NVML_FI_DEV_PCIE_COUNT_RECEIVER_ERROR FIELD_PCIE_RECEIVER_ERROR = 175;
    NVML_FI_DEV_PCIE_COUNT_LANE_ERROR FIELD_PCIE_LANE_ERROR = 183;
    NVML_FI_DEV_POWER_AVERAGE FIELD_POWER_AVERAGE = 185;
    NVML_FI_DEV_POWER_INSTANT FIELD_POWER_INSTANT = 186;
    NVML_FI_DEV_POWER_MIN_LIMIT FIELD_POWER_MIN_LIMIT = 187;
    NVML_FI_DEV_POWER_MAX_LIMIT FIELD_POWER_MAX_LIMIT = 188;
    NVML_FI_DEV_POWER_DEFAULT_LIMIT FIELD_POWER_DEFAULT_LIMIT = 189;
    NVML_FI_DEV_POWER_CURRENT_LIMIT FIELD_POWER_CURRENT_LIMIT = 190;
    NVML_FI_DEV_POWER_REQUESTED_LIMIT FIELD_POWER_REQUESTED_LIMIT = 192;
    NVML_FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS FIELD_NVLINK_MALFORMED = 206;
    NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS FIELD_NVLINK_RECEIVE_ERRORS = 208;
    NVML_FI_DEV_NVLINK_COUNT_XMIT_DISCARDS FIELD_NVLINK_DISCARDS = 212;
    NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS FIELD_NVLINK_RECOVERED = 213;
    NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS FIELD_NVLINK_RECOVERY_FAILED = 214;
    NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS FIELD_NVLINK_RECOVERY_EVENTS = 215;
    NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS FIELD_NVLINK_EFFECTIVE_ERRORS = 219;
    NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER FIELD_NVLINK_EFFECTIVE_BER = 220;
    NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS FIELD_NVLINK_SYMBOL_ERRORS = 221;
    NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER FIELD_NVLINK_SYMBOL_BER = 222;
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION FIELD_RECOVERY_ACTION = 230;
    NVML_FI_DEV_NVLINK_COUNT_FEC_HISTORY_0 FIELD_NVLINK_FEC_FIRST = 235;
    NVML_FI_DEV_NVLINK_COUNT_FEC_HISTORY_15 FIELD_NVLINK_FEC_LAST = 250;
}

/// The numbers that the control file's names stand for.
fn name_rows() -> Vec<(&'static str, u64)> {
    let mut rows = vec![
        ("NVML_DEVICE_ARCH_VOLTA", Architecture::Volta as u64),
        ("NVML_DEVICE_ARCH_TURING", Architecture::Turing as u64),
        ("NVML_DEVICE_ARCH_AMPERE", Architecture::Ampere as u64),
        ("NVML_DEVICE_ARCH_ADA", Architecture::Ada as u64),
        ("NVML_DEVICE_ARCH_HOPPER", Architecture::Hopper as u64),
        ("NVML_DEVICE_ARCH_BLACKWELL", Architecture::Blackwell as u64),
        ("NVML_GPU_RECOVERY_ACTION_NONE", RecoveryAction::None as u64),
        ("NVML_GPU_RECOVERY_ACTION_GPU_RESET", RecoveryAction::Reset as u64),
        ("NVML_GPU_RECOVERY_ACTION_NODE_REBOOT", RecoveryAction::Reboot as u64),
        ("NVML_GPU_RECOVERY_ACTION_DRAIN_P2P", RecoveryAction::DrainP2p as u64),
        ("NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET", RecoveryAction::DrainAndReset as u64),
        ("NVML_GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN", RecoveryAction::RecoverImexDomain as u64),
        ("NVML_GPU_RECOVERY_ACTION_BUS_RESET", RecoveryAction::BusReset as u64),
        ("NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT", RecoveryAction::SystemReboot as u64),
        ("NVML_GPU_FABRIC_STATE_NOT_SUPPORTED", FabricState::NotSupported as u64),
        ("NVML_GPU_FABRIC_STATE_NOT_STARTED", FabricState::NotStarted as u64),
        ("NVML_GPU_FABRIC_STATE_IN_PROGRESS", FabricState::InProgress as u64),
        ("NVML_GPU_FABRIC_STATE_COMPLETED", FabricState::Completed as u64),
        ("nvmlEventTypeSingleBitEccError", EventKind::SingleBitEcc.bit()),
        ("nvmlEventTypeDoubleBitEccError", EventKind::DoubleBitEcc.bit()),
        ("nvmlEventTypeXidCriticalError", EventKind::Xid.bit()),
        ("nvmlEventTypeGpuRecoveryAction", EventKind::RecoveryAction.bit()),
        ("sizeof(nvmlValue_t)", size_of::<Value>() as u64),
    ];
    rows.extend(crate::state::THROTTLES.iter().map(|throttle| (throttle.c_name, throttle.bits)));
    rows
}

/// What this driver takes the header to say: C expressions and their values.
#[doc(hidden)]
pub fn table() -> Vec<(&'static str, u64)> {
    [struct_rows(), constant_rows(), code_rows(), name_rows()].concat()
}
