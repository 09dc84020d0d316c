//! The policy file while the agent runs: read again when it changes, and the last good one kept.

use super::{Policies, PolicyFileError};
use crate::files;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tracing::warn;

/// In the state folder: the policy file as it was when it was last good.
const LAST_GOOD: &str = "policy.toml";

#[derive(Debug)]
pub(crate) struct PolicySource {
    path: Option<PathBuf>,
    last_good: PathBuf,
    /// The file as it was last looked at, which it may not have been there for.
    looked_at: Option<Option<Stamp>>,
    /// It has just changed: whoever writes it may not have finished.
    changing: Option<Option<Stamp>>,
}

/// Tells one content of the file from the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    seconds: i64,
    nanoseconds: i64,
}

impl PolicySource {
    /// The policies to begin with, and why they are not those of the file, if they are not. Without a file they
    /// are the built-in ones. A file that is no good and never was is an error.
    pub(crate) fn open(
        path: Option<PathBuf>,
        state_dir: &Path,
    ) -> Result<(Self, Policies, Option<String>), PolicyFileError> {
        let mut source = Self { path, last_good: state_dir.join(LAST_GOOD), looked_at: None, changing: None };
        match source.changed() {
            None => Ok((source, Policies::built_in()?, None)),
            Some(Ok(policies)) => Ok((source, policies, None)),
            Some(Err(e)) => {
                let Ok((policies, _)) = Policies::load(&source.last_good) else {
                    return Err(e);
                };
                let refused = format!("{e}; its last good copy is in force");
                warn!(refused, "the policy file is refused");
                Ok((source, policies, Some(refused)))
            }
        }
    }

    /// What the file holds, if it is another one than when it was last read, and was the same one at the last look.
    pub(crate) fn changed(&mut self) -> Option<Result<Policies, PolicyFileError>> {
        let path = self.path.as_ref()?;
        let stamp = Some(Stamp::of(path));
        if stamp == self.looked_at {
            return None;
        }
        if self.looked_at.is_some() && stamp != self.changing {
            self.changing = stamp;
            return None;
        }
        self.looked_at = stamp;
        let loaded = Policies::load(path);
        Some(loaded.map(|(policies, text)| {
            if let Err(e) = files::replace(&self.last_good, text.as_bytes()) {
                warn!(path = %self.last_good.display(), %e, "cannot keep a copy of the policy file");
            }
            policies
        }))
    }
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().map(|file| Self {
            inode: file.ino(),
            size: file.len(),
            seconds: file.mtime(),
            nanoseconds: file.mtime_nsec(),
        })
    }
}
