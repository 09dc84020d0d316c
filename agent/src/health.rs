//! From readings and events to each GPU's class. Pure: plain data in, transitions out.

mod fault;
mod gate;
mod gpu;
mod hysteresis;
mod risk;
mod signals;
#[cfg(test)]
mod tests;
mod tracker;
mod xids;

use crate::clock::Millis;
use crate::policy::Class;
use reknit_layout::GpuId;
use serde::{Deserialize, Serialize};
pub(crate) use tracker::{Boot, Memory, Tracker};

/// A class and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Verdict {
    pub(crate) class: Class,
    pub(crate) cause: String,
    /// What was read: XID, log line, NVML code, counter.
    pub(crate) evidence: String,
    /// What must be seen before the verdict is lifted, in words.
    pub(crate) rejoin: String,
    /// One suggested action.
    pub(crate) action: String,
    pub(crate) shards_readable: bool,
}

impl Verdict {
    fn healthy(cause: &str) -> Self {
        Self {
            class: Class::Healthy,
            cause: cause.to_owned(),
            evidence: String::new(),
            rejoin: String::new(),
            action: String::new(),
            shards_readable: Class::Healthy.shards_readable(),
        }
    }

    pub(crate) fn unknown(cause: &str) -> Self {
        Self {
            class: Class::Unknown,
            cause: cause.to_owned(),
            evidence: String::new(),
            rejoin: "when the driver answers".to_owned(),
            action: "none; the agent keeps trying".to_owned(),
            shards_readable: Class::Unknown.shards_readable(),
        }
    }
}

/// A GPU's verdict changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Transition {
    pub(crate) gpu: GpuId,
    pub(crate) at: Millis,
    pub(crate) verdict: Verdict,
    /// False: the policy only tells, so the GPU counts as healthy.
    pub(crate) enforced: bool,
}

/// An XID, from NVML or from the kernel log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct XidSeen<'a> {
    pub(crate) number: u64,
    /// The rest of its line in the kernel log.
    pub(crate) log: Option<&'a str>,
}
