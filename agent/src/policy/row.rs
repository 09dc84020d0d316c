//! The policy's rows: what a signal or an XID means, and how much of it must be seen.

use super::class::Class;
use super::signal::Signal;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::time::Duration;

/// A duration as people write it: `15s`, `250ms`, `1day`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Span(pub(crate) Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_duration(&text).map(Self).map_err(|e| {
            serde::de::Error::custom(format!(
                "`{text}` is no duration ({e}): write it as 250ms, 15s, 10m or 1day"
            ))
        })
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What must be seen before a fault's verdict is lifted. Only then does the rejoin gate open, for a GPU that
/// was taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Rejoin {
    /// Healthy reads, after the row's `settle`.
    AtOnce,
    /// The signal is gone.
    Clear,
    /// The GPU was reset, was away, or the node was booted again; then healthy reads.
    Reset,
    /// `gate.quiet` without another sign.
    Quiet,
    /// An operator says so.
    Operator,
}

impl Rejoin {
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::AtOnce => "at once, when it reads healthy",
            Self::Clear => "when the signal is gone",
            Self::Reset => "after a reset of the GPU or a reboot",
            Self::Quiet => "after a quiet while",
            Self::Operator => "when an operator restores it",
        }
    }
}

/// When a signal's value counts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Limit {
    Above(f64),
    AtLeast(f64),
    AtMost(f64),
}

impl Default for Limit {
    fn default() -> Self {
        Self::Above(0.0)
    }
}

impl Limit {
    pub(crate) fn hit(self, value: f64) -> bool {
        match self {
            Self::Above(limit) => value > limit,
            Self::AtLeast(limit) => value >= limit,
            Self::AtMost(limit) => value <= limit,
        }
    }
}

/// How much must be seen before it is believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum When {
    /// Reads in a row.
    Polls(u32),
    /// In every read for that long.
    Lasting(Span),
    /// This often within that time.
    Hits(Hits),
    /// In so many of the last windows.
    Windows(Windows),
}

impl Default for When {
    fn default() -> Self {
        Self::Polls(1)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Hits {
    pub(crate) count: u32,
    pub(crate) within: Span,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Windows {
    pub(crate) bad: u32,
    pub(crate) of: u32,
    pub(crate) length: Span,
}

/// A signal, and what it means.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rule {
    pub(crate) signal: Signal,
    #[serde(default)]
    pub(crate) limit: Limit,
    #[serde(default)]
    pub(crate) when: When,
    /// Clean reads in a row before it counts as gone.
    pub(crate) clear: Option<u32>,
    /// Not judged for so long after the boot.
    pub(crate) boot_grace: Option<Span>,
    pub(crate) class: Class,
    pub(crate) shards_readable: Option<bool>,
    pub(crate) rejoin: Rejoin,
    #[serde(default)]
    pub(crate) risk: f64,
    pub(crate) cause: String,
    pub(crate) action: String,
    pub(crate) source: String,
}

/// What an XID means.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct XidRow {
    pub(crate) class: Class,
    pub(crate) rejoin: Option<Rejoin>,
    pub(crate) settle: Option<Span>,
    #[serde(default)]
    pub(crate) log: Vec<LogWord>,
    #[serde(default)]
    pub(crate) then: Vec<Then>,
    pub(crate) repeat: Option<Repeat>,
    pub(crate) with_recovery_action: Option<Class>,
    pub(crate) with_link_down: Option<Class>,
    #[serde(default)]
    pub(crate) risk: f64,
    pub(crate) cause: String,
    pub(crate) action: String,
    pub(crate) source: String,
}

impl XidRow {
    /// The rule for a verdict of `class` from this row.
    pub(crate) fn rejoin(&self, class: Class) -> Rejoin {
        self.rejoin.unwrap_or(match class {
            Class::Fatal | Class::Drain => Rejoin::Reset,
            Class::RankDied | Class::Unknown | Class::Ignore | Class::Healthy => Rejoin::AtOnce,
            Class::Predict => Rejoin::Quiet,
        })
    }
}

/// A word of the kernel log's line that decides the class.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogWord {
    pub(crate) word: String,
    pub(crate) class: Class,
}

/// Another XID that belongs to the one before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Then {
    pub(crate) xid: Vec<u64>,
    /// What both together mean.
    pub(crate) class: Class,
    pub(crate) rejoin: Rejoin,
}

/// The same XID several times.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Repeat {
    pub(crate) count: u32,
    pub(crate) within: Span,
    pub(crate) class: Class,
    pub(crate) action: String,
}
