//! The values a key can have, where a plain number or word is not enough.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// `nvmlDeviceGetArchitecture`; the numbers are the header's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Architecture {
    Volta = 5,
    Turing = 6,
    Ampere = 7,
    Ada = 8,
    Hopper = 9,
    Blackwell = 10,
}

/// What the driver wants done with the GPU: NVML field 230. Written as a name or as NVML's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecoveryAction {
    None = 0,
    Reset = 1,
    Reboot = 2,
    DrainP2p = 3,
    DrainAndReset = 4,
    RecoverImexDomain = 5,
    BusReset = 6,
    SystemReboot = 7,
}

impl RecoveryAction {
    const ALL: [(&'static str, Self); 8] = [
        ("none", Self::None),
        ("reset", Self::Reset),
        ("reboot", Self::Reboot),
        ("drain_p2p", Self::DrainP2p),
        ("drain_and_reset", Self::DrainAndReset),
        ("recover_imex_domain", Self::RecoverImexDomain),
        ("bus_reset", Self::BusReset),
        ("system_reboot", Self::SystemReboot),
    ];
}

impl<'de> Deserialize<'de> for RecoveryAction {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(from)?;
        let named = |(name, action): &(&str, Self)| {
            value.as_str() == Some(name) || value.as_u64() == Some(*action as u64)
        };
        Self::ALL.iter().find(|entry| named(entry)).map(|(_, action)| *action).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|(name, _)| *name).collect();
            D::Error::custom(format!("write 0 to 7 or one of {}", names.join(", ")))
        })
    }
}

/// Why the clocks are held down: NVML's bit mask. Written as one name or a list of names, as the mask's
/// number, or as `true` (`hw_slowdown`) and `false` (`none`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Throttle(pub u64);

/// A reason with its name here, its name in the header and its bit of `nvmlClocksEventReasons`.
pub(crate) struct Reason {
    pub(super) name: &'static str,
    pub(crate) c_name: &'static str,
    pub(crate) bits: u64,
}

const fn reason(name: &'static str, c_name: &'static str, bits: u64) -> Reason {
    Reason { name, c_name, bits }
}

pub(crate) const THROTTLES: [Reason; 10] = [
    reason("none", "nvmlClocksEventReasonNone", 0),
    reason("gpu_idle", "nvmlClocksEventReasonGpuIdle", 0x1),
    reason("applications_clocks", "nvmlClocksEventReasonApplicationsClocksSetting", 0x2),
    reason("sw_power_cap", "nvmlClocksEventReasonSwPowerCap", 0x4),
    reason("hw_slowdown", "nvmlClocksThrottleReasonHwSlowdown", 0x8),
    reason("sync_boost", "nvmlClocksEventReasonSyncBoost", 0x10),
    reason("sw_thermal", "nvmlClocksEventReasonSwThermalSlowdown", 0x20),
    reason("hw_thermal", "nvmlClocksThrottleReasonHwThermalSlowdown", 0x40),
    reason("power_brake", "nvmlClocksThrottleReasonHwPowerBrakeSlowdown", 0x80),
    reason("display_clocks", "nvmlClocksEventReasonDisplayClockSetting", 0x100),
];

impl Throttle {
    /// Every reason that has a name.
    pub const ALL: Self = Self(0x1ff);

    /// Does the hardware itself hold the clocks down?
    pub(crate) fn is_hardware(self) -> bool {
        self.0 & (0x8 | 0x40 | 0x80) != 0
    }

    fn named(value: &Value) -> Result<u64, String> {
        let found = THROTTLES.iter().find(|reason| value.as_str() == Some(reason.name));
        found.map(|reason| reason.bits).ok_or_else(|| {
            let names = THROTTLES.map(|reason| reason.name);
            format!("{value} is none of {}", names.join(", "))
        })
    }
}

impl<'de> Deserialize<'de> for Throttle {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(from)?;
        let bits = match &value {
            Value::Bool(on) => Ok(if *on { 0x8 } else { 0 }),
            Value::Array(names) => names.iter().try_fold(0, |bits, name| Ok(bits | Self::named(name)?)),
            Value::Number(mask) => mask.as_u64().ok_or_else(|| format!("{mask} is no bit mask")),
            Value::Null | Value::String(_) | Value::Object(_) => Self::named(&value),
        };
        bits.map(Self).map_err(D::Error::custom)
    }
}

impl Serialize for Throttle {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if self.0 & !Self::ALL.0 != 0 {
            return to.serialize_u64(self.0);
        }
        let set = THROTTLES.iter().filter(|reason| self.0 & reason.bits != 0);
        let names: Vec<&str> = set.map(|reason| reason.name).collect();
        match names.as_slice() {
            [] => to.serialize_str("none"),
            [one] => to.serialize_str(one),
            several => several.serialize(to),
        }
    }
}

/// Which NVLinks are down: `false` none, `true` all, a number the first so many, a list exactly those.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LinksDown {
    All(bool),
    First(u32),
    These(Vec<u32>),
}

impl LinksDown {
    /// Is `link`, counted from 0, down?
    pub fn has(&self, link: u32) -> bool {
        match self {
            Self::All(all) => *all,
            Self::First(count) => link < *count,
            Self::These(links) => links.contains(&link),
        }
    }
}

/// `nvmlDeviceGetGpuFabricInfoV`: the GPU's place in an NVLink fabric that a fabric manager runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fabric {
    pub state: FabricState,
    pub route_unhealthy: bool,
    pub bandwidth_degraded: bool,
    pub clique: u32,
}

impl Default for Fabric {
    fn default() -> Self {
        Self { state: FabricState::Completed, route_unhealthy: false, bandwidth_degraded: false, clique: 1 }
    }
}

/// The registration with the fabric manager; the numbers are the header's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FabricState {
    NotSupported = 0,
    NotStarted = 1,
    InProgress = 2,
    Completed = 3,
}
