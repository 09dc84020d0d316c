//! The files that a plan is made from.

use crate::failure::Failure;
use crate::files::{LARGEST_JOB, read};
use reknit_layout::{FileError, HoldingsFile, JobSpec, Topology};
use std::path::Path;

// Bytes at most: larger than any that is meant, small enough to be held in memory.
const LARGEST_TOPOLOGY: u64 = 64 << 20;
const LARGEST_HOLDINGS: u64 = 256 << 20;

pub(crate) fn job(path: &Path) -> Result<JobSpec, Failure> {
    let (name, text) = read(path, LARGEST_JOB)?;
    JobSpec::parse(&text, &name).map_err(Failure::usage)
}

pub(crate) fn topology(path: Option<&Path>, job: &JobSpec) -> Result<Topology, Failure> {
    let Some(path) = path else { return Ok(Topology::nominal(job)) };
    let (name, text) = read(path, LARGEST_TOPOLOGY)?;
    Topology::parse(&text, &name).map_err(Failure::usage)
}

pub(crate) fn holdings(path: &Path, job: &JobSpec) -> Result<HoldingsFile, Failure> {
    let (name, text) = read(path, LARGEST_HOLDINGS)?;
    let mut reader = serde_json::Deserializer::from_str(&text);
    let read = HoldingsFile::read(job, &mut reader);
    read.and_then(|file| reader.end().map(|()| file)).map_err(|error| {
        let text = error.to_string();
        // The parser says where it stopped after what is wrong.
        let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
        Failure::usage(FileError::on_line(&name, Some(error.line()), what))
    })
}
