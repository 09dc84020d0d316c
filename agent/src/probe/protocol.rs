//! What the probe and its supervisor say to each other over their socket: one JSON object a line.

use reknit_layout::GpuId;
use serde::{Deserialize, Serialize};

/// A GPU as it was first seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuIdentity {
    pub(crate) uuid: GpuId,
    pub(crate) index: u32,
    pub(crate) pci_bus_id: String,
    pub(crate) name: String,
    /// In lower case, such as `hopper`; `unknown` where the driver does not say.
    #[serde(default)]
    pub(crate) architecture: String,
    pub(crate) memory_bytes: u64,
}

impl GpuIdentity {
    /// A GPU that is counted and was never seen to answer: all that is known of it is its place in the count.
    pub(crate) fn unidentified(index: u32) -> Self {
        Self {
            uuid: GpuId(format!("unidentified-{index}")),
            index,
            pci_bus_id: String::new(),
            name: "unidentified".to_owned(),
            architecture: "unknown".to_owned(),
            memory_bytes: 0,
        }
    }

    pub(crate) fn is_identified(&self) -> bool {
        !self.pci_bus_id.is_empty()
    }
}

/// From the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ProbeOrder {
    /// First of all: GPUs that were seen before and must be watched even if they are gone now.
    Expect { gpus: Vec<GpuIdentity> },
    /// Read every GPU at once, both sets.
    ReadNow,
    /// Answered by `ProbeLine::PowerLimit`.
    SetPowerLimit {
        gpu: GpuId,
        /// Milliwatts, clamped to what the GPU allows; `None` is the GPU's own default.
        limit: Option<u32>,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ProbeLine {
    /// First of all, unless NVML cannot be used. Again when the list has changed; every `Gap` follows again.
    Ready {
        driver: String,
        gpus: Vec<GpuIdentity>,
        /// Those of them that do not answer.
        silent: Vec<GpuId>,
    },
    /// Instead of `Ready`; the probe ends.
    Failed {
        message: String,
    },
    Reading {
        gpu: GpuId,
        reading: Reading,
    },
    Xid {
        gpu: GpuId,
        xid: u64,
    },
    /// Something about this GPU cannot be seen, such as without root. Said once each after a `Ready`.
    Gap {
        gpu: GpuId,
        /// What and why, such as `XID events: NVML answers NoPermission`.
        what: String,
    },
    /// What a `Gap` told of is seen again.
    GapClosed {
        gpu: GpuId,
        what: String,
    },
    PowerLimit {
        gpu: GpuId,
        /// The limit that holds now, in milliwatts, or why it was not set.
        set: Result<u32, String>,
    },
    /// Sent steadily, also while calls hang.
    Tick {
        busy: Vec<Busy>,
    },
}

/// What one look at a GPU found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reading {
    Answers {
        fast: FastSet,
        /// Only in those readings that took it.
        slow: Option<Box<SlowSet>>,
        /// A handle that used to work had gone stale and a fresh one works: the GPU was reset.
        #[serde(default)]
        reset: bool,
    },
    /// Lost, or missing from enumeration.
    Gone {
        error: String,
    },
    ResetRequired,
    /// An answer that may mean anything.
    Suspect {
        error: String,
    },
    /// The driver is the trouble, not the GPU.
    Blind {
        error: String,
    },
}

impl Reading {
    /// The limit that was asked for, where it was read.
    pub(crate) fn power_limit_mw(&self) -> Option<u32> {
        match self {
            Self::Answers { slow, .. } => slow.as_ref().and_then(|slow| slow.power_limit_mw),
            Self::Gone { .. } | Self::ResetRequired | Self::Suspect { .. } | Self::Blind { .. } => None,
        }
    }

    /// It tells all that there is to tell of the GPU.
    pub(crate) fn is_whole(&self) -> bool {
        match self {
            Self::Answers { slow, .. } => slow.is_some(),
            Self::Gone { .. } | Self::ResetRequired | Self::Suspect { .. } | Self::Blind { .. } => true,
        }
    }
}

/// Read every probe interval. `None` is what this GPU or driver does not tell.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct FastSet {
    /// NVML field 230.
    pub(crate) recovery_action: Option<u32>,
    /// Volatile counts.
    pub(crate) ecc_uncorrected: Option<u64>,
    pub(crate) ecc_corrected: Option<u64>,
    /// Bit per NVLink: active.
    pub(crate) links_active: Option<u32>,
    /// NVML's bits, `nvmlClocksEventReason*`.
    pub(crate) throttle: Option<u64>,
    /// Degrees Celsius: the GPU, and where it begins to slow down.
    pub(crate) temperature: Option<u32>,
    pub(crate) slowdown_temperature: Option<u32>,
    /// Milliwatts.
    pub(crate) power_mw: Option<u32>,
    /// The GPU has a power sensor, and reading it failed.
    pub(crate) power_unreadable: bool,
    /// Percent.
    pub(crate) utilization: Option<u32>,
}

/// Read every tenth probe interval, and at once after an event.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SlowSet {
    pub(crate) ecc_sram_threshold: Option<bool>,
    pub(crate) memory_unrepairable: Option<bool>,
    pub(crate) remap_pending: Option<bool>,
    pub(crate) remap_failure: Option<bool>,
    /// Rows remapped so far, for corrected and for uncorrected errors together.
    pub(crate) remapped_rows: Option<u32>,
    /// Before Ampere: pages retired for many single-bit errors, and for a double-bit one.
    pub(crate) retired_single: Option<u32>,
    pub(crate) retired_double: Option<u32>,
    pub(crate) retired_pending: Option<bool>,
    /// Totals over the GPU's links.
    pub(crate) link_replays: Option<u64>,
    pub(crate) link_recoveries: Option<u64>,
    pub(crate) link_crc_errors: Option<u64>,
    /// NVLink 5: the worst link's effective bit error rate, and failed recoveries.
    pub(crate) link_ber: Option<f64>,
    pub(crate) link_recovery_failures: Option<u64>,
    pub(crate) fabric_route_unhealthy: Option<bool>,
    pub(crate) fabric_bandwidth_degraded: Option<bool>,
    /// Milliwatts: asked for, and in force.
    pub(crate) power_limit_mw: Option<u32>,
    pub(crate) power_limit_enforced_mw: Option<u32>,
    pub(crate) memory_temperature: Option<u32>,
    pub(crate) pcie_replays: Option<u64>,
    pub(crate) pcie_gen: Option<u32>,
    pub(crate) pcie_gen_max: Option<u32>,
    pub(crate) pcie_width: Option<u32>,
    pub(crate) pcie_width_max: Option<u32>,
}

/// A call into the driver that has not returned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Busy {
    pub(crate) gpu: GpuId,
    /// NVML's name of the call.
    pub(crate) call: String,
    pub(crate) ms: u64,
}
