//! The folder with a job's checkpoints.

use crate::codec::is_content;
use crate::manifest::{Manifest, Part, missing, text};
use crate::{CheckpointError, disk};
use reknit_layout::{CheckpointId, Step};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// A checkpoint that is being removed has another name first: half of it must not look like one.
const REMOVED: &str = "removed-";
pub(crate) const MANIFEST: &str = "manifest.json";
/// Of folders in an error's text.
const SHOWN: usize = 5;

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
    /// Of the job file that it was written under; empty where nothing says so.
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
            found.push(match Manifest::read(&folder.join(MANIFEST)) {
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
                    Found { id, complete: false, written_us, bytes: 0, job_sha256: owner(&folder), folder }
                }
            });
        }
        found.sort_by(|a, b| (b.written_us, &b.id).cmp(&(a.written_us, &a.id)));
        Ok(found)
    }

    /// In words, which folders in this one have checkpoints: for whoever finds none here. `None`: no folder has.
    pub fn beneath(&self) -> Option<String> {
        let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
        let name = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
        let holds = |entry: &fs::DirEntry| {
            entries(&entry.path()).any(|inner| name(&inner).parse::<CheckpointId>().is_ok())
        };
        let mut folders: Vec<_> = entries(&self.path).filter(holds).map(|entry| name(&entry)).collect();
        folders.sort();
        let more = folders.len().saturating_sub(SHOWN);
        folders.truncate(SHOWN);
        let list = folders.join(", ");
        match (folders.len(), more) {
            (0, _) => None,
            (1, _) => Some(format!("the folder {list} in it has checkpoints")),
            (_, 0) => Some(format!("the folders {list} in it have checkpoints")),
            (_, more) => Some(format!("the folders {list} and {more} more in it have checkpoints")),
        }
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
        let path = folder.join(MANIFEST);
        if Manifest::read(&path).is_ok() {
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
        disk::write_whole(&path, writer, &text(&path, &manifest)?)?;
        disk::sync_folder(folder)?;
        Ok(true)
    }

    /// Keeps the `keep` complete checkpoints of this job that were written last, and removes its others: how many. Another
    /// job's in the same folder are not touched.
    ///
    /// # Errors
    /// Those of [`Store::list`].
    pub fn prune(&self, job_sha256: &str, keep: usize) -> Result<usize, CheckpointError> {
        let complete =
            self.list()?.into_iter().filter(|found| found.complete && found.job_sha256 == job_sha256);
        Ok(self.remove(complete.skip(keep.max(1))))
    }

    /// Removes what writers of this job that died or failed have left of steps before `step`: how many checkpoints that were
    /// never complete. Nobody may be writing those steps any more.
    ///
    /// # Errors
    /// Those of [`Store::list`].
    pub fn clear(&self, job_sha256: &str, step: Step) -> Result<usize, CheckpointError> {
        let earlier = |found: &Found| found.job_sha256 == job_sha256 && found.id.step < step;
        let (complete, unfinished): (Vec<_>, Vec<_>) =
            self.list()?.into_iter().filter(earlier).partition(|found| found.complete);
        complete.iter().for_each(|found| clear_strays(&found.folder));
        Ok(self.remove(unfinished.into_iter()))
    }

    /// What cannot be removed is tried again the next time.
    fn remove(&self, unwanted: impl Iterator<Item = Found>) -> usize {
        let hide = |found: &Found| {
            fs::rename(&found.folder, self.path.join(format!("{REMOVED}{}", found.id))).is_ok()
        };
        let removed = unwanted.filter(hide).count();
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| name.strip_prefix(REMOVED));
            if id.is_some_and(|id| id.parse::<CheckpointId>().is_ok()) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        removed
    }
}

/// Removes what is not of a complete checkpoint from its folder: half-written files, and whole ones of tries that others
/// ended. What no writer calls so is left.
fn clear_strays(folder: &Path) {
    let Ok(manifest) = Manifest::read(&folder.join(MANIFEST)) else { return };
    let known: BTreeSet<&str> = manifest.files.iter().map(|file| file.file.as_str()).collect();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let (whole, partial) = disk::whole_name(name).map_or((name, false), |whole| (whole, true));
        let text = whole == MANIFEST || is_part(whole);
        if (partial && (text || is_content(whole))) || (is_content(whole) && !known.contains(whole)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn is_part(name: &str) -> bool {
    name.starts_with("part-") && name.ends_with(".json")
}

/// Of the job that writes or wrote here.
fn owner(folder: &Path) -> String {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut parts = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_part));
    parts
        .find_map(|entry| Part::read(&entry.path()).ok())
        .map_or(String::new(), |part| part.heading.job_sha256)
}

/// The parts in a checkpoint's folder, in the order of their names. Those of another state than the folder's are none.
pub(crate) fn parts(folder: &Path) -> Result<Vec<Part>, CheckpointError> {
    let entries = fs::read_dir(folder).map_err(CheckpointError::io(folder))?;
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry.map_err(CheckpointError::io(folder))?;
        if entry.file_name().to_str().is_some_and(is_part) {
            paths.push(entry.path());
        }
    }
    paths.sort();
    let mut parts: Vec<Part> = Vec::new();
    for path in paths {
        let part = Part::read(&path)?;
        let first = parts.first().map_or(&part.heading, |first| &first.heading);
        let own_folder = part.heading.id().to_string();
        if folder.file_name().is_none_or(|name| *name != *own_folder) || first.model != part.heading.model {
            let problem =
                format!("it is a part of another checkpoint, which lies in a folder named {own_folder}");
            return Err(CheckpointError::damaged(&path, problem));
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
