//! Why a checkpoint could not be written or read.

use reknit_layout::{Axis, Units};
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error(
        "checkpoint: the disk of {path} is full: free some space, or keep fewer checkpoints (checkpoint.keep)"
    )]
    Full { path: PathBuf },
    #[error("checkpoint: {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("checkpoint: {path} is damaged: {problem}")]
    Damaged { path: PathBuf, problem: String },
    #[error(
        "checkpoint: {path} has format {found}, and this Reknit reads format {known}; use a Reknit of its time"
    )]
    Version { path: PathBuf, found: u32, known: u32 },
    #[error("checkpoint: {path} is not complete: it has no manifest.json, and its parts lack {missing}")]
    Incomplete { path: PathBuf, missing: String },
    #[error("checkpoint: {path} is of another model: {what}")]
    OtherModel { path: PathBuf, what: String },
    #[error("checkpoint: {path} has no unit {units} of {axis}")]
    Missing { path: PathBuf, axis: Axis, units: Units },
    #[error("checkpoint: {path} is no checkpoint: {problem}")]
    NotOne { path: PathBuf, problem: String },
    #[error(
        "checkpoint: {path} is not a regular file: name one that is not there yet, or that may be replaced"
    )]
    NoTarget { path: PathBuf },
}

impl CheckpointError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full { path },
            _ => Self::Io { path, source },
        }
    }

    pub(crate) fn damaged(path: &Path, problem: impl ToString) -> Self {
        Self::Damaged { path: path.to_owned(), problem: problem.to_string() }
    }
}
