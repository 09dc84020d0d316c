//! What happens to a GPU.

use serde::{Deserialize, Serialize};

/// What a GPU's signals mean together. When several hold, the greatest tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Class {
    Healthy,
    /// An application's error, or told better by another signal.
    Ignore,
    Predict,
    RankDied,
    Unknown,
    Drain,
    Fatal,
}

impl Class {
    /// Unless the policy's row says otherwise.
    pub(crate) const fn shards_readable(self) -> bool {
        match self {
            Self::Fatal => false,
            Self::Healthy | Self::Ignore | Self::Predict | Self::RankDied | Self::Unknown | Self::Drain => {
                true
            }
        }
    }

    /// The GPU leaves its group, and the rejoin gate stands before its return.
    pub(crate) const fn takes_out(self) -> bool {
        match self {
            Self::Fatal | Self::Drain => true,
            Self::Healthy | Self::Ignore | Self::Predict | Self::RankDied | Self::Unknown => false,
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Ignore => "ignore",
            Self::Predict => "predict",
            Self::RankDied => "rank_died",
            Self::Unknown => "unknown",
            Self::Drain => "drain",
            Self::Fatal => "fatal",
        }
    }

    /// What happens then, to the end of "the GPU is ...".
    pub(crate) const fn meaning(self) -> &'static str {
        match self {
            Self::Healthy => "in use",
            Self::Ignore => "left alone: the signal says nothing about the GPU",
            Self::Predict => "watched: it stays in use, and its risk score grows",
            Self::RankDied => "kept: its worker died with the error, and a new one may start there at once",
            Self::Unknown => "left as it is: nothing is known of it, so no worker is started there",
            Self::Drain => "taken out at the next step boundary, while its shards can still be read",
            Self::Fatal => "dropped at once, and its shards are fetched from the ranks that hold them too",
        }
    }
}
