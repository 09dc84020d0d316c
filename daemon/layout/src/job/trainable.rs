//! What a job may ask for today: the planner knows more than the workers do.

use super::{BatchPolicy, JobSpec};
use crate::toml_file::{FileError, Invalid, require};

impl JobSpec {
    /// Parses a job file that shall be trained: [`JobSpec::parse`] and [`JobSpec::trainable`].
    ///
    /// # Errors
    /// With the line, the key and what is allowed.
    pub fn parse_trainable(text: &str, file: &str) -> Result<Self, FileError> {
        let job = Self::parse(text, file)?;
        job.trainable().map_err(|invalid| FileError::of(text, file, &invalid))?;
        Ok(job)
    }

    /// Checks that the workers can carry out a valid job. Asked where a job is submitted; a plan does not need it.
    pub fn trainable(&self) -> Result<(), Invalid> {
        require(self.parallel.pipeline == 1, "parallel.pipeline", || {
            format!("= {} is not supported yet: allowed is 1", self.parallel.pipeline)
        })?;
        require(self.batch.policy == BatchPolicy::KeepGlobal, "batch.policy", || {
            "= \"shrink\" is not supported yet: allowed is \"keep_global\"".into()
        })?;
        require(!self.recovery.power_boost, "recovery.power_boost", || {
            "= true is not supported yet: allowed is false".into()
        })
    }
}
