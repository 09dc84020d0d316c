//! The rejoin gate: what stands between a GPU that was taken out and its return.

use super::Verdict;
use crate::clock::Millis;
use crate::policy::Gate;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A GPU's history of being taken out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct GateState {
    /// Why it is out, if it is.
    pub(super) out: Option<Verdict>,
    /// Since when it reads healthy without a break.
    calm_since: Option<Millis>,
    last_return: Option<Millis>,
    relapses: u32,
}

/// What the gate says to a GPU that nothing is wrong with any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Open,
    /// In words: what is waited for.
    Wait(String),
}

impl GateState {
    /// The GPU is taken out, or still is.
    pub(super) fn shut(&mut self, now: Millis, gate: &Gate, why: &Verdict) {
        self.relapses = self.relapses_if_out(now, gate);
        self.out = Some(why.clone());
        self.calm_since = None;
    }

    fn relapses_if_out(&self, now: Millis, gate: &Gate) -> u32 {
        let relapse = self.last_return.is_some_and(|at| now.since(at) < gate.relapse_within());
        match (&self.out, relapse) {
            (Some(_), _) => self.relapses,
            (None, true) => self.relapses.saturating_add(1),
            (None, false) => 0,
        }
    }

    /// The GPU is out, and only an operator brings it back.
    pub(super) fn needs_operator(&self, gate: &Gate) -> bool {
        self.out.is_some() && gate.hold(self.relapses).is_none()
    }

    /// A reading that was not healthy.
    pub(super) fn disturbed(&mut self) {
        self.calm_since = None;
    }

    /// Asks for the GPU's return. `unready`: what of the GPU's own state speaks against it.
    pub(super) fn ask(&mut self, now: Millis, gate: &Gate, unready: Option<&str>) -> Answer {
        let calm_since = *self.calm_since.get_or_insert(now);
        let Some(hold) = gate.hold(self.relapses) else {
            return Answer::Wait(format!(
                "when an operator restores it: it was taken out {} times, each within {} of its return",
                self.relapses + 1,
                humantime::format_duration(gate.relapse_within()),
            ));
        };
        if let Some(unready) = unready {
            return Answer::Wait(unready.to_owned());
        }
        if now.since(calm_since) < hold {
            return Answer::Wait(hold_words(hold));
        }
        self.out = None;
        self.calm_since = None;
        self.last_return = Some(now);
        Answer::Open
    }

    /// The hold that the next return will need, in words.
    pub(super) fn hold_words(&self, now: Millis, gate: &Gate) -> String {
        match gate.hold(self.relapses_if_out(now, gate)) {
            Some(hold) => hold_words(hold),
            None => "when an operator restores it".to_owned(),
        }
    }

    /// An operator lets it return, and its past is forgotten.
    pub(super) fn release(&mut self) {
        *self = Self::default();
    }
}

fn hold_words(hold: Duration) -> String {
    format!("{} of healthy reads", humantime::format_duration(hold))
}
