//! What a worker really has.

use crate::{Axis, Step, Units};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What one worker holds: the units of every axis, all standing at one committed step.
///
/// Replicated parameters (norms) are held by every worker that holds anything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    pub step: Step,
    /// Shared between workers that hold the same, so that a plan for many thousands compares pointers.
    pub units: Arc<BTreeMap<Axis, Units>>,
}

impl Holding {
    pub fn is_empty(&self) -> bool {
        self.units.values().all(Units::is_empty)
    }

    /// The units held of `axis`; empty when none.
    pub fn of(&self, axis: Axis) -> Units {
        self.units.get(&axis).cloned().unwrap_or_default()
    }
}
