//! What survives the daemon: job records and incidents.

pub mod embedded;
pub mod etcd;
mod record;
mod value;

pub use embedded::Embedded;
pub use etcd::{CANNOT_LEAD, Connection, Etcd, Leader, Stored};

use async_trait::async_trait;
use reknit_engine::{Incident, JobRecord};
use std::time::{SystemTime, UNIX_EPOCH};

/// The version of what is stored. It grows when an older daemon could not read it. Format 1 wrote plain JSON; a daemon
/// that leads makes it format 2, and what it writes from then on is packed.
pub const FORMAT: u32 = 2;

/// Everything there is, read once at the start.
#[derive(Debug, Default, PartialEq)]
pub struct Snapshot {
    pub jobs: Vec<JobRecord>,
    pub incidents: Vec<Incident>,
}

/// Opening a store makes this daemon the only one that writes to it. A write that returned is durable.
#[async_trait]
pub trait Store: Send + Sync + std::fmt::Debug {
    async fn load(&self) -> Result<Snapshot, StoreError>;
    async fn put_job(&self, record: &JobRecord) -> Result<(), StoreError>;
    async fn put_incident(&self, incident: &Incident) -> Result<(), StoreError>;
    /// The number of this leadership, once the store was loaded: see [`next_term`].
    fn term(&self) -> u64;
    /// No other daemon can lead now.
    fn leads(&self) -> bool;
    /// Ends only when another daemon may be in charge.
    async fn leadership_lost(&self) -> StoreError;
    /// Lets another daemon take over at once.
    async fn release(&self);
}

/// The number of a leadership that begins now, and is stored before anybody is told: higher than the last that the store
/// knows. In Unix milliseconds at least, so that it is also higher than those of a store that was there before this one.
pub fn next_term(last: u64, now: SystemTime) -> u64 {
    let milliseconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    milliseconds.max(last.saturating_add(1))
}

/// `place` is a file, a key or a cluster.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{place} is in use by another process; stop that one, or give this one its own --state-dir")]
    InUse { place: String },
    #[error("{place} is damaged: {problem}; nothing was changed: {remedy}")]
    Corrupt { place: String, problem: String, remedy: &'static str },
    #[error("{place} is nothing that reknitd wrote; nothing was changed: {remedy}")]
    Foreign { place: String, remedy: &'static str },
    #[error(
        "{place} was written by a newer reknitd (format {found}, this one knows {FORMAT}); nothing was changed: run the newer version, {remedy}"
    )]
    Newer { place: String, found: u32, remedy: &'static str },
    #[error("{place}: {source}; check that the directory exists and that it and the file are writable")]
    Io { place: String, source: std::io::Error },
    #[error("{place} cannot be reached: {problem}; {remedy}")]
    Unreachable { place: String, problem: String, remedy: &'static str },
    #[error("{place} refuses this daemon: {problem}; {remedy}")]
    Refused { place: String, problem: String, remedy: &'static str },
    #[error(
        "{place} of {bytes} bytes is more than etcd takes at once; start its members with a larger --max-request-bytes"
    )]
    TooLarge { place: String, bytes: usize },
    #[error("another daemon may be in charge: {problem}")]
    LeadershipLost { problem: String },
    #[error("{place} was changed by somebody else")]
    Conflict { place: String },
}

impl StoreError {
    /// Not a fault of what is stored: with other daemons or in other times there is none.
    pub fn passes(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::Refused { .. }
            | Self::LeadershipLost { .. }
            | Self::Conflict { .. } => true,
            Self::InUse { .. }
            | Self::Corrupt { .. }
            | Self::Foreign { .. }
            | Self::Newer { .. }
            | Self::Io { .. }
            | Self::TooLarge { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_term_is_later_than_the_stores_last_and_than_any_other_stores() {
        let at = |milliseconds| UNIX_EPOCH + Duration::from_millis(milliseconds);
        assert_eq!(next_term(0, at(1_790_000_000_123)), 1_790_000_000_123);
        assert_eq!(next_term(7, at(1_790_000_000_123)), 1_790_000_000_123);
        assert_eq!(next_term(1_790_000_000_123, at(1_790_000_000_123)), 1_790_000_000_124);
        assert_eq!(next_term(1_790_000_000_123, at(5)), 1_790_000_000_124, "the clock was set back");
        assert_eq!(next_term(3, UNIX_EPOCH - Duration::from_secs(1)), 4, "a clock before 1970");
    }
}
