//! What survives the daemon: job records and incidents.

pub mod embedded;
pub mod etcd;
mod record;
mod value;

pub use embedded::Embedded;
pub use etcd::{Connection, Etcd, Stored};

use async_trait::async_trait;
use reknit_engine::{Incident, JobRecord};

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
    /// The number of this leadership: higher than that of any before.
    fn term(&self) -> u64;
    /// No other daemon can lead now.
    fn leads(&self) -> bool;
    /// Ends only when another daemon may be in charge.
    async fn leadership_lost(&self) -> StoreError;
    /// Lets another daemon take over at once.
    async fn release(&self);
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
