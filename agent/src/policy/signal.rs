//! What is read of a GPU again and again, as opposed to its events.

use serde::{Deserialize, Serialize};

/// One number or flag (1 or 0) that a rule compares with its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Signal {
    // The answer as a whole.
    Gone,
    ResetRequired,
    Suspect,
    Blind,
    Hung,
    // Every probe interval.
    RecoveryReset,
    RecoveryReboot,
    RecoveryDrainP2p,
    RecoveryDrainAndReset,
    RecoveryImexDomain,
    EccUncorrected,
    EccCorrectedRate,
    NvlinkDown,
    HardwareSlowdown,
    SoftwarePowerCap,
    TemperatureMargin,
    PowerUnreadable,
    // Every tenth, and after an event.
    SramThreshold,
    MemoryUnrepairable,
    RemapPending,
    RemapFailure,
    RemappedRows,
    RetiredPages,
    RetiredDoubleBit,
    NvlinkReplays,
    NvlinkCrcRate,
    NvlinkBitErrorRate,
    NvlinkRecoveryFailures,
    FabricRouteUnhealthy,
    FabricBandwidthDegraded,
    PowerLimitLowered,
    PcieReplaysGen4,
    PcieReplaysGen5,
    PcieDegraded,
}

impl Signal {
    /// The driver's own verdict, NVML field 230. Source: `nvml.h`, release 13.5; a number it does not
    /// name is taken as a call for a reboot, the strongest it knows.
    pub(crate) const fn of_recovery_action(action: u32) -> Option<Self> {
        match action {
            0 => None,
            1 | 6 => Some(Self::RecoveryReset),
            2 | 7 | 8.. => Some(Self::RecoveryReboot),
            3 => Some(Self::RecoveryDrainP2p),
            4 => Some(Self::RecoveryDrainAndReset),
            5 => Some(Self::RecoveryImexDomain),
        }
    }

    /// The GPU was away or unusable: when it answers again, or when the driver asks no more, it was reset.
    pub(crate) const fn means_reset(self) -> bool {
        match self {
            Self::Gone
            | Self::ResetRequired
            | Self::RecoveryReset
            | Self::RecoveryReboot
            | Self::RecoveryDrainAndReset => true,
            Self::Suspect
            | Self::Blind
            | Self::Hung
            | Self::RecoveryDrainP2p
            | Self::RecoveryImexDomain
            | Self::EccUncorrected
            | Self::EccCorrectedRate
            | Self::NvlinkDown
            | Self::HardwareSlowdown
            | Self::SoftwarePowerCap
            | Self::TemperatureMargin
            | Self::PowerUnreadable
            | Self::SramThreshold
            | Self::MemoryUnrepairable
            | Self::RemapPending
            | Self::RemapFailure
            | Self::RemappedRows
            | Self::RetiredPages
            | Self::RetiredDoubleBit
            | Self::NvlinkReplays
            | Self::NvlinkCrcRate
            | Self::NvlinkBitErrorRate
            | Self::NvlinkRecoveryFailures
            | Self::FabricRouteUnhealthy
            | Self::FabricBandwidthDegraded
            | Self::PowerLimitLowered
            | Self::PcieReplaysGen4
            | Self::PcieReplaysGen5
            | Self::PcieDegraded => false,
        }
    }

    /// What its value counts, for a rule's limit; a flag counts nothing.
    pub(crate) const fn unit(self) -> Option<&'static str> {
        match self {
            Self::Gone
            | Self::ResetRequired
            | Self::Suspect
            | Self::Blind
            | Self::RecoveryReset
            | Self::RecoveryReboot
            | Self::RecoveryDrainP2p
            | Self::RecoveryDrainAndReset
            | Self::RecoveryImexDomain
            | Self::HardwareSlowdown
            | Self::SoftwarePowerCap
            | Self::PowerUnreadable
            | Self::SramThreshold
            | Self::MemoryUnrepairable
            | Self::RemapPending
            | Self::RemapFailure
            | Self::FabricRouteUnhealthy
            | Self::FabricBandwidthDegraded
            | Self::PcieDegraded => None,
            Self::Hung => Some("seconds in one call"),
            Self::EccUncorrected
            | Self::RemappedRows
            | Self::NvlinkReplays
            | Self::NvlinkRecoveryFailures => Some("since the last read"),
            Self::EccCorrectedRate | Self::NvlinkCrcRate => Some("per second"),
            Self::NvlinkDown => Some("links that were active and are not"),
            Self::TemperatureMargin => Some("degrees below the slowdown temperature"),
            Self::RetiredPages | Self::RetiredDoubleBit => Some("pages"),
            Self::NvlinkBitErrorRate => Some("errors per bit"),
            Self::PowerLimitLowered => Some("milliwatts below the requested limit"),
            Self::PcieReplaysGen4 | Self::PcieReplaysGen5 => Some("in the last minute"),
        }
    }
}
