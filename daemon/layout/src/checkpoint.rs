//! The name of a checkpoint.

use crate::Step;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A state of a job that was written down: the step, and the digest of the replicated parameters at that step, which tells
/// two runs of one step apart. As text it is the name of the checkpoint's folder, such as
/// `step-000000001200-9f3c0a41d27be865`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CheckpointId {
    pub step: Step,
    /// 16 hexadecimal digits.
    pub digest: String,
}

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step-{:012}-{}", self.step.0, self.digest)
    }
}

/// A text is no checkpoint's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not the name of a checkpoint, such as step-000000001200-9f3c0a41d27be865")]
pub struct BadCheckpointId(pub String);

impl FromStr for CheckpointId {
    type Err = BadCheckpointId;

    fn from_str(text: &str) -> Result<Self, BadCheckpointId> {
        let parse = || {
            let (step, digest) = text.strip_prefix("step-")?.split_once('-')?;
            let hex = digest.len() == 16 && digest.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
            let id = Self { step: Step(step.parse().ok()?), digest: digest.to_owned() };
            // One name for each: no sign, no other number of zeros.
            (hex && id.to_string() == text).then_some(id)
        };
        parse().ok_or_else(|| BadCheckpointId(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_back_and_nothing_else_is_one() {
        let id = CheckpointId { step: Step(1200), digest: "9f3c0a41d27be865".to_owned() };
        assert_eq!(id.to_string(), "step-000000001200-9f3c0a41d27be865");
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in [
            "",
            "step-1200-9f3c0a41d27be865",
            "step-000000001200",
            "step-000000001200-9F3C0A41D27BE865",
            "step-000000001200-9f3c",
            "step-+00000001200-9f3c0a41d27be865",
            "removed-step-000000001200-9f3c0a41d27be865",
        ] {
            assert!(bad.parse::<CheckpointId>().is_err(), "{bad}");
        }
    }
}
