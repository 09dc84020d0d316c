//! A checkpoint that is there: any rank takes what it shall own out of it, whatever the layout was.

use crate::manifest::{FileEntry, Manifest, missing, read};
use crate::{CheckpointError, codec, store};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A complete checkpoint.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
}

/// Some units' state as it travels between ranks; that of the replicated parameters where `axis` is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    pub axis: Option<Axis>,
    pub units: Units,
    pub state: Vec<u8>,
}

impl Checkpoint {
    /// # Errors
    /// It is not there, not complete, of another format, or its manifest makes no sense.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join("manifest.json");
        let not_one = |problem: String| CheckpointError::NotOne { path: folder.to_owned(), problem };
        if !folder.is_dir() {
            return Err(not_one("there is no such folder".to_owned()));
        }
        if !path.exists() {
            let missing = store::lacks(folder)?;
            if missing == "everything" {
                return Err(not_one("it has neither a manifest.json nor any part-*.json".to_owned()));
            }
            return Err(CheckpointError::Incomplete { path: folder.to_owned(), missing });
        }
        let manifest: Manifest = read(&path)?;
        manifest
            .heading
            .model
            .validate()
            .map_err(|error| CheckpointError::damaged(&path, format!("its model: {error}")))?;
        let axes = manifest.heading.model.axes();
        let strange = manifest.files.iter().find(|file| {
            let all = file.axis.map_or(0, |axis| manifest.heading.model.units(axis.family));
            let known = file.axis.is_none_or(|axis| axes.contains(&axis));
            !known || !file.units.difference(&Units::range(0, all)).is_empty()
        });
        if let Some(file) = strange {
            let problem = format!("{} has units that the model has not", file.file);
            return Err(CheckpointError::damaged(&path, problem));
        }
        if let Some(missing) = missing(&manifest.heading.model, &manifest.files) {
            return Err(CheckpointError::damaged(&path, format!("it lacks {missing}")));
        }
        Ok(Self { folder: folder.to_owned(), manifest })
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Checks that a job with this model can take it.
    ///
    /// # Errors
    /// [`CheckpointError::OtherModel`], with what differs.
    pub fn fits(&self, model: &ModelSpec) -> Result<(), CheckpointError> {
        let fits = self.manifest.heading.fits(model);
        fits.map_err(|what| CheckpointError::OtherModel { path: self.folder.clone(), what })
    }

    /// The state of these units and of the replicated parameters. Every file that is read is checked against its checksum,
    /// one file in memory at a time.
    ///
    /// # Errors
    /// A file is gone or damaged, or a unit is none of the model's.
    pub fn load(&self, owned: &BTreeMap<Axis, Units>) -> Result<Vec<Block>, CheckpointError> {
        let model = &self.manifest.heading.model;
        let mut left = owned.clone();
        let mut replicated = false;
        let mut blocks = Vec::new();
        for entry in &self.manifest.files {
            let wanted = match entry.axis {
                Some(axis) => match left.get_mut(&axis) {
                    Some(left) => {
                        let wanted = entry.units.intersection(left);
                        *left = left.difference(&wanted);
                        wanted
                    }
                    None => continue,
                },
                None if replicated => continue,
                None => Units::default(),
            };
            replicated |= entry.axis.is_none();
            if entry.axis.is_some() && wanted.is_empty() {
                continue;
            }
            blocks.push(self.block(model, entry, wanted)?);
        }
        match left.into_iter().find(|(_, units)| !units.is_empty()) {
            Some((axis, units)) => Err(CheckpointError::Missing { path: self.folder.clone(), axis, units }),
            None => Ok(blocks),
        }
    }

    fn block(&self, model: &ModelSpec, entry: &FileEntry, wanted: Units) -> Result<Block, CheckpointError> {
        let states = codec::read(&self.folder, &self.manifest.heading, entry)?;
        let mut state = Vec::with_capacity(wanted.len() as usize * codec::unit_bytes(model, entry.axis));
        if entry.axis.is_none() {
            codec::unit_state(model, None, &states, 0, &mut state);
        }
        for position in wanted.iter().filter_map(|unit| entry.units.position(unit)) {
            codec::unit_state(model, entry.axis, &states, position as usize, &mut state);
        }
        Ok(Block { axis: entry.axis, units: wanted, state })
    }

    /// Reads every file and checks it. `told` hears of each: how many of how many are done, and what is wrong with it.
    /// Returns how many are.
    pub fn verify(&self, mut told: impl FnMut(usize, usize, Option<&CheckpointError>)) -> usize {
        let files = &self.manifest.files;
        let mut bad = 0;
        for (number, entry) in (1..).zip(files) {
            let problem = codec::read(&self.folder, &self.manifest.heading, entry).err();
            bad += usize::from(problem.is_some());
            told(number, files.len(), problem.as_ref());
        }
        bad
    }
}
