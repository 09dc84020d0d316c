//! The log of the calls that change something.

use super::StateError;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A call that a client made to change a GPU: one line of JSON in the file that is named as the control
/// file, with `.calls` after it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetterCall {
    /// The call's name in NVML's header.
    pub call: String,
    /// The GPU's place in the control file.
    pub gpu: usize,
    /// The number to set, in the call's unit.
    pub value: u32,
    /// NVML's return code.
    pub result: u32,
}

impl SetterCall {
    /// Reads the calls made so far, oldest first, of the driver whose control file is `state`.
    pub fn read_all(state: &Path) -> Result<Vec<Self>, StateError> {
        let path = log_of(state);
        if !path.exists() {
            return Ok(Vec::new());
        }
        let text = fs::read_to_string(&path).map_err(|source| StateError::File {
            action: "read the setter calls in",
            path: path.clone(),
            source,
        })?;
        let line = |line| {
            serde_json::from_str(line).map_err(|source| StateError::Content { path: path.clone(), source })
        };
        text.lines().map(line).collect()
    }

    pub(crate) fn append(&self, state: &Path) -> Result<(), StateError> {
        let path = log_of(state);
        let mut line = serde_json::to_string(self)
            .map_err(|source| StateError::Content { path: path.clone(), source })?;
        line.push('\n');
        let written = File::options()
            .append(true)
            .create(true)
            .open(&path)
            .and_then(|mut file| file.write_all(line.as_bytes()));
        written.map_err(|source| StateError::File { action: "append a setter call to", path, source })
    }
}

fn log_of(state: &Path) -> PathBuf {
    let mut name = OsString::from(state);
    name.push(".calls");
    name.into()
}
