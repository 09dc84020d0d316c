//! `workers.json`: the running workers, for the agent's next start.

use super::WorkerId;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tracing::{info, warn};

/// One worker, written down before it is started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    #[serde(flatten)]
    pub(super) worker: WorkerId,
    /// In its environment: finds it when the agent died before it could note the process.
    pub(super) spawn: String,
    #[serde(flatten)]
    pub(super) started: Option<Started>,
}

/// The start time tells the process from a later one with its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Started {
    pub(super) pid: u32,
    /// Clock ticks since boot, field 22 of /proc/PID/stat.
    pub(super) start_time: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    /// Start times count from this boot.
    boot: String,
    workers: Vec<Record>,
}

#[derive(Debug)]
pub(super) struct Records {
    path: PathBuf,
    boot: String,
    /// The file does not say what it should.
    stale: bool,
}

impl Records {
    pub(super) fn new(state_dir: &Path) -> io::Result<Self> {
        Ok(Self { path: state_dir.join("workers.json"), boot: crate::files::boot_id()?, stale: false })
    }

    /// None of another boot; none from a file that cannot be read, which is said and survived.
    pub(super) fn load(&self) -> Vec<Record> {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Vec::new(),
            Err(e) => {
                warn!(path = %self.path.display(), %e, "cannot read the recorded workers");
                return Vec::new();
            }
        };
        match serde_json::from_slice::<Content>(&text) {
            Ok(content) if content.boot == self.boot => content.workers,
            Ok(_) => Vec::new(),
            Err(e) => {
                warn!(path = %self.path.display(), %e, "cannot read the recorded workers");
                Vec::new()
            }
        }
    }

    /// A failure is said and survived.
    pub(super) fn save(&mut self, workers: Vec<Record>) {
        let content = Content { boot: self.boot.clone(), workers };
        let saved = serde_json::to_vec_pretty(&content)
            .map_err(io::Error::from)
            .and_then(|text| crate::files::replace(&self.path, &text));
        match saved {
            Ok(()) if self.stale => {
                self.stale = false;
                info!("the running workers are recorded again");
            }
            Ok(()) => {}
            Err(e) => {
                self.stale = true;
                warn!(%e, "cannot record the running workers: the agent's next start will not know them all");
            }
        }
    }

    pub(super) fn is_stale(&self) -> bool {
        self.stale
    }
}
