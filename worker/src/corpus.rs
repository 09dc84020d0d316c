//! The training data: text files, read as byte tokens.

use crate::order::window_of;
use reknit_model::Batch;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// All files as one stream of bytes, cut into windows of `seq_len` tokens (and the one to predict after the last).
#[derive(Debug)]
pub struct Corpus {
    /// Each file with its offset in the stream.
    files: Vec<(PathBuf, u64)>,
    bytes: u64,
    seq_len: u64,
    seed: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    #[error(
        "data: cannot read {path}: {source}; make the file readable on every node, or correct `files` in the job file"
    )]
    Read { path: String, source: std::io::Error },
    #[error("data: {0}: bad pattern; correct `files` in the job file")]
    Pattern(String),
    #[error("data: the pattern {0} matches no file; correct `files` in the job file")]
    NoMatch(String),
    #[error("data: {bytes} bytes in all, but one sample needs {needed}; give more text or a smaller seq_len")]
    TooSmall { bytes: u64, needed: u64 },
    #[error("data: {path} is shorter than it was when the job started; put it back as it was")]
    Changed { path: String },
    #[error(
        "data: {bytes} bytes in {files} files here, but other workers of the job find other sizes; make the files the \
         same on every node, and as they were when the job started"
    )]
    Differs { bytes: u64, files: usize },
}

impl Corpus {
    /// Looks at the size of every file, and that each can be opened. Folders among a pattern's matches are left out.
    pub fn open(patterns: &[String], seq_len: u32, seed: u64) -> Result<Self, CorpusError> {
        let mut files = Vec::new();
        let mut bytes = 0;
        for path in expand(patterns)? {
            let read = |source| CorpusError::Read { path: path.display().to_string(), source };
            let length = readable_file(&path).map_err(read)?;
            files.push((path, bytes));
            bytes += length;
        }
        let seq_len = u64::from(seq_len);
        if bytes <= seq_len {
            return Err(CorpusError::TooSmall { bytes, needed: seq_len + 1 });
        }
        Ok(Self { files, bytes, seq_len, seed })
    }

    /// How many different samples there are.
    pub fn windows(&self) -> u64 {
        (self.bytes - 1) / self.seq_len
    }

    /// Of the size of every file: equal on all who cut the same samples out of the same files.
    pub fn fingerprint(&self) -> u32 {
        let ends = self.files.iter().skip(1).map(|(_, start)| *start).chain([self.bytes]);
        crc32fast::hash(&ends.flat_map(u64::to_le_bytes).collect::<Vec<_>>())
    }

    /// Checks this rank's data against that of all ranks, given everybody's [`Corpus::fingerprint`]: with other files,
    /// the same number would mean another sample. The most common one is right, the first of those that are equally common.
    ///
    /// # Errors
    /// This rank is one of those that differ.
    pub fn check_against(&self, fingerprints: &[u32]) -> Result<(), CorpusError> {
        let votes = |of: u32| fingerprints.iter().filter(|other| **other == of).count();
        // Of equal ones `max_by_key` takes the last.
        let common = fingerprints.iter().rev().max_by_key(|of| votes(**of));
        if common.is_some_and(|common| *common != self.fingerprint()) {
            return Err(CorpusError::Differs { bytes: self.bytes, files: self.files.len() });
        }
        Ok(())
    }

    /// The samples numbered `first .. first + count` of the job's order.
    pub fn batch(&self, first: u64, count: usize) -> Result<Batch, CorpusError> {
        let length = self.seq_len as usize + 1;
        let mut bytes = vec![0; length];
        let mut tokens = Vec::with_capacity(count * length);
        for number in first..first + count as u64 {
            self.read(window_of(self.seed, number, self.windows()) * self.seq_len, &mut bytes)?;
            tokens.extend(bytes.iter().map(|&byte| u32::from(byte)));
        }
        Ok(Batch {
            tokens,
            samples: count,
            seq_len: self.seq_len as usize,
            seed: self.seed,
            first_sample: first,
        })
    }

    fn read(&self, mut at: u64, mut out: &mut [u8]) -> Result<(), CorpusError> {
        let mut index = self.files.partition_point(|(_, start)| *start <= at) - 1;
        while !out.is_empty() {
            let (path, start) = &self.files[index];
            let end = self.files.get(index + 1).map_or(self.bytes, |(_, next)| *next);
            let take = out.len().min((end - at) as usize);
            let (now, later) = out.split_at_mut(take);
            File::open(path).and_then(|file| file.read_exact_at(now, at - start)).map_err(|source| {
                let path = path.display().to_string();
                match source.kind() {
                    std::io::ErrorKind::UnexpectedEof => CorpusError::Changed { path },
                    _ => CorpusError::Read { path, source },
                }
            })?;
            at += take as u64;
            out = later;
            index += 1;
        }
        Ok(())
    }
}

/// The length of a file that can be opened. Looked at first: opening a pipe would wait for its writer.
fn readable_file(path: &Path) -> std::io::Result<u64> {
    let what = std::fs::metadata(path)?;
    if !what.is_file() {
        return Err(std::io::Error::other("it is not a file"));
    }
    File::open(path)?;
    Ok(what.len())
}

/// The files that the patterns name, in the order of the patterns and sorted within each.
fn expand(patterns: &[String]) -> Result<Vec<PathBuf>, CorpusError> {
    let mut all = Vec::new();
    for pattern in patterns {
        if !pattern.contains(['*', '?', '[']) {
            all.push(PathBuf::from(pattern));
            continue;
        }
        let matches = glob::glob(pattern).map_err(|_| CorpusError::Pattern(pattern.clone()))?;
        let before = all.len();
        for path in matches {
            let path = path.map_err(|error| CorpusError::Read {
                path: error.path().display().to_string(),
                source: error.into(),
            })?;
            if !path.is_dir() {
                all.push(path);
            }
        }
        if all.len() == before {
            return Err(CorpusError::NoMatch(pattern.clone()));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_run_over_file_borders_and_passes_repeat_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let text: Vec<u8> = (0..=100).collect();
        let names = ["a", "b", "c"].map(|name| dir.path().join(name).display().to_string());
        for (name, part) in names.iter().zip([&text[..13], &text[13..13], &text[13..]]) {
            std::fs::write(name, part).unwrap();
        }
        let corpus = Corpus::open(&names, 10, 3).unwrap();
        assert_eq!(corpus.windows(), 10);
        let batch = corpus.batch(0, 10).unwrap();
        let mut starts = Vec::new();
        for sample in batch.tokens.chunks(11) {
            assert!(sample.windows(2).all(|pair| pair[1] == pair[0] + 1), "{sample:?}");
            starts.push(sample[0]);
        }
        starts.sort_unstable();
        assert_eq!(starts, (0..10).map(|i| i * 10).collect::<Vec<_>>());
    }

    #[test]
    fn errors_say_what_and_where() {
        let missing = Corpus::open(&["/no/such/file".to_owned()], 10, 0).unwrap_err().to_string();
        assert!(missing.contains("/no/such/file"), "{missing}");
        let none = Corpus::open(&["/no/such/*.rs".to_owned()], 10, 0).unwrap_err().to_string();
        assert!(none.contains("/no/such/*.rs"), "{none}");
        let device = Corpus::open(&["/dev/null".to_owned()], 10, 0).unwrap_err().to_string();
        assert!(device.contains("/dev/null: it is not a file"), "{device}");
    }

    #[test]
    fn a_folder_is_no_text() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("folder")).unwrap();
        std::fs::write(dir.path().join("text"), [7; 21]).unwrap();
        let pattern = dir.path().join("*").display().to_string();
        assert_eq!(Corpus::open(&[pattern], 10, 0).unwrap().batch(0, 2).unwrap().tokens, [7; 22]);
        let folder = dir.path().join("folder").display().to_string();
        assert!(matches!(Corpus::open(&[folder], 10, 0), Err(CorpusError::Read { .. })));
    }

    #[test]
    fn who_has_other_files_than_most_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let open = |parts: [usize; 2]| {
            let names = ["a", "b"].map(|name| dir.path().join(name).display().to_string());
            for (name, len) in names.iter().zip(parts) {
                std::fs::write(name, vec![0; len]).unwrap();
            }
            Corpus::open(&names, 10, 0).unwrap()
        };
        let (usual, longer, shifted) = (open([20, 20]), open([20, 30]), open([10, 30]));
        let [u, l, s] = [&usual, &longer, &shifted].map(Corpus::fingerprint);
        assert!(u != l && u != s);
        assert!(usual.check_against(&[l, u, u, s]).is_ok());
        assert!(matches!(longer.check_against(&[l, u, u, s]), Err(CorpusError::Differs { .. })));
        assert!(shifted.check_against(&[l, u, u, s]).is_err());
        assert!(usual.check_against(&[u, l]).is_ok() && longer.check_against(&[u, l]).is_err());
    }
}
