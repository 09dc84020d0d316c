//! `workers.json`: the running workers, for the agent's next start.

use super::WorkerId;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tracing::warn;

/// One running worker. The start time tells it from a later process with its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    #[serde(flatten)]
    pub(super) worker: WorkerId,
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
}

impl Records {
    pub(super) fn new(state_dir: &Path) -> io::Result<Self> {
        Ok(Self {
            path: state_dir.join("workers.json"),
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
        })
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

    pub(super) fn save(&self, workers: Vec<Record>) -> io::Result<()> {
        let content = Content { boot: self.boot.clone(), workers };
        crate::files::replace(&self.path, &serde_json::to_vec_pretty(&content)?)
    }
}
