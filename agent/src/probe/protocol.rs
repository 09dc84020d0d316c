//! What the probe and its supervisor say to each other: one JSON object a line.

use reknit_layout::GpuId;
use serde::{Deserialize, Serialize};

/// A GPU as it was first seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuIdentity {
    pub(crate) uuid: GpuId,
    pub(crate) index: u32,
    pub(crate) pci_bus_id: String,
    pub(crate) name: String,
    pub(crate) memory_bytes: u64,
}

/// The supervisor's only line: GPUs that were seen before and must be watched even if they are gone now.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Expected {
    pub(crate) gpus: Vec<GpuIdentity>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ProbeLine {
    /// First of all, unless NVML cannot be used.
    Ready {
        driver: String,
        gpus: Vec<GpuIdentity>,
        /// Those of them that do not answer.
        silent: Vec<GpuId>,
    },
    /// Instead of `Ready`; the probe ends.
    Failed {
        reason: Failure,
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
    /// Sent steadily, also while calls hang.
    Tick {
        busy: Vec<Busy>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Failure {
    /// The library is missing or is none.
    Library,
    /// The library is there and does not work, such as without a driver.
    Driver,
}

/// What one look at a GPU found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reading {
    Answers {
        /// NVML field 230, where the driver has it.
        recovery_action: Option<u32>,
        /// Volatile count, where the GPU has ECC.
        ecc_uncorrected: Option<u64>,
        temperature: Option<u32>,
        power_mw: Option<u32>,
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

/// A call into the driver that has not returned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Busy {
    pub(crate) gpu: GpuId,
    pub(crate) ms: u64,
}
