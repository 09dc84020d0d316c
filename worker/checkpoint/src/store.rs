//! The folder with a job's checkpoints.

use crate::manifest::{Manifest, Part, missing, read};
use crate::{CheckpointError, disk};
use reknit_layout::CheckpointId;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// A checkpoint that is being removed has another name first: half of it must not look like one.
const REMOVED: &str = "removed-";

/// A job's checkpoints.
#[derive(Debug, Clone)]
pub struct Store {
    path: PathBuf,
}

/// A checkpoint's folder as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub id: CheckpointId,
    pub folder: PathBuf,
    pub complete: bool,
    /// When it was complete, or last written to, in microseconds since the Unix epoch.
    pub written_us: u64,
    /// Of all files of a complete one.
    pub bytes: u64,
    /// Of the job file that a complete one was written under.
    pub job_sha256: String,
}

impl Store {
    /// `path` need not be there yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn folder(&self, id: &CheckpointId) -> PathBuf {
        self.path.join(id.to_string())
    }

    /// Every checkpoint, the last written first: after a job went back to an earlier one, that need not be the highest
    /// step. Empty when there is no such folder.
    ///
    /// # Errors
    /// The folder cannot be read. One that only cannot be understood counts as incomplete.
    pub fn list(&self) -> Result<Vec<Found>, CheckpointError> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(CheckpointError::io(&self.path)(error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.map_err(CheckpointError::io(&self.path))?;
            let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let folder = entry.path();
            found.push(match read::<Manifest>(&folder.join("manifest.json")) {
                Ok(manifest) => Found {
                    id,
                    complete: true,
                    written_us: manifest.written_us,
                    bytes: manifest.bytes(),
                    job_sha256: manifest.heading.job_sha256,
                    folder,
                },
                Err(_) => {
                    let modified = entry.metadata().and_then(|metadata| metadata.modified());
                    let written_us = modified.map_or(0, micros);
                    Found { id, complete: false, written_us, bytes: 0, job_sha256: String::new(), folder }
                }
            });
        }
        found.sort_by(|a, b| (b.written_us, &b.id).cmp(&(a.written_us, &a.id)));
        Ok(found)
    }

    /// The ids of the complete ones, the last written first.
    ///
    /// # Errors
    /// Those of [`Store::list`].
    pub fn complete_ids(&self) -> Result<Vec<CheckpointId>, CheckpointError> {
        Ok(self.list()?.into_iter().filter(|found| found.complete).map(|found| found.id).collect())
    }

    /// Makes the manifest if the parts have every unit (COVER), and says whether they do. Whoever comes last sees all parts;
    /// two who come last write the same.
    pub(crate) fn complete(&self, folder: &Path, writer: &str) -> Result<bool, CheckpointError> {
        let path = folder.join("manifest.json");
        if path.exists() {
            return Ok(true);
        }
        let parts = parts(folder)?;
        let Some(first) = parts.first() else { return Ok(false) };
        let heading = first.heading.clone();
        let mut files: Vec<_> = parts.into_iter().flat_map(|part| part.files).collect();
        // The same file of two tries is one.
        files.sort_by(|a, b| (a.axis, &a.file).cmp(&(b.axis, &b.file)));
        files.dedup();
        if missing(&heading.model, &files).is_some() {
            return Ok(false);
        }
        let manifest = Manifest { heading, written_us: micros(SystemTime::now()), files };
        let text =
            serde_json::to_vec_pretty(&manifest).map_err(|error| CheckpointError::damaged(&path, error))?;
        disk::write_whole(&path, writer, &text)?;
        disk::sync_folder(folder)?;
        Ok(true)
    }

    /// Keeps the `keep` complete ones that were written last and whatever is newer; removes the rest, finished or not.
    /// What cannot be removed is tried again the next time.
    ///
    /// # Errors
    /// Those of [`Store::list`].
    pub fn prune(&self, keep: usize) -> Result<usize, CheckpointError> {
        let found = self.list()?;
        let newest = found.iter().find(|found| found.complete).map_or(0, |found| found.written_us);
        let mut kept = 0;
        let mut removed = 0;
        for Found { id, folder, complete, written_us, .. } in found {
            kept += usize::from(complete);
            let stays = if complete { kept <= keep.max(1) } else { written_us >= newest };
            if !stays && fs::rename(&folder, self.path.join(format!("{REMOVED}{id}"))).is_ok() {
                removed += 1;
            }
        }
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(|name| name.starts_with(REMOVED)) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        Ok(removed)
    }
}

/// The parts in a checkpoint's folder, in the order of their names. Those of another state than the folder's are none.
fn parts(folder: &Path) -> Result<Vec<Part>, CheckpointError> {
    let entries = fs::read_dir(folder).map_err(CheckpointError::io(folder))?;
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry.map_err(CheckpointError::io(folder))?;
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| name.starts_with("part-") && name.ends_with(".json")) {
            paths.push(entry.path());
        }
    }
    paths.sort();
    let mut parts: Vec<Part> = Vec::new();
    for path in paths {
        let part: Part = read(&path)?;
        let first = parts.first().map_or(&part.heading, |first| &first.heading);
        let own_folder = folder.file_name().is_some_and(|name| *name == *part.heading.id().to_string());
        if !own_folder || first.model != part.heading.model {
            return Err(CheckpointError::damaged(&path, "it is a part of another checkpoint"));
        }
        parts.push(part);
    }
    Ok(parts)
}

/// What the parts of a folder without a manifest lack.
pub(crate) fn lacks(folder: &Path) -> Result<String, CheckpointError> {
    let parts = parts(folder)?;
    let Some(first) = parts.first() else { return Ok("everything".to_owned()) };
    let model = first.heading.model.clone();
    let files: Vec<_> = parts.into_iter().flat_map(|part| part.files).collect();
    Ok(missing(&model, &files).unwrap_or_else(|| "only the manifest".to_owned()))
}

fn micros(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}
