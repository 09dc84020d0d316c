//! The policy: what each signal and each XID means. It is data: the built-in table is `policy/default.toml`,
//! and a file may differ from it row by row.

mod class;
pub(crate) mod command;
mod explain;
mod file;
mod row;
mod signal;
mod source;

pub(crate) use class::Class;
pub(crate) use file::{Policies, PolicyFileError};
pub(crate) use row::Span;
#[cfg(test)]
pub(crate) use row::{Hits, Windows};
pub(crate) use row::{Rejoin, Rule, When, XidRow};
use serde::{Deserialize, Serialize};
pub(crate) use signal::Signal;
pub(crate) use source::PolicySource;
use std::collections::BTreeMap;
use std::time::Duration;

/// A checked policy, for GPUs of one architecture.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Policy {
    /// False: verdicts are only told.
    pub(crate) enforce: bool,
    pub(crate) watchdog: Watchdog,
    pub(crate) gate: Gate,
    pub(crate) risk: Risk,
    pub(crate) rules: BTreeMap<String, Rule>,
    pub(crate) xids: BTreeMap<u64, XidRow>,
    pub(crate) unknown_xid: XidRow,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Watchdog {
    blind: Span,
}

impl Watchdog {
    pub(crate) fn blind(&self) -> Duration {
        self.blind.0
    }
}

/// Before a GPU that was taken out returns.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Gate {
    pub(crate) healthy_reads: u32,
    hold: Span,
    relapse_within: Span,
    pub(crate) manual_after: u32,
    quiet: Span,
}

impl Gate {
    /// After so many relapses; `None`: only an operator opens the gate.
    pub(crate) fn hold(&self, relapses: u32) -> Option<Duration> {
        (relapses < self.manual_after).then(|| self.hold.0.saturating_mul(1 << relapses.min(16)))
    }

    pub(crate) fn relapse_within(&self) -> Duration {
        self.relapse_within.0
    }

    pub(crate) fn quiet(&self) -> Duration {
        self.quiet.0
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Risk {
    half_life: Span,
    pub(crate) predict_at: f64,
    pub(crate) drain_at: f64,
}

impl Risk {
    pub(crate) fn half_life(&self) -> Duration {
        self.half_life.0
    }
}

impl Policy {
    /// The row of an XID that has none is that of unknown ones.
    pub(crate) fn xid(&self, number: u64) -> &XidRow {
        self.xids.get(&number).unwrap_or(&self.unknown_xid)
    }
}
