//! Files that the operator names.

use crate::failure::Failure;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Bytes of a job file at most.
pub(crate) const LARGEST_JOB: u64 = 1 << 20;

/// The file's name for errors, and its text of at most `most` bytes.
pub(crate) fn read(path: &Path, most: u64) -> Result<(String, String), Failure> {
    let name = path.display().to_string();
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(most + 1).read_to_string(&mut text));
    read.map_err(|error| Failure::Usage(format!("{name}: {error}; name a text file that can be read")))?;
    if text.len() as u64 > most {
        return Err(Failure::Usage(format!("{name}: larger than {most} bytes, which are allowed")));
    }
    Ok((name, text))
}
