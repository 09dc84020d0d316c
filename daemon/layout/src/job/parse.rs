//! From a job file's text to a job and back.

use super::JobSpec;
use crate::toml_file::{self, FileError};

impl JobSpec {
    /// Parses and validates a job file. `file` is only its name in errors.
    ///
    /// # Errors
    /// With the line, the key and what is allowed.
    pub fn parse(text: &str, file: &str) -> Result<Self, FileError> {
        let job: Self = toml_file::parse(text, file)?;
        job.validate().map_err(|invalid| FileError::of(text, file, &invalid))?;
        Ok(job)
    }

    /// The job as a job file, every default written out. Parses back to the same job, if that is valid.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("TOML can express every valid job")
    }
}
