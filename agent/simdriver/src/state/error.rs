//! Why a control file is refused.

use std::io;
use std::path::PathBuf;

/// Why a control file could not be read, changed or written.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("cannot {action} {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} is not a simulated driver's state file: {source}")]
    Content { path: PathBuf, source: serde_json::Error },
    #[error("there is no GPU {gpu}: the file has {count}, numbered from 0")]
    NoSuchGpu { gpu: usize, count: usize },
    #[error("`{text}` is no target: write a GPU's number, `all` or `node`")]
    NoTarget { text: String },
    #[error("unknown key `{key}`: {whose} has {known}")]
    UnknownKey { key: String, whose: &'static str, known: String },
    #[error("`{text}` is no change: write KEY=VALUE, such as lost=true")]
    NotAnAssignment { text: String },
    #[error("`{value}` is no value for `{key}`: {reason}")]
    BadValue { key: String, value: String, reason: String },
    #[error("{path}: GPU {gpu} has no uuid")]
    NoUuid { path: PathBuf, gpu: usize },
    #[error("GPU `{gpu}`: `{pci_bus_id}` is no PCI address, such as 00000000:3B:00.0")]
    BadAddress { gpu: String, pci_bus_id: String },
}
