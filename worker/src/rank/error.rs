//! Why a rank cannot go on.

use crate::data::CorpusError;
use crate::exchange::ExchangeError;
use crate::groups::CommError;
use crate::reshard::ReshardError;
use crate::saver::LoadError;
use reknit_model::{ArrivalError, BatchError, ShardError, StepError};
use std::convert::Infallible;

#[derive(Debug, thiserror::Error)]
pub enum RankError {
    #[error(transparent)]
    Plane(Box<CommError>),
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    #[error(transparent)]
    Reshard(Box<ReshardError>),
    #[error("the new shard: {0}")]
    Arrival(#[from] ArrivalError),
    #[error("the sum of gradients: {0}")]
    Shard(#[from] ShardError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Batch(#[from] BatchError),
    #[error("{0}")]
    Refused(String),
}

impl From<CommError> for RankError {
    fn from(error: CommError) -> Self {
        Self::Plane(Box::new(error))
    }
}

impl From<ExchangeError> for RankError {
    fn from(error: ExchangeError) -> Self {
        match error {
            ExchangeError::Plane(error) => error.into(),
            ExchangeError::Shard(error) => Self::Shard(error),
            ExchangeError::OutOfTurn(_) => Self::Refused(error.to_string()),
        }
    }
}

impl<S: Into<Self> + std::error::Error> From<StepError<CommError, S>> for RankError {
    fn from(error: StepError<CommError, S>) -> Self {
        match error {
            StepError::Batch(error) => Self::Batch(error),
            StepError::Parallel(error) => error.into(),
            StepError::Sink(error) => error.into(),
        }
    }
}

impl From<Infallible> for RankError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl From<ReshardError> for RankError {
    fn from(error: ReshardError) -> Self {
        match error {
            ReshardError::Plane(error) => error.into(),
            ReshardError::NotHeld { .. } | ReshardError::Damaged { .. } | ReshardError::Unexpected(_) => {
                Self::Reshard(Box::new(error))
            }
        }
    }
}

impl RankError {
    /// The failed operation, when the data plane failed and not this worker.
    pub fn plane(&self) -> Option<&CommError> {
        match self {
            Self::Plane(error) => Some(error),
            Self::Corpus(_)
            | Self::Reshard(_)
            | Self::Arrival(_)
            | Self::Shard(_)
            | Self::Load(_)
            | Self::Batch(_)
            | Self::Refused(_) => None,
        }
    }
}
