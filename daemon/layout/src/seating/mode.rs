//! How a group goes on without some of its GPUs.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How groups go on without GPUs that nothing replaces. All but the first are there for comparison.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Nonuniform tensor parallelism: each group with all GPUs that it has left.
    #[default]
    Ntp,
    /// All groups of every hit replica at one degree, that of the group with most GPUs gone, as Megatron-LM does it.
    UniformReduction,
    /// A hit replica does not train.
    DropReplica,
    /// A hit group with the largest power of two of GPUs that it has left.
    PowerOfTwo,
}

impl Mode {
    pub const ALL: [Self; 4] = [Self::Ntp, Self::UniformReduction, Self::DropReplica, Self::PowerOfTwo];

    /// Whether reduced groups are packed into few replicas; else they stay as the failures fell.
    pub(super) fn packs(self) -> bool {
        match self {
            Self::Ntp | Self::PowerOfTwo => true,
            Self::UniformReduction | Self::DropReplica => false,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ntp => "ntp",
            Self::UniformReduction => "uniform_reduction",
            Self::DropReplica => "drop_replica",
            Self::PowerOfTwo => "power_of_two",
        })
    }
}

/// A mode that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a mode: allowed are ntp, uniform_reduction, drop_replica and power_of_two")]
pub struct BadMode(pub String);

impl FromStr for Mode {
    type Err = BadMode;

    fn from_str(text: &str) -> Result<Self, BadMode> {
        let mut modes = Self::ALL.into_iter();
        modes.find(|mode| mode.to_string() == text).ok_or_else(|| BadMode(text.to_owned()))
    }
}
