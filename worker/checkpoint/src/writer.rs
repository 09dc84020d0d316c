//! What one rank writes: its share of the units it owns.

use crate::codec::{encode, unit_bytes};
use crate::manifest::{Part, text};
use crate::store::parts;
use crate::{CheckpointError, Heading, Store, disk};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use std::collections::{BTreeMap, BTreeSet};
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
    /// The state of all units as it travels between ranks, piece by piece, one unit after the other.
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
    /// Nothing of earlier checkpoints has changed; this one has no manifest, and what was written of it is gone again.
    pub fn write(
        &self,
        snapshot: &Snapshot,
        writer: &str,
        told: impl FnMut(u64, u64),
    ) -> Result<Written, CheckpointError> {
        let folder = self.folder(&snapshot.heading.id());
        disk::make_folder(&folder)?;
        let mut made = Vec::new();
        let (bytes, linked) = self
            .write_part(snapshot, writer, &folder, &mut made, told)
            .inspect_err(|_| take_back(&folder, &made))?;
        disk::sync_folder(&folder)?;
        let complete = self.complete(&folder, writer)?;
        Ok(Written { bytes, linked, complete })
    }

    /// Bytes written and linked. `made`: each name that was not there before.
    fn write_part(
        &self,
        snapshot: &Snapshot,
        writer: &str,
        folder: &Path,
        made: &mut Vec<PathBuf>,
        mut told: impl FnMut(u64, u64),
    ) -> Result<(u64, u64), CheckpointError> {
        let model = &snapshot.heading.model;
        let path = folder.join(format!("part-{writer}.json"));
        let mut part = Part { heading: snapshot.heading.clone(), files: Vec::new() };
        if !path.exists() {
            // Whose all this is must be known also if this process does not come to the end.
            made.push(path.clone());
            disk::write_whole(&path, writer, &text(&path, &part)?)?;
        }
        let earlier: Vec<PathBuf> =
            self.list()?.into_iter().filter(|found| found.complete).map(|found| found.folder).collect();
        let total = snapshot.state.len() as u64;
        let (mut done, mut bytes, mut linked) = (0, 0, 0);
        for (axis, units, state) in snapshot.files(model) {
            let (entry, content) = encode(model, axis, &units, state)?;
            let file = folder.join(&entry.file);
            if disk::holds(&file, &content) {
                linked += entry.bytes;
            } else if link(&file, &content, earlier.iter().map(|folder| folder.join(&entry.file))) {
                linked += entry.bytes;
                made.push(file);
            } else {
                disk::write_whole(&file, writer, &content)?;
                bytes += entry.bytes;
                made.push(file);
            }
            part.files.push(entry);
            done += state.len() as u64;
            told(done, total);
        }
        disk::sync_folder(folder)?;
        disk::write_whole(&path, writer, &text(&path, &part)?)?;
        Ok((bytes, linked))
    }
}

/// The same file of an earlier checkpoint. A file's name holds the checksum of its content, which may be damaged by now.
fn link(file: &Path, content: &[u8], mut earlier: impl Iterator<Item = PathBuf>) -> bool {
    // A file system without links gets another copy.
    earlier.any(|source| disk::holds(&source, content) && fs::hard_link(&source, file).is_ok())
}

/// Removes what a writer made that does not come to the end, so that a full disk has room again. What another try's part
/// lists stays.
fn take_back(folder: &Path, made: &[PathBuf]) {
    let Ok(parts) = parts(folder) else { return };
    let listed: BTreeSet<PathBuf> =
        parts.iter().flat_map(|part| &part.files).map(|entry| folder.join(&entry.file)).collect();
    // Its part comes last: it says whose the others are.
    for path in made.iter().rev().filter(|path| !listed.contains(*path)) {
        let _ = fs::remove_file(path);
    }
    // Unless others write here too.
    let _ = fs::remove_dir(folder);
}
