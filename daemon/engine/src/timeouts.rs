//! Every deadline of the system, derived from a few base values.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The base values. Everything else is derived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// A collective that takes longer is stuck. Must exceed the longest step.
    pub operation_ms: u32,
    /// How long a GPU that may rejoin waits before its worker is started again.
    pub rejoin_hold_ms: u32,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            operation_ms: 10_000,
            rejoin_hold_ms: 2_000,
        }
    }
}

impl Timeouts {
    pub fn operation(&self) -> Duration {
        Duration::from_millis(self.operation_ms.into())
    }
}
