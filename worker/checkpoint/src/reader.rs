//! A checkpoint that is there: any rank takes what it shall own out of it, whatever the layout was.

use crate::codec::Stored;
use crate::manifest::{Manifest, missing};
use crate::{CheckpointError, Store, store};
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
                let here = "it has neither a manifest.json nor any part-*.json".to_owned();
                let elsewhere = Store::new(folder).beneath().map(|beneath| format!("{here}; {beneath}"));
                return Err(not_one(elsewhere.unwrap_or(here)));
            }
            return Err(CheckpointError::Incomplete { path: folder.to_owned(), missing });
        }
        let manifest = Manifest::read(&path)?;
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

    /// Gives `take` the state of each of these units, and of the replicated parameters, no
    /// axis, as it travels between ranks. Every file that is read is checked against its checksum first, and one at a time
    /// is in memory.
    ///
    /// # Errors
    /// A file is gone or damaged, or a unit is none of the model's; or that of `take`, after which nothing more is read.
    pub fn load<E: From<CheckpointError>>(
        &self,
        owned: &BTreeMap<Axis, Units>,
        mut take: impl FnMut(Option<Axis>, &Units, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let model = &self.manifest.heading.model;
        let mut left = owned.clone();
        let mut replicated = false;
        let mut state = Vec::new();
        for entry in &self.manifest.files {
            let wanted = match entry.axis {
                None if replicated => continue,
                None => Units::new(),
                Some(axis) => {
                    let Some(left) = left.get_mut(&axis) else { continue };
                    let wanted = entry.units.intersection(left);
                    *left = left.difference(&wanted);
                    if wanted.is_empty() {
                        continue;
                    }
                    wanted
                }
            };
            let stored = Stored::read(&self.folder, model, entry)?;
            if entry.axis.is_none() {
                replicated = true;
                stored.unit(0, &mut state);
                take(None, &wanted, &state)?;
            }
            let mut next = wanted.iter().peekable();
            for (position, unit) in entry.units.iter().enumerate() {
                if next.next_if_eq(&unit).is_some() {
                    stored.unit(position, &mut state);
                    take(entry.axis, &Units::range(unit, unit + 1), &state)?;
                }
            }
        }
        match left.into_iter().find(|(_, units)| !units.is_empty()) {
            Some((axis, units)) => {
                Err(CheckpointError::Missing { path: self.folder.clone(), axis, units }.into())
            }
            None => Ok(()),
        }
    }

    /// Reads every file and checks it. `told` hears of each: how many of how many are done, and what is wrong with it.
    /// Returns how many are.
    pub fn verify(&self, mut told: impl FnMut(usize, usize, Option<&CheckpointError>)) -> usize {
        let (model, files) = (&self.manifest.heading.model, &self.manifest.files);
        let mut bad = 0;
        for (number, entry) in (1..).zip(files) {
            let problem = Stored::read(&self.folder, model, entry).err();
            bad += usize::from(problem.is_some());
            told(number, files.len(), problem.as_ref());
        }
        bad
    }
}
