//! Whether every token of flat files is one of the model's: looked at when they are opened, since a step that meets one that
//! is not ends its worker, and then whoever takes its samples over.

use super::{Corpus, CorpusError, Width};
use crate::data::cache;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tracing::{debug, info};

/// That so much was looked at is remembered: less takes no time.
pub(super) const LARGE: u64 = 64 << 20;
/// Tokens that are looked at together: they stay in the processor's cache.
const BLOCK: usize = 1 << 17;
const TELL_EVERY: Duration = Duration::from_secs(5);

impl Corpus {
    /// Looks at every token, unless a worker of this node has done so with the same files and vocabulary. Corpora of `large`
    /// bytes or more are remembered in `folder`; where that cannot be written, they are looked at each time.
    pub(super) fn check_once(&self, folder: &Path, large: u64) -> Result<(), CorpusError> {
        if self.tokens * (self.width as u64) < large {
            return self.check();
        }
        let record = folder.join(format!("{}.checked", self.identity()?));
        let lock = record.with_extension("lock");
        let held = fs::create_dir_all(folder).and_then(|()| cache::lock_file(&lock, &record));
        if held.is_ok() && record.exists() {
            return Ok(());
        }
        self.check()?;
        if let Err(error) = held.and_then(|_held| File::create(&record)) {
            let folder = folder.display();
            info!(%folder, %error, "that the tokens are checked cannot be kept; set REKNIT_CACHE_DIR for the agents");
        }
        Ok(())
    }

    fn check(&self) -> Result<(), CorpusError> {
        match self.width {
            Width::U8 if self.vocab > u8::MAX.into() => return Ok(()),
            Width::U16 if self.vocab > u16::MAX.into() => return Ok(()),
            Width::U8 | Width::U16 | Width::U32 => {}
        }
        let (begun, mut told) = (Instant::now(), Instant::now());
        let mut block = Vec::with_capacity(BLOCK);
        for at in (0..self.tokens).step_by(BLOCK) {
            block.clear();
            self.read(at, BLOCK.min((self.tokens - at) as usize), &mut block)?;
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                info!(tokens = at, of = self.tokens, "checking that model.vocab has every token");
            }
        }
        debug!(tokens = self.tokens, took_ms = begun.elapsed().as_millis() as u64, "tokens checked");
        Ok(())
    }

    /// Of what is looked at: the files as they lie there, and the vocabulary.
    fn identity(&self) -> Result<String, CorpusError> {
        let mut hash = Sha256::new();
        hash.update([self.width as u8]);
        hash.update(self.vocab.to_le_bytes());
        for part in &self.files {
            let path: &PathBuf = &part.path;
            let name = path.as_os_str().as_encoded_bytes();
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name);
            if let Some(map) = &part.map {
                let version = map.version().map_err(|source| CorpusError::read(path, source))?;
                version.iter().for_each(|number| hash.update(number.to_le_bytes()));
            }
        }
        Ok(cache::hex(&hash.finalize()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_layout::JobSpec;
    use reknit_layout::job::DataSpec;
    use std::os::unix::fs::FileExt;

    /// 70 tokens in two files, as a corpus whose tokens are not yet looked at.
    fn corpus(dir: &Path, vocab: u32) -> Corpus {
        let job = JobSpec::parse(reknit_layout::job::EXAMPLE, "example").unwrap();
        let files = ["a.u16", "b.u16"].map(|name| dir.join(name).display().to_string());
        let data = DataSpec { files: files.to_vec(), tokenizer: "u16".to_owned() };
        let model = reknit_layout::job::ModelSpec { seq_len: 10, vocab, ..job.model };
        Corpus::map(&data, &model, 0).unwrap()
    }

    fn write(dir: &Path) {
        let tokens: Vec<u8> = (0u16..70).flat_map(u16::to_le_bytes).collect();
        fs::write(dir.join("a.u16"), &tokens[..40]).unwrap();
        fs::write(dir.join("b.u16"), &tokens[40..]).unwrap();
    }

    #[test]
    fn a_token_that_the_model_does_not_have_is_found_before_any_step() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path());
        let error = corpus(dir.path(), 69).check_once(dir.path(), LARGE).unwrap_err().to_string();
        assert!(error.contains("token 69 at position 49 of") && error.contains("b.u16"), "{error}");
        assert!(error.contains("model.vocab = 69"), "{error}");
        corpus(dir.path(), 70).check_once(dir.path(), LARGE).unwrap();
    }

    #[test]
    fn the_same_files_are_looked_at_once_and_others_again() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path());
        let cache = dir.path().join("cache");
        let check = |vocab| corpus(dir.path(), vocab).check_once(&cache, 0);
        check(70).unwrap();
        let records = || {
            fs::read_dir(&cache)
                .unwrap()
                .filter(|file| {
                    file.as_ref().unwrap().path().extension().is_some_and(|extension| extension == "checked")
                })
                .count()
        };
        assert_eq!(records(), 1);
        check(70).unwrap();
        assert_eq!(records(), 1);
        assert!(check(69).is_err(), "another vocabulary");
        assert!(check(69).is_err(), "what is wrong is not remembered");
        let changed = File::options().write(true).open(dir.path().join("a.u16")).unwrap();
        changed.write_all_at(&[255, 255], 6).unwrap();
        changed.set_modified(std::time::UNIX_EPOCH).unwrap();
        let error = check(70).unwrap_err().to_string();
        assert!(error.contains("token 65535 at position 3 of"), "{error}");
    }

    #[test]
    fn without_a_folder_to_remember_in_they_are_looked_at_each_time() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path());
        let folder = dir.path().join("a.u16");
        corpus(dir.path(), 70).check_once(&folder, 0).unwrap();
        assert!(corpus(dir.path(), 69).check_once(&folder, 0).is_err());
    }
}
