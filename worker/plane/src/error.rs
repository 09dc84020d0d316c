//! What can go wrong on the data plane.

use std::time::Duration;

/// Why a group was aborted. The first reason wins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AbortReason {
    /// The daemon closed the epoch.
    EpochClosed,
    /// A sibling group of the same epoch failed.
    Sibling,
    /// The worker is going away.
    Leaving,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlaneError {
    #[error("group {group}: rank {rank} is gone ({detail})")]
    PeerLost { group: String, rank: usize, detail: String },
    /// A peer said that it leaves before it closed its connection: it is alive and not to blame.
    #[error("group {group}: rank {rank} left the group by itself: {detail}")]
    PeerLeft { group: String, rank: usize, detail: String },
    #[error(
        "group {group}: {what} did not finish within {after:?}; still waiting for rank(s) {waiting_for:?}"
    )]
    Deadline { group: String, what: String, after: Duration, waiting_for: Vec<usize> },
    #[error("group {group}: aborted ({reason:?})")]
    Aborted { group: String, reason: AbortReason },
    /// The ranks do not run the same operation: another kind, type or counts.
    #[error("group {group}: rank {rank} runs another operation than this rank: {detail}")]
    Mismatch { group: String, rank: usize, detail: String },
    /// A peer showed another job, epoch or group, or does not hold the ticket.
    #[error("group {group}: handshake refused: {detail}")]
    Handshake { group: String, detail: String },
    #[error("group {group}: {detail}")]
    Io { group: String, detail: String },
}
