//! Something that is wrong with a GPU, until its rejoin rule lifts it.

use super::Verdict;
use crate::clock::Millis;
use crate::policy::{Class, Gate, Rejoin};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Who says so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum By {
    Rule(String),
    Xid(u64),
    Risk,
}

impl By {
    pub(super) fn rule(&self) -> Option<&str> {
        match self {
            Self::Rule(name) => Some(name),
            Self::Xid(_) | Self::Risk => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Fault {
    pub(super) by: By,
    pub(super) verdict: Verdict,
    pub(super) rejoin: Rejoin,
    pub(super) began: Millis,
    pub(super) last_seen: Millis,
    /// Not lifted sooner after `last_seen`.
    pub(super) settle: Duration,
    /// The kernel log's line is its evidence.
    pub(super) logged: bool,
    /// The rule holds now.
    pub(super) holds: bool,
    /// The GPU was reset, away or unusable since it began.
    pub(super) reset: bool,
}

impl Fault {
    /// Whether enough was seen to lift it, for a GPU that reads healthy.
    pub(super) fn may_lift(&self, now: Millis, gate: &Gate) -> bool {
        if self.holds || now.since(self.last_seen) < self.settle {
            return false;
        }
        match self.rejoin {
            Rejoin::AtOnce | Rejoin::Clear => true,
            Rejoin::Reset => self.reset,
            Rejoin::Quiet => now.since(self.last_seen) >= gate.quiet(),
            Rejoin::Operator => false,
        }
    }

    /// Changes the class, and with it what must be seen.
    pub(super) fn turn(&mut self, class: Class, rejoin: Rejoin, hold: &str) {
        self.verdict.class = class;
        self.verdict.shards_readable = class.shards_readable();
        self.rejoin = rejoin;
        self.verdict.rejoin = rejoin_words(rejoin, class, hold);
        if let Some(action) = turned_action(rejoin) {
            self.verdict.action = action.to_owned();
        }
    }

    /// Of two that are equally bad an XID tells more than a reading.
    fn weight(&self) -> (Class, u8) {
        let tells = match self.by {
            By::Risk => 0,
            By::Rule(_) => 1,
            By::Xid(_) => 2,
        };
        (self.verdict.class, tells)
    }
}

/// The one that tells most. Of two that tell as much it is the earlier one: the other may be what it led to.
pub(super) fn worst<'a>(faults: impl DoubleEndedIterator<Item = &'a Fault>) -> Option<&'a Fault> {
    faults.rev().max_by_key(|fault| fault.weight())
}

/// What to do when a row's class, and with it its own advice, no longer holds.
pub(super) const fn turned_action(rejoin: Rejoin) -> Option<&'static str> {
    match rejoin {
        Rejoin::Reset => Some("reset the GPU"),
        Rejoin::AtOnce | Rejoin::Clear | Rejoin::Quiet | Rejoin::Operator => None,
    }
}

/// What must be seen, with the gate's hold for a GPU that was taken out.
pub(super) fn rejoin_words(rejoin: Rejoin, class: Class, hold: &str) -> String {
    if class.takes_out() { format!("{}, then {hold}", rejoin.words()) } else { rejoin.words().to_owned() }
}
