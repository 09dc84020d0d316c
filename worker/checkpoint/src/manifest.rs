//! What a checkpoint consists of.

use crate::{CheckpointError, codec, disk};
use reknit_layout::job::{Dtype, ModelSpec};
use reknit_layout::{Axis, CheckpointId, JobSpec, Step, Units};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;

/// Of what is written; no other is read.
pub const FORMAT_VERSION: u32 = 1;

/// Of a manifest or a part. That of 400 billion parameters in the smallest units has 0.4 GB.
const MOST_BYTES: u64 = 1 << 30;

/// What a state is of: the same in every part of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Heading {
    pub version: u32,
    pub job: String,
    /// SHA-256 of the job file with every default written out.
    pub job_sha256: String,
    /// So many steps are committed.
    pub step: Step,
    /// Of the job and its replicated parameters, 16 hexadecimal digits: neither two jobs in one folder nor two ways to
    /// the same step write into one checkpoint.
    pub digest: String,
    /// Samples go on behind those of `step` in the order that follows from this.
    pub seed: u64,
    /// Of `step`.
    pub vote: Option<SavedVote>,
    pub model: ModelSpec,
}

/// What the vote on a step decided.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SavedVote {
    #[serde(deserialize_with = "number")]
    pub grad_norm_squared: f64,
    #[serde(deserialize_with = "number")]
    pub loss: f64,
}

/// JSON writes `null` for what is no number.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// One safetensors file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub file: String,
    /// `None`: the replicated parameters.
    pub axis: Option<Axis>,
    /// In the order of the file's first dimension.
    pub units: Units,
    pub bytes: u64,
    /// Of the whole file.
    pub sha256: String,
}

/// What one writer wrote.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Part {
    #[serde(flatten)]
    pub(crate) heading: Heading,
    pub(crate) files: Vec<FileEntry>,
}

/// All of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    #[serde(flatten)]
    pub heading: Heading,
    /// When it was complete, in microseconds since the Unix epoch.
    pub written_us: u64,
    pub files: Vec<FileEntry>,
}

/// Read before the rest, which another version may write differently.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl Heading {
    /// `replicated`: the digest of the replicated parameters.
    pub fn new(job: &JobSpec, step: Step, replicated: &str, vote: Option<SavedVote>) -> Self {
        let job_sha256 = job_sha256(job);
        let digest = sha256(format!("{job_sha256} {replicated}").as_bytes())[..16].to_owned();
        Self {
            version: FORMAT_VERSION,
            job: job.name.clone(),
            job_sha256,
            step,
            digest,
            seed: job.run.seed,
            vote,
            model: job.model.clone(),
        }
    }

    pub fn id(&self) -> CheckpointId {
        CheckpointId { step: self.step, digest: self.digest.clone() }
    }

    /// Whether a model of this shape has the same units, each of the same numbers. The length of samples, dropout and
    /// recomputation do not matter, nor whether the f32 numbers of a unit are used as f32 or as bf16.
    ///
    /// # Errors
    /// What differs, in words.
    pub fn fits(&self, model: &ModelSpec) -> Result<(), String> {
        let ours = [&self.model, model].map(|model| {
            let ModelSpec { layers, hidden, heads, kv_heads, ffn, ffn_block, vocab, vocab_block, .. } = model;
            [
                ("layers", *layers),
                ("hidden", *hidden),
                ("heads", *heads),
                ("kv_heads", *kv_heads),
                ("head_dim", model.head_dim()),
                ("ffn", *ffn),
                ("ffn_block", *ffn_block),
                ("vocab", *vocab),
                ("vocab_block", *vocab_block),
            ]
        });
        let differs = |name, here: &dyn Display, wanted: &dyn Display| {
            Err(format!("its {name} is {here}, and the job's {wanted}"))
        };
        if let Some(((name, here), (_, wanted))) =
            ours[0].iter().zip(&ours[1]).find(|(here, wanted)| here != wanted)
        {
            return differs(*name, here, wanted);
        }
        if self.model.tie_embeddings != model.tie_embeddings {
            return differs("tie_embeddings", &self.model.tie_embeddings, &model.tie_embeddings);
        }
        if number_bytes(&self.model) != number_bytes(model) {
            return differs("dtype", &dtype_name(&self.model), &dtype_name(model));
        }
        Ok(())
    }
}

impl Manifest {
    /// Of all its files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }
}

impl Part {
    pub(crate) fn read(path: &Path) -> Result<Self, CheckpointError> {
        read(path, |part: &Self| (&part.heading, &part.files))
    }
}

impl Manifest {
    pub(crate) fn read(path: &Path) -> Result<Self, CheckpointError> {
        read(path, |manifest: &Self| (&manifest.heading, &manifest.files))
    }
}

/// Reads a part or a manifest. What comes out of it can be worked with: the model makes sense, and the files are of its units.
fn read<T: DeserializeOwned>(
    path: &Path,
    content: impl Fn(&T) -> (&Heading, &Vec<FileEntry>),
) -> Result<T, CheckpointError> {
    let (file, length) = disk::open(path)?;
    if length > MOST_BYTES {
        return Err(CheckpointError::damaged(path, format!("it has {length} bytes, more than any has")));
    }
    let text = disk::read(file, length).map_err(CheckpointError::io(path))?;
    let damaged = |error: serde_json::Error| CheckpointError::damaged(path, error);
    let version: Version = serde_json::from_slice(&text).map_err(damaged)?;
    if version.version != FORMAT_VERSION {
        let (found, known) = (version.version, FORMAT_VERSION);
        return Err(CheckpointError::Version { path: path.to_owned(), found, known });
    }
    let read = serde_json::from_slice(&text).map_err(damaged)?;
    let (Heading { model, .. }, files) = content(&read);
    let sound = model.validate().map_err(|error| format!("its model: {error}"));
    sound
        .and_then(|()| files.iter().try_for_each(|file| codec::check(model, file)))
        .map_err(|problem| CheckpointError::damaged(path, problem))?;
    Ok(read)
}

/// The text of a part or a manifest.
pub(crate) fn text(path: &Path, content: &impl Serialize) -> Result<Vec<u8>, CheckpointError> {
    let text = serde_json::to_vec_pretty(content).map_err(|error| CheckpointError::damaged(path, error))?;
    if text.len() as u64 > MOST_BYTES {
        return Err(CheckpointError::damaged(path, "it would be larger than what is read again"));
    }
    Ok(text)
}

/// What of the model no file has (COVER); `None`: nothing is missing.
pub(crate) fn missing(model: &ModelSpec, files: &[FileEntry]) -> Option<String> {
    let mut held: BTreeMap<Option<Axis>, Units> = BTreeMap::new();
    for file in files {
        let units = held.entry(file.axis).or_default();
        *units = units.union(&file.units);
    }
    let lacks = model.axes().into_iter().filter_map(|axis| {
        let all = Units::range(0, model.units(axis.family));
        let left = held.get(&Some(axis)).map_or(all.clone(), |held| all.difference(held));
        (!left.is_empty()).then(|| format!("{axis} units {left}"))
    });
    let replicated = (!held.contains_key(&None)).then(|| "the replicated parameters".to_owned());
    let lacks: Vec<String> = replicated.into_iter().chain(lacks).collect();
    let more = lacks.len().saturating_sub(3);
    match more {
        _ if lacks.is_empty() => None,
        0 => Some(lacks.join(", ")),
        more => Some(format!("{} and {more} more", lacks[..3].join(", "))),
    }
}

/// Of the job file with every default written out.
pub fn job_sha256(job: &JobSpec) -> String {
    sha256(job.to_toml().as_bytes())
}

/// Of weights and moments as they are written.
pub(crate) fn number_bytes(model: &ModelSpec) -> usize {
    match model.dtype {
        // The masters of bf16 weights are f32.
        Dtype::F32 | Dtype::Bf16 => 4,
        Dtype::F64 => 8,
    }
}

/// As a job file has it.
fn dtype_name(model: &ModelSpec) -> &'static str {
    match model.dtype {
        Dtype::F32 => "f32",
        Dtype::Bf16 => "bf16",
        Dtype::F64 => "f64",
    }
}

/// In hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
