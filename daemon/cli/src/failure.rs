//! Why a command ended without doing what it was asked, and the exit status that says so.

/// Its text is one line for people: what happened, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The command line, a file it names or the job file is wrong.
    #[error("{0}")]
    Usage(String),
    /// No daemon answers.
    #[error("{0}")]
    Unreachable(String),
    #[error("{0}")]
    Failed(String),
    /// What was asked about is lost: no live GPU holds it.
    #[error("{0}")]
    Unrecoverable(String),
    /// A signal asked for the end.
    #[error("stopped by {name}")]
    Interrupted { name: &'static str, number: u8 },
}

impl Failure {
    /// 64 and 69 are EX_USAGE and EX_UNAVAILABLE of sysexits.h; a signal gives 128 + its number, as shells do.
    pub(crate) fn exit_status(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Unrecoverable(_) => 2,
            Self::Usage(_) => 64,
            Self::Unreachable(_) => 69,
            Self::Interrupted { number, .. } => 128 + number,
        }
    }

    /// For `map_err`: what is wrong says all.
    pub(crate) fn usage(error: impl std::fmt::Display) -> Self {
        Self::Usage(error.to_string())
    }

    /// For `map_err`: `what` failed, and why.
    pub(crate) fn failed<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl FnOnce(E) -> Self {
        move |error| Self::Failed(format!("{what}: {error}"))
    }
}
