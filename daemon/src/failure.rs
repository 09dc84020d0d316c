//! Why the daemon ends, and with which status.

use crate::config::ConfigError;
use crate::store::StoreError;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Each is one line for the operator: what, where, what to do.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(
        "cannot listen on {address}: {source}; stop what uses it, or choose another address with --listen"
    )]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("cannot write the ready file {}: {source}; check --ready-file", .path.display())]
    ReadyFile { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Open(StoreError),
    #[error("leads no more, because what follows could not be stored: {0}")]
    Persist(StoreError),
    #[error("leads no more: {0}")]
    Leadership(StoreError),
    /// Whoever it waited for had no chance to be heard: it hears everybody anew, as a new leader does.
    #[error("leads no more: this daemon stood still for {} ms, which is longer than {} ms", .late.as_millis(), .limit.as_millis())]
    StoodStill { late: Duration, limit: Duration },
    #[error("stopped: {0}")]
    Internal(String),
}

impl Failure {
    /// Another daemon may lead now, or nobody can: this one is as good as any in stand-by.
    pub fn ends_leadership(&self) -> bool {
        match self {
            Self::Leadership(_) | Self::StoodStill { .. } => true,
            Self::Open(error) | Self::Persist(error) => error.passes(),
            Self::Config(_) | Self::Listen { .. } | Self::ReadyFile { .. } | Self::Internal(_) => false,
        }
    }

    /// The store has no place or no permission for what this daemon writes: that lasts.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Open(StoreError::Refused { .. }) | Self::Persist(StoreError::Refused { .. }))
    }

    /// As in sysexits.h.
    pub fn exit_code(&self) -> u8 {
        const USAGE: u8 = 64;
        const DATA: u8 = 65;
        const UNAVAILABLE: u8 = 69;
        const SOFTWARE: u8 = 70;
        const NO_PERMISSION: u8 = 77;
        match self {
            Self::Config(_) => USAGE,
            Self::Listen { .. } | Self::ReadyFile { .. } => UNAVAILABLE,
            Self::Open(error) => match error {
                StoreError::Corrupt { .. } | StoreError::Foreign { .. } | StoreError::Newer { .. } => DATA,
                StoreError::Refused { .. } => NO_PERMISSION,
                StoreError::InUse { .. } | StoreError::Io { .. } | StoreError::Unreachable { .. } => {
                    UNAVAILABLE
                }
                StoreError::LeadershipLost { .. }
                | StoreError::Conflict { .. }
                | StoreError::TooLarge { .. } => SOFTWARE,
            },
            Self::Persist(StoreError::TooLarge { .. }) => DATA,
            Self::Persist(_) | Self::Leadership(_) | Self::StoodStill { .. } | Self::Internal(_) => SOFTWARE,
        }
    }
}
