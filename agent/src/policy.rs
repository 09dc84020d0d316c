//! The policy: which signal means which class. The table is data, in `policy.toml`.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;

const DEFAULT: &str = include_str!("policy.toml");

/// What a GPU's signals mean together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HealthClass {
    Healthy,
    Predict,
    RankDied,
    Unknown,
    Drain,
    Fatal,
}

impl HealthClass {
    /// When several signals hold, the highest tells.
    pub(crate) const fn severity(self) -> u8 {
        match self {
            Self::Healthy => 0,
            Self::Predict => 1,
            Self::RankDied => 2,
            Self::Unknown => 3,
            Self::Drain => 4,
            Self::Fatal => 5,
        }
    }

    pub(crate) const fn shards_readable(self) -> bool {
        match self {
            Self::Fatal => false,
            Self::Healthy | Self::Predict | Self::RankDied | Self::Unknown | Self::Drain => true,
        }
    }
}

/// A row's class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RowClass {
    Fatal,
    RankDied,
    Drain,
    Predict,
    Unknown,
    Ignore,
}

impl RowClass {
    /// `None` when the signal says nothing about the GPU.
    pub(crate) const fn health(self) -> Option<HealthClass> {
        match self {
            Self::Fatal => Some(HealthClass::Fatal),
            Self::RankDied => Some(HealthClass::RankDied),
            Self::Drain => Some(HealthClass::Drain),
            Self::Predict => Some(HealthClass::Predict),
            Self::Unknown => Some(HealthClass::Unknown),
            Self::Ignore => None,
        }
    }
}

/// A state that is read again and again, as opposed to an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Signal {
    Gone,
    ResetRequired,
    Hung,
    Suspect,
    Blind,
    RecoveryReset,
    RecoveryReboot,
    RecoveryDrainP2p,
    RecoveryDrainAndReset,
}

impl Signal {
    const ALL: [Self; 9] = [
        Self::Gone,
        Self::ResetRequired,
        Self::Hung,
        Self::Suspect,
        Self::Blind,
        Self::RecoveryReset,
        Self::RecoveryReboot,
        Self::RecoveryDrainP2p,
        Self::RecoveryDrainAndReset,
    ];

    /// The driver's own verdict, NVML field 230. Source: `nvml.h`, release 13.0; a number it does not
    /// name is taken as a call for a reboot, the strongest it knows.
    pub(crate) const fn of_recovery_action(action: u32) -> Option<Self> {
        match action {
            0 => None,
            1 => Some(Self::RecoveryReset),
            2 => Some(Self::RecoveryReboot),
            3 => Some(Self::RecoveryDrainP2p),
            4 => Some(Self::RecoveryDrainAndReset),
            5.. => Some(Self::RecoveryReboot),
        }
    }
}

/// What must be seen before an event's verdict is lifted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Rejoin {
    Reads,
    Outage,
    Quiet,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct RejoinRules {
    fatal: Rejoin,
    rank_died: Rejoin,
    drain: Rejoin,
    predict: Rejoin,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConditionRow {
    pub(crate) signal: Signal,
    pub(crate) class: RowClass,
    /// Reads in a row before it is believed.
    pub(crate) reads: u32,
    pub(crate) cause: String,
    pub(crate) action: String,
    source: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EventRow {
    #[serde(default)]
    numbers: Vec<u64>,
    pub(crate) class: RowClass,
    pub(crate) cause: String,
    pub(crate) action: String,
    source: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    version: u32,
    healthy_reads: u32,
    quiet_seconds: u64,
    hung_seconds: u64,
    blind_seconds: u64,
    rejoin: RejoinRules,
    condition: Vec<ConditionRow>,
    uncorrected_ecc: EventRow,
    unknown_xid: EventRow,
    xid: Vec<EventRow>,
}

/// Why a policy is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PolicyError {
    #[error("the policy cannot be read: {0}")]
    Syntax(#[from] toml::de::Error),
    #[error("the policy's version is {0}: this agent knows version 1")]
    Version(u32),
    #[error("the policy has no row for the condition {0:?}")]
    MissingCondition(Signal),
    #[error("the policy has two rows for the condition {0:?}")]
    TwoConditions(Signal),
    #[error("the policy has two rows for XID {0}")]
    TwoXids(u64),
    #[error("the policy's {0} must be at least 1")]
    Zero(&'static str),
}

/// A checked policy.
#[derive(Debug, Clone)]
pub(crate) struct Policy {
    pub(crate) healthy_reads: u32,
    pub(crate) quiet: Duration,
    pub(crate) hung: Duration,
    pub(crate) blind: Duration,
    rejoin: RejoinRules,
    conditions: BTreeMap<Signal, ConditionRow>,
    pub(crate) uncorrected_ecc: EventRow,
    unknown_xid: EventRow,
    xids: BTreeMap<u64, EventRow>,
}

impl Policy {
    /// The policy that the agent was built with.
    pub(crate) fn built_in() -> Result<Self, PolicyError> {
        Self::parse(DEFAULT)
    }

    pub(crate) fn parse(text: &str) -> Result<Self, PolicyError> {
        let table: Table = toml::from_str(text)?;
        if table.version != 1 {
            return Err(PolicyError::Version(table.version));
        }
        if table.healthy_reads == 0 {
            return Err(PolicyError::Zero("healthy_reads"));
        }
        let mut conditions = BTreeMap::new();
        for row in table.condition {
            if row.reads == 0 {
                return Err(PolicyError::Zero("reads"));
            }
            if let Some(row) = conditions.insert(row.signal, row) {
                return Err(PolicyError::TwoConditions(row.signal));
            }
        }
        for signal in Signal::ALL {
            if !conditions.contains_key(&signal) {
                return Err(PolicyError::MissingCondition(signal));
            }
        }
        let mut xids = BTreeMap::new();
        for row in table.xid {
            for number in &row.numbers {
                if xids.insert(*number, row.clone()).is_some() {
                    return Err(PolicyError::TwoXids(*number));
                }
            }
        }
        Ok(Self {
            healthy_reads: table.healthy_reads,
            quiet: Duration::from_secs(table.quiet_seconds),
            hung: Duration::from_secs(table.hung_seconds),
            blind: Duration::from_secs(table.blind_seconds),
            rejoin: table.rejoin,
            conditions,
            uncorrected_ecc: table.uncorrected_ecc,
            unknown_xid: table.unknown_xid,
            xids,
        })
    }

    pub(crate) fn condition(&self, signal: Signal) -> &ConditionRow {
        // `parse` made sure that each signal has its row.
        &self.conditions[&signal]
    }

    pub(crate) fn xid(&self, number: u64) -> &EventRow {
        self.xids.get(&number).unwrap_or(&self.unknown_xid)
    }

    pub(crate) fn rejoin(&self, class: HealthClass) -> Rejoin {
        match class {
            HealthClass::Fatal => self.rejoin.fatal,
            HealthClass::RankDied => self.rejoin.rank_died,
            HealthClass::Drain => self.rejoin.drain,
            HealthClass::Predict => self.rejoin.predict,
            HealthClass::Unknown | HealthClass::Healthy => Rejoin::Reads,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_policy_is_whole() {
        let policy = Policy::built_in().unwrap();
        assert_eq!(policy.xid(79).class, RowClass::Fatal);
        assert_eq!(policy.xid(45).class, RowClass::Ignore);
        assert_eq!(policy.xid(94).class, RowClass::RankDied);
        assert_eq!(policy.xid(4711).class, RowClass::Predict);
        assert_eq!(policy.condition(Signal::Gone).reads, 2);
    }

    #[test]
    fn a_bad_policy_is_refused() {
        let refused = |text: String| Policy::parse(&text).unwrap_err().to_string();
        assert!(refused(DEFAULT.replace("version = 1", "version = 2")).contains("version is 2"));
        assert!(refused(format!("{DEFAULT}\ncolour = 1\n")).contains("colour"));
        assert!(refused(DEFAULT.replace("[167]", "[79]")).contains("two rows for XID 79"));
        assert!(refused(DEFAULT.replace("\"hung\"", "\"gone\"")).contains("two rows"));
        assert!(refused(DEFAULT.replace("\"ignore\"", "\"maybe\"")).contains("maybe"));
    }
}
