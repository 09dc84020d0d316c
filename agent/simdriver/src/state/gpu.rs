//! One GPU's keys.

use super::StateError;
use super::values::{Architecture, Fabric, LinksDown, RecoveryAction, Throttle};
use crate::calls::{AnyCall, Call};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// One GPU. Identity first, then what it reads, then what is wrong with it. A key that the file leaves
/// out reads as on a healthy GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gpu {
    pub uuid: String,
    /// `domain:bus:device.function`, hexadecimal.
    pub pci_bus_id: String,
    pub name: String,
    pub architecture: Architecture,
    pub memory_bytes: u64,
    pub serial: String,

    /// Degrees Celsius, as are the three after it.
    pub temperature: u32,
    /// NVML field 82.
    pub memory_temperature: u32,
    pub slowdown_temperature: u32,
    pub shutdown_temperature: u32,
    /// Percent.
    pub utilization: u32,
    /// Milliwatts, as are the limits. Also NVML fields 185 and 186.
    pub power_mw: u32,
    /// What was asked for; `nvmlDeviceSetPowerManagementLimit` changes it.
    pub power_limit_mw: u32,
    /// What the GPU keeps to; none means what was asked for.
    pub power_limit_enforced_mw: Option<u32>,
    pub power_limit_default_mw: u32,
    pub power_limit_min_mw: u32,
    pub power_limit_max_mw: u32,
    pub throttle: Throttle,

    pub ecc_mode: bool,
    /// Counts since the driver was loaded; the aggregate counters say the same.
    pub ecc_corrected: u64,
    pub ecc_uncorrected: u64,
    /// `nvmlDeviceGetSramEccErrorStatus` says that its threshold was exceeded.
    pub ecc_sram_threshold: bool,
    /// `nvmlDeviceGetUnrepairableMemoryFlag_v1`
    pub memory_unrepairable: bool,
    /// Rows: NVML fields 144, 145, 142 and 143.
    pub remap_pending: bool,
    pub remap_failure: bool,
    pub remapped_correctable: u32,
    pub remapped_uncorrectable: u32,
    /// Pages. All three left alone, the GPU does not retire pages, as from Ampere on.
    pub retired_single: Option<u32>,
    pub retired_double: Option<u32>,
    pub retired_pending: Option<bool>,

    /// How many NVLinks the GPU has.
    pub nvlinks: u32,
    pub nvlink_version: u32,
    pub nvlink_down: LinksDown,
    /// The counters and the bit error rate are link 0's; the other links count nothing.
    pub nvlink_replays: u64,
    pub nvlink_recoveries: u64,
    pub nvlink_crc_errors: u64,
    pub nvlink_recovery_failures: u64,
    /// Effective bit errors per bit, NVML field 220.
    pub nvlink_ber: f64,
    /// None where there is no fabric.
    pub fabric: Option<Fabric>,

    pub pcie_replays: u32,
    pub pcie_gen: u32,
    pub pcie_gen_max: u32,
    pub pcie_width: u32,
    pub pcie_width_max: u32,

    /// NVML field 230.
    pub recovery_action: RecoveryAction,
    /// Fallen off the bus: every call answers `GPU_IS_LOST` (15).
    pub lost: bool,
    /// Every call answers `RESET_REQUIRED` (16).
    pub reset_required: bool,
    /// Missing from enumeration; the indices of the GPUs after it shift.
    pub absent: bool,
    /// Calls on this GPU do not return while this is true.
    pub hang: bool,
    /// Handles from before a change of this number answer `INVALID_ARGUMENT` (2), as after a reset.
    pub generation: u32,
    /// NVML return codes that calls answer with, by the call's name; `*` is every call on this GPU.
    pub errors: BTreeMap<AnyCall, u32>,
    /// How long calls take, in milliseconds, by the call's name; `*` is every call on this GPU.
    pub delays_ms: BTreeMap<AnyCall, u64>,
    /// Calls that do not return while they are listed.
    pub hangs: BTreeSet<Call>,
}

impl Default for Gpu {
    fn default() -> Self {
        Self {
            uuid: String::new(),
            pci_bus_id: String::new(),
            name: "Simulated H100".to_owned(),
            architecture: Architecture::Hopper,
            memory_bytes: 80 << 30,
            serial: "1320000000000".to_owned(),
            temperature: 40,
            memory_temperature: 45,
            slowdown_temperature: 90,
            shutdown_temperature: 95,
            utilization: 0,
            power_mw: 120_000,
            power_limit_mw: 700_000,
            power_limit_enforced_mw: None,
            power_limit_default_mw: 700_000,
            power_limit_min_mw: 200_000,
            power_limit_max_mw: 700_000,
            throttle: Throttle(0),
            ecc_mode: true,
            ecc_corrected: 0,
            ecc_uncorrected: 0,
            ecc_sram_threshold: false,
            memory_unrepairable: false,
            remap_pending: false,
            remap_failure: false,
            remapped_correctable: 0,
            remapped_uncorrectable: 0,
            retired_single: None,
            retired_double: None,
            retired_pending: None,
            nvlinks: 18,
            nvlink_version: 4,
            nvlink_down: LinksDown::All(false),
            nvlink_replays: 0,
            nvlink_recoveries: 0,
            nvlink_crc_errors: 0,
            nvlink_recovery_failures: 0,
            nvlink_ber: 0.0,
            fabric: None,
            pcie_replays: 0,
            pcie_gen: 5,
            pcie_gen_max: 5,
            pcie_width: 16,
            pcie_width_max: 16,
            recovery_action: RecoveryAction::None,
            lost: false,
            reset_required: false,
            absent: false,
            hang: false,
            generation: 0,
            errors: BTreeMap::new(),
            delays_ms: BTreeMap::new(),
            hangs: BTreeSet::new(),
        }
    }
}

impl Gpu {
    pub(super) fn healthy(node: &str, index: usize) -> Self {
        Self {
            uuid: uuid(node, index),
            pci_bus_id: format!("00000000:{:02X}:00.0", index + 1),
            serial: format!("132{index:010}"),
            ..Self::default()
        }
    }

    /// Single-bit, double-bit and pending, where the GPU retires pages.
    pub(crate) fn retired(&self) -> Option<(u32, u32, bool)> {
        let Self { retired_single: single, retired_double: double, retired_pending: pending, .. } = *self;
        (single.is_some() || double.is_some() || pending.is_some())
            .then(|| (single.unwrap_or_default(), double.unwrap_or_default(), pending.unwrap_or_default()))
    }

    /// Milliwatts that the GPU keeps to.
    pub(crate) fn enforced_limit(&self) -> u32 {
        self.power_limit_enforced_mw.unwrap_or(self.power_limit_mw)
    }

    /// Domain, bus and device of the PCI address.
    pub(crate) fn bus_numbers(&self) -> Result<BusNumbers, StateError> {
        BusNumbers::parse(&self.pci_bus_id).ok_or_else(|| StateError::BadAddress {
            gpu: self.uuid.clone(),
            pci_bus_id: self.pci_bus_id.clone(),
        })
    }
}

/// A PCI address without its function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BusNumbers {
    pub(crate) domain: u32,
    pub(crate) bus: u32,
    pub(crate) device: u32,
}

impl BusNumbers {
    /// Reads `domain:bus:device.function`, however many zeros it is written with.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split([':', '.']);
        let mut number = || u32::from_str_radix(parts.next()?, 16).ok();
        Some(Self { domain: number()?, bus: number()?, device: number()? })
    }
}

/// FNV-1a over the node's name and the index, written as a UUID.
fn uuid(node: &str, index: usize) -> String {
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for byte in format!("{node}/{index}").bytes() {
        hash = (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    }
    let hex = format!("{hash:032x}");
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
