//! All data files as one stream of tokens.

use super::cache;
use super::map::Map;
use super::order::window_of;
use reknit_layout::job::{DataSpec, ModelSpec, Tokens};
use reknit_model::Batch;
use std::io;
use std::path::{Path, PathBuf};

mod check;

/// The stream of all files, cut into windows of `seq_len` tokens (and the one to predict after the last).
#[derive(Debug)]
pub struct Corpus {
    files: Vec<Part>,
    width: Width,
    tokens: u64,
    vocab: u32,
    seq_len: u64,
    seed: u64,
}

/// One file of the stream.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    /// Its first token's place in the stream.
    start: u64,
    map: Option<Map>,
}

/// Bytes of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    U8 = 1,
    U16 = 2,
    U32 = 4,
}

#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    #[error(
        "data: cannot read {path}: {source}; make the file readable on every node, or correct `files` in the job file"
    )]
    Read { path: String, source: io::Error },
    #[error("data: {0}: bad pattern; correct `files` in the job file")]
    Pattern(String),
    #[error("data: the pattern {0} matches no file; correct `files` in the job file")]
    NoMatch(String),
    #[error("data: {what} in all, but one sample needs {needed} tokens; give more text or a smaller seq_len")]
    TooSmall { what: String, needed: u64 },
    #[error("data: {path} is shorter than it was when the job started; put it back as it was")]
    Changed { path: String },
    #[error(
        "data: {path} has {bytes} bytes, which is no whole number of {width}-byte tokens; is data.tokenizer right?"
    )]
    Torn { path: String, bytes: u64, width: u64 },
    #[error(
        "data: token {token} at position {at} of {path} is outside of model.vocab = {vocab}; was it made for another model?"
    )]
    Vocabulary { path: String, at: u64, token: u32, vocab: u32 },
    #[error("data: {path} is no UTF-8 text from byte {at} on")]
    NotText { path: String, at: usize },
    #[error("data: the tokenizer {path}: {problem}")]
    Tokenizer { path: String, problem: String },
    #[error("data: the tokens cannot be kept in {path}: {source}; set REKNIT_CACHE_DIR for the agents")]
    Cache { path: String, source: io::Error },
    #[error(
        "data: {tokens} tokens in {files} files here, but other workers of the job find other data; make the files the \
         same on every node, and as they were when the job started"
    )]
    Differs { tokens: u64, files: usize },
}

impl CorpusError {
    pub(crate) fn read(path: &Path, source: io::Error) -> Self {
        Self::Read { path: path.display().to_string(), source }
    }
}

impl Corpus {
    /// Maps every file. Folders among a pattern's matches are left out. Text for a tokenizer is made into tokens first,
    /// if this node has not done so before; token numbers are looked at, each of them, for those that the model does not have.
    pub fn open(data: &DataSpec, model: &ModelSpec, seed: u64) -> Result<Self, CorpusError> {
        let corpus = Self::map(data, model, seed)?;
        match data.tokens() {
            Some(Tokens::U16 | Tokens::U32) => corpus.check_once(&cache::folder(), check::LARGE)?,
            // The tokenizer has no other tokens, and there are 256 bytes.
            Some(Tokens::Bytes | Tokens::Text(_)) | None => {}
        }
        Ok(corpus)
    }

    fn map(data: &DataSpec, model: &ModelSpec, seed: u64) -> Result<Self, CorpusError> {
        let paths = expand(&data.files)?;
        let (paths, width) = match data.tokens() {
            Some(Tokens::Bytes) | None => (paths, Width::U8),
            Some(Tokens::U16) => (paths, Width::U16),
            Some(Tokens::U32) => (paths, Width::U32),
            Some(Tokens::Text(tokenizer)) => {
                let tokenizer = Path::new(tokenizer);
                (vec![cache::tokens(&cache::folder(), tokenizer, &paths, model.vocab)?], Width::U32)
            }
        };
        let mut files = Vec::new();
        let mut tokens = 0;
        for path in paths {
            let map = Map::open(&path).map_err(|source| CorpusError::read(&path, source))?;
            let (bytes, width) = (map.as_ref().map_or(0, Map::len), width as u64);
            if bytes % width != 0 {
                return Err(CorpusError::Torn { path: path.display().to_string(), bytes, width });
            }
            files.push(Part { path, start: tokens, map });
            tokens += bytes / width;
        }
        let seq_len = u64::from(model.seq_len);
        if tokens <= seq_len {
            let what = if width == Width::U8 { "bytes" } else { "tokens" };
            return Err(CorpusError::TooSmall { what: format!("{tokens} {what}"), needed: seq_len + 1 });
        }
        Ok(Self { files, width, tokens, vocab: model.vocab, seq_len, seed })
    }

    /// How many different samples there are.
    pub fn windows(&self) -> u64 {
        (self.tokens - 1) / self.seq_len
    }

    /// Of the size of every file, and of the name of tokens that were made of text: equal on all who cut the same samples out
    /// of the same files.
    pub fn fingerprint(&self) -> u32 {
        let ends = self.files.iter().skip(1).map(|part| part.start).chain([self.tokens]);
        let mut hash = crc32fast::Hasher::new();
        hash.update(&ends.flat_map(u64::to_le_bytes).collect::<Vec<_>>());
        if let (Width::U32, [only]) = (self.width, self.files.as_slice()) {
            // What was made here is named by its content; the path is another on every node.
            hash.update(only.path.file_name().unwrap_or_default().as_encoded_bytes());
        }
        hash.finalize()
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
            return Err(CorpusError::Differs { tokens: self.tokens, files: self.files.len() });
        }
        Ok(())
    }

    /// The samples numbered `first .. first + count` of the job's order.
    pub fn batch(&self, first: u64, count: usize) -> Result<Batch, CorpusError> {
        let length = self.seq_len as usize + 1;
        let mut tokens = Vec::with_capacity(count * length);
        for number in first..first + count as u64 {
            let window = window_of(self.seed, number, self.windows());
            self.read(window * self.seq_len, length, &mut tokens)?;
        }
        Ok(Batch {
            tokens,
            samples: count,
            seq_len: self.seq_len as usize,
            seed: self.seed,
            first_sample: first,
        })
    }

    fn read(&self, mut at: u64, mut left: usize, out: &mut Vec<u32>) -> Result<(), CorpusError> {
        let mut index = self.files.partition_point(|part| part.start <= at) - 1;
        while left > 0 {
            let part = &self.files[index];
            let end = self.files.get(index + 1).map_or(self.tokens, |next| next.start);
            let take = left.min((end - at) as usize);
            let from = (at - part.start) as usize;
            let before = out.len();
            self.copy(part, from..from + take, out)?;
            if let Some(bad) = out[before..].iter().position(|token| *token >= self.vocab) {
                let (path, at) = (part.path.display().to_string(), (from + bad) as u64);
                let (token, vocab) = (out[before + bad], self.vocab);
                return Err(CorpusError::Vocabulary { path, at, token, vocab });
            }
            at += take as u64;
            left -= take;
            index += 1;
        }
        Ok(())
    }

    fn copy(
        &self,
        part: &Part,
        tokens: std::ops::Range<usize>,
        out: &mut Vec<u32>,
    ) -> Result<(), CorpusError> {
        let Some(map) = &part.map else { return Ok(()) };
        let bytes = map.bytes().map_err(|source| CorpusError::read(&part.path, source))?;
        let bytes = bytes.ok_or_else(|| CorpusError::Changed { path: part.path.display().to_string() })?;
        let width = self.width as usize;
        let bytes = &bytes[tokens.start * width..tokens.end * width];
        match self.width {
            Width::U8 => out.extend(bytes.iter().map(|byte| u32::from(*byte))),
            Width::U16 => {
                out.extend(bytes.chunks_exact(2).map(|two| u32::from(u16::from_le_bytes([two[0], two[1]]))));
            }
            Width::U32 => {
                let number = |four: &[u8]| u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
                out.extend(bytes.chunks_exact(4).map(number));
            }
        }
        Ok(())
    }
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

    /// Of windows of 10 tokens.
    fn open(files: &[String], tokenizer: &str, vocab: u32, seed: u64) -> Result<Corpus, CorpusError> {
        let job = reknit_layout::JobSpec::parse(reknit_layout::job::EXAMPLE, "example").unwrap();
        let model = ModelSpec { seq_len: 10, vocab, ..job.model };
        Corpus::open(&DataSpec { files: files.to_vec(), tokenizer: tokenizer.to_owned() }, &model, seed)
    }

    #[test]
    fn windows_run_over_file_borders_and_passes_repeat_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let text: Vec<u8> = (0..=100).collect();
        let names = ["a", "b", "c"].map(|name| dir.path().join(name).display().to_string());
        for (name, part) in names.iter().zip([&text[..13], &text[13..13], &text[13..]]) {
            std::fs::write(name, part).unwrap();
        }
        let corpus = open(&names, "bytes", 256, 3).unwrap();
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
        let missing = open(&["/no/such/file".to_owned()], "bytes", 256, 0).unwrap_err().to_string();
        assert!(missing.contains("/no/such/file"), "{missing}");
        let none = open(&["/no/such/*.rs".to_owned()], "bytes", 256, 0).unwrap_err().to_string();
        assert!(none.contains("/no/such/*.rs"), "{none}");
        let device = open(&["/dev/null".to_owned()], "bytes", 256, 0).unwrap_err().to_string();
        assert!(device.contains("/dev/null: it is not a file"), "{device}");
    }

    #[test]
    fn a_folder_is_no_text() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("folder")).unwrap();
        std::fs::write(dir.path().join("text"), [7; 21]).unwrap();
        let pattern = dir.path().join("*").display().to_string();
        assert_eq!(open(&[pattern], "bytes", 256, 0).unwrap().batch(0, 2).unwrap().tokens, [7; 22]);
        let folder = dir.path().join("folder").display().to_string();
        assert!(matches!(open(&[folder], "bytes", 256, 0), Err(CorpusError::Read { .. })));
    }

    #[test]
    fn who_has_other_files_than_most_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let with = |parts: [usize; 2]| {
            let names = ["a", "b"].map(|name| dir.path().join(name).display().to_string());
            for (name, len) in names.iter().zip(parts) {
                std::fs::write(name, vec![0; len]).unwrap();
            }
            open(&names, "bytes", 256, 0).unwrap()
        };
        let (usual, longer, shifted) = (with([20, 20]), with([20, 30]), with([10, 30]));
        let [u, l, s] = [&usual, &longer, &shifted].map(Corpus::fingerprint);
        assert!(u != l && u != s);
        assert!(usual.check_against(&[l, u, u, s]).is_ok());
        assert!(matches!(longer.check_against(&[l, u, u, s]), Err(CorpusError::Differs { .. })));
        assert!(shifted.check_against(&[l, u, u, s]).is_err());
        assert!(usual.check_against(&[u, l]).is_ok() && longer.check_against(&[u, l]).is_err());
    }

    #[test]
    fn token_numbers_are_read_as_they_lie() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["a.u16", "b.u16"].map(|name| dir.path().join(name).display().to_string());
        let numbers: Vec<u16> = (0..21).map(|i| 300 * i).collect();
        let bytes =
            |numbers: &[u16]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
        std::fs::write(&names[0], bytes(&numbers[..8])).unwrap();
        std::fs::write(&names[1], bytes(&numbers[8..])).unwrap();
        let corpus = open(&names, "u16", 6001, 0).unwrap();
        assert_eq!(corpus.windows(), 2);
        let mut samples: Vec<_> =
            corpus.batch(0, 2).unwrap().tokens.chunks(11).map(<[u32]>::to_vec).collect();
        samples.sort();
        let expected: Vec<Vec<u32>> =
            [0..11, 10..21].map(|range| range.map(|i| 300 * i).collect()).into_iter().collect();
        assert_eq!(samples, expected);
        // The largest is 6000, at position 12 of the second file.
        let error = open(&names, "u16", 6000, 0).unwrap_err().to_string();
        assert!(error.contains("token 6000 at position 12") && error.contains("b.u16"), "{error}");
        // As u32, the first is a whole number of tokens, and the second, of 26 bytes, is not.
        let torn = open(&names, "u32", 6001, 0).unwrap_err().to_string();
        assert!(torn.contains("26 bytes") && torn.contains("4-byte tokens"), "{torn}");
    }

    #[test]
    fn a_file_that_shrinks_is_told_of_before_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let name = dir.path().join("text").display().to_string();
        std::fs::write(&name, vec![7; 1 << 20]).unwrap();
        let corpus = open(std::slice::from_ref(&name), "bytes", 256, 0).unwrap();
        corpus.batch(0, 50).unwrap();
        std::fs::File::options().write(true).open(&name).unwrap().set_len(100).unwrap();
        assert!(matches!(corpus.batch(50, 50), Err(CorpusError::Changed { .. })));
    }
}
