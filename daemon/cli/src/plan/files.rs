//! The files that a plan is made from.

use crate::failure::Failure;
use reknit_layout::{FileError, HoldingsFile, JobSpec, Topology};
use std::fs::File;
use std::io::Read;
use std::path::Path;

// Larger than any that is meant, small enough to be held in memory.
const LARGEST_JOB: u64 = 1 << 20;
const LARGEST_TOPOLOGY: u64 = 64 << 20;
const LARGEST_HOLDINGS: u64 = 256 << 20;

pub(crate) fn job(path: &Path) -> Result<JobSpec, Failure> {
    let (name, text) = read(path, LARGEST_JOB)?;
    JobSpec::parse(&text, &name).map_err(|error| Failure::Usage(error.to_string()))
}

pub(crate) fn topology(path: Option<&Path>, job: &JobSpec) -> Result<Topology, Failure> {
    let Some(path) = path else { return Ok(Topology::nominal(job)) };
    let (name, text) = read(path, LARGEST_TOPOLOGY)?;
    Topology::parse(&text, &name).map_err(|error| Failure::Usage(error.to_string()))
}

pub(crate) fn holdings(path: &Path, job: &JobSpec) -> Result<HoldingsFile, Failure> {
    let (name, text) = read(path, LARGEST_HOLDINGS)?;
    let mut reader = serde_json::Deserializer::from_str(&text);
    let read = HoldingsFile::read(job, &mut reader);
    read.and_then(|file| reader.end().map(|()| file)).map_err(|error| {
        let text = error.to_string();
        // The parser says where it stopped after what is wrong.
        let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
        Failure::Usage(FileError::on_line(&name, Some(error.line()), what).to_string())
    })
}

fn read(path: &Path, most: u64) -> Result<(String, String), Failure> {
    let name = path.display().to_string();
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(most + 1).read_to_string(&mut text));
    read.map_err(|error| Failure::Usage(format!("{name}: {error}; name a text file that can be read")))?;
    if text.len() as u64 > most {
        return Err(Failure::Usage(format!("{name}: larger than {most} bytes, which are allowed")));
    }
    Ok((name, text))
}
