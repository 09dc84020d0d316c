//! What one rank writes: its share of the units it owns.

use crate::codec::{encode, unit_bytes};
use crate::manifest::{FileEntry, Part};
use crate::{CheckpointError, Heading, Store, disk};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Of one file. What a writer and a reader have in memory at once is one file.
const FILE_BYTES: usize = 64 << 20;

/// The units of a rank in the training replica number `replica` of `replicas` that it, and no rank of another replica,
/// writes: every unit has one owner in each replica, and the replicas take turns.
pub fn to_write(owned: &BTreeMap<Axis, Units>, replica: u32, replicas: u32) -> Vec<(Axis, Units)> {
    let shares = owned.iter().map(|(axis, units)| {
        // Another replica begins in each axis, so that none writes more than the others.
        let turn = 2 * axis.layer.unwrap_or_default() + axis.family as u32;
        (*axis, units.iter().filter(|unit| unit.wrapping_add(turn) % replicas == replica).collect())
    });
    shares.filter(|(_, units): &(Axis, Units)| !units.is_empty()).collect()
}

/// A copy of one rank's share at one step, to be written while training goes on.
#[derive(Debug)]
pub struct Snapshot {
    pub heading: Heading,
    /// With the replicated parameters, `None`, if they are its to write.
    pub pieces: Vec<(Option<Axis>, Units)>,
    /// The state of all pieces as it travels between ranks, one after the other.
    pub state: Vec<u8>,
}

/// What became of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Of the files that were written, and of those that were linked since an earlier checkpoint has them.
    pub bytes: u64,
    pub linked: u64,
    /// It was the last part: the checkpoint is complete.
    pub complete: bool,
}

impl Snapshot {
    /// Each file's units, with where its state begins.
    fn files<'a>(&'a self, model: &'a ModelSpec) -> impl Iterator<Item = (Option<Axis>, Units, &'a [u8])> {
        let mut at = 0;
        let pieces = self.pieces.iter().flat_map(move |(axis, units)| {
            let unit = unit_bytes(model, *axis);
            let groups: Vec<(Option<Axis>, Units, usize)> = match axis {
                None => vec![(None, units.clone(), unit)],
                Some(_) => {
                    let all: Vec<u32> = units.iter().collect();
                    let groups = all.chunks((FILE_BYTES / unit).max(1));
                    groups.map(|group| (*axis, group.iter().copied().collect(), group.len() * unit)).collect()
                }
            };
            groups
        });
        pieces.map(move |(axis, units, length)| {
            let state = self.state.get(at..at + length).unwrap_or_default();
            at += length;
            (axis, units, state)
        })
    }
}

impl Store {
    /// Writes a rank's part, and the manifest if it was the last. `writer` names the rank: nobody else writes under that
    /// name. `told` hears how many bytes of how many are done.
    ///
    /// # Errors
    /// Nothing of earlier checkpoints has changed; this one has no manifest.
    pub fn write(
        &self,
        snapshot: &Snapshot,
        writer: &str,
        mut told: impl FnMut(u64, u64),
    ) -> Result<Written, CheckpointError> {
        let model = &snapshot.heading.model;
        let folder = self.folder(&snapshot.heading.id());
        disk::make_folder(&folder)?;
        let earlier: Vec<PathBuf> =
            self.list()?.into_iter().filter(|found| found.complete).map(|found| found.folder).collect();
        let total = snapshot.state.len() as u64;
        let (mut done, mut bytes, mut linked) = (0, 0, 0);
        let mut files: Vec<FileEntry> = Vec::new();
        for (axis, units, state) in snapshot.files(model) {
            let (entry, content) = encode(model, axis, &units, state)?;
            if link(&folder, &entry, &earlier) {
                linked += entry.bytes;
            } else {
                disk::write_whole(&folder.join(&entry.file), writer, &content)?;
                bytes += entry.bytes;
            }
            files.push(entry);
            done += state.len() as u64;
            told(done, total);
        }
        disk::sync_folder(&folder)?;
        let part = Part { heading: snapshot.heading.clone(), files };
        let path = folder.join(format!("part-{writer}.json"));
        let text =
            serde_json::to_vec_pretty(&part).map_err(|error| CheckpointError::damaged(&path, error))?;
        disk::write_whole(&path, writer, &text)?;
        disk::sync_folder(&folder)?;
        let complete = self.complete(&folder, writer)?;
        Ok(Written { bytes, linked, complete })
    }
}

/// The same file of an earlier checkpoint, or of an earlier try at this one. A file's name holds the checksum of its content.
fn link(folder: &Path, entry: &FileEntry, earlier: &[PathBuf]) -> bool {
    let there = |path: &Path| fs::metadata(path).is_ok_and(|found| found.len() == entry.bytes);
    let path = folder.join(&entry.file);
    there(&path)
        || earlier.iter().map(|folder| folder.join(&entry.file)).any(|source| {
            // A file system without links gets another copy.
            there(&source) && fs::hard_link(&source, &path).is_ok()
        })
}
