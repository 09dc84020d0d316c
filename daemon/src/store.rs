//! What survives the daemon: job records and incidents.

pub mod embedded;
pub mod etcd;

pub use embedded::Embedded;
pub use etcd::{Connection, Etcd, Stored};

use async_trait::async_trait;
use reknit_engine::{Incident, JobRecord};

/// The version of what is stored. It grows when an older daemon could not read it.
pub const FORMAT: u32 = 1;

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

/// `place` is a file or a key.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{place} is in use by another reknitd; stop that one, or give this one its own --state-dir")]
    InUse { place: String },
    #[error(
        "{place} is damaged: {problem}; nothing was changed. Restore it from a copy, or move it away to start with no jobs"
    )]
    Corrupt { place: String, problem: String },
    #[error(
        "{place} was written by a newer reknitd (format {found}, this one knows {FORMAT}); nothing was changed. Run the newer version, or move it away to start with no jobs"
    )]
    Newer { place: String, found: u32 },
    #[error("{place}: {source}; check that the directory exists and is writable")]
    Io { place: String, source: std::io::Error },
    #[error("{place} cannot be reached: {problem}; check that it runs and --endpoints")]
    Unreachable { place: String, problem: String },
    #[error("another daemon may be in charge: {problem}")]
    LeadershipLost { problem: String },
    #[error("{place} was changed by somebody else")]
    Conflict { place: String },
}

impl StoreError {
    /// Not a fault of what is stored: with other daemons or in other times there is none.
    pub fn passes(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::LeadershipLost { .. } | Self::Conflict { .. } => true,
            Self::InUse { .. } | Self::Corrupt { .. } | Self::Newer { .. } | Self::Io { .. } => false,
        }
    }
}

fn encode<T: serde::Serialize>(place: &str, value: &T) -> Result<Vec<u8>, StoreError> {
    serde_json::to_vec(value)
        .map_err(|error| StoreError::Corrupt { place: place.to_owned(), problem: error.to_string() })
}

fn decode<T: serde::de::DeserializeOwned>(place: &str, value: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(value)
        .map_err(|error| StoreError::Corrupt { place: place.to_owned(), problem: error.to_string() })
}
