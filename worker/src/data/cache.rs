//! Text made into token numbers, once for all workers of a node.
//!
//! The result is a flat file of `u32` in a cache folder (`REKNIT_CACHE_DIR`, else `XDG_CACHE_HOME/reknit`, else
//! `HOME/.cache/reknit`, else `reknit-cache` in the folder for temporary files). Its name is the SHA-256 of the tokenizer, of all
//! the text and of how tokens are made, so it never has to be looked at whether it is still right. One worker makes it, under a lock that ends with
//! its process; the others wait and find it. What it has made when it is killed stays, and the next one goes on from there.

use super::CorpusError;
use super::map::Map;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokenizers::Tokenizer;
use tracing::info;

/// Text is cut at line ends into pieces of about so many bytes, each of which is tokenized by itself.
const PIECE: usize = 1 << 20;
/// Most pieces that are tokenized at once.
const AT_ONCE: usize = 16;
/// Hashed with what tokens are made of: another one wherever the same text becomes other tokens.
const MADE_HOW: &[u8] = b"pieces behind line ends, neither cut off nor padded";
/// How often is said, and kept, how far it is.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// The folder for tokens that were made here.
pub fn folder() -> PathBuf {
    let var = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    var("REKNIT_CACHE_DIR")
        .or_else(|| var("XDG_CACHE_HOME").map(|cache| cache.join("reknit")))
        .or_else(|| var("HOME").map(|home| home.join(".cache/reknit")))
        .unwrap_or_else(|| std::env::temp_dir().join("reknit-cache"))
}

/// The file with the tokens of `texts`, made now if there is none in `folder`. `vocab`: of the model.
///
/// # Errors
/// The tokenizer or a text cannot be read or makes no sense, or the model's vocabulary is too small.
pub fn tokens(
    folder: &Path,
    tokenizer: &Path,
    texts: &[PathBuf],
    vocab: u32,
) -> Result<PathBuf, CorpusError> {
    let failed = |path: &Path| {
        let path = path.display().to_string();
        move |source| CorpusError::Cache { path, source }
    };
    let bytes = Text::open(tokenizer)?.read()?;
    let texts: Vec<Text> = texts.iter().map(|path| Text::open(path)).collect::<Result<_, _>>()?;
    let mut hash = Sha256::new();
    for bytes in [MADE_HOW, &bytes] {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    for text in &texts {
        hash.update(text.len().to_le_bytes());
        // What is wrong with a text is found here, and not after an hour.
        text.pieces(0).try_for_each(|piece| piece.map(|piece| hash.update(piece)))?;
    }
    let name = hex(&hash.finalize());
    let made = folder.join(format!("{name}.u32"));

    let tokenizer_error =
        |problem: String| CorpusError::Tokenizer { path: tokenizer.display().to_string(), problem };
    let mut made_by = Tokenizer::from_bytes(&bytes).map_err(|error| tokenizer_error(error.to_string()))?;
    // Those are for a model's single inputs: a corpus would lose the end of every piece, or get what is no text.
    made_by.with_truncation(None).map_err(|error| tokenizer_error(error.to_string()))?.with_padding(None);
    let largest = made_by.get_vocab(true).into_values().max().unwrap_or(0);
    if largest >= vocab {
        return Err(tokenizer_error(format!("its largest token is {largest}, and model.vocab = {vocab}")));
    }

    // It has its name only once it is whole. A folder that others have filled need not be one that can be written.
    if made.exists() {
        return Ok(made);
    }
    fs::create_dir_all(folder).map_err(failed(folder))?;
    let lock = folder.join(format!("{name}.lock"));
    let _held_until_the_end = lock_file(&lock, &made).map_err(failed(&lock))?;
    if !made.exists() {
        let (partial, so_far) =
            (folder.join(format!("{name}.partial")), folder.join(format!("{name}.so-far")));
        let written = make(&made_by, &texts, &partial, &so_far, &tokenizer_error);
        let done = written.and_then(|()| fs::rename(&partial, &made).map_err(failed(&made)));
        let _ = fs::remove_file(&so_far);
        done.inspect_err(|_| drop(fs::remove_file(&partial)))?;
    }
    Ok(made)
}

/// `what`: for whom one waits.
pub(super) fn lock_file(lock: &Path, what: &Path) -> io::Result<File> {
    let file = File::options().create(true).append(true).open(lock)?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(error),
    }
    info!(file = %what.display(), "waiting for another worker of this node, which makes it");
    file.lock()?;
    Ok(file)
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file of text, of which pieces are copied out: one that is cut off while it is read is an error, as [`Map`] says.
#[derive(Debug)]
struct Text<'a> {
    path: &'a Path,
    /// `None`: it is empty.
    map: Option<Map>,
}

impl<'a> Text<'a> {
    fn open(path: &'a Path) -> Result<Self, CorpusError> {
        let map = Map::open(path).map_err(|source| CorpusError::read(path, source))?;
        Ok(Self { path, map })
    }

    fn len(&self) -> u64 {
        self.map.as_ref().map_or(0, Map::len)
    }

    fn bytes(&self) -> Result<&[u8], CorpusError> {
        let Some(map) = &self.map else { return Ok(&[]) };
        let bytes = map.bytes().map_err(|source| CorpusError::read(self.path, source))?;
        bytes.ok_or_else(|| CorpusError::Changed { path: self.path.display().to_string() })
    }

    fn read(&self) -> Result<Vec<u8>, CorpusError> {
        Ok(self.bytes()?.to_vec())
    }

    /// From byte `at` on, each cut behind a line end; a longer line is a piece by itself.
    fn pieces(&self, mut at: usize) -> impl Iterator<Item = Result<String, CorpusError>> {
        std::iter::from_fn(move || match self.piece(at) {
            Ok(piece) if piece.is_empty() => None,
            piece => {
                at += piece.as_ref().map_or(0, String::len);
                Some(piece)
            }
        })
    }

    /// Empty at the end.
    fn piece(&self, from: usize) -> Result<String, CorpusError> {
        let rest = self.bytes()?.get(from..).unwrap_or_default();
        let line_end = rest.iter().skip(PIECE).position(|byte| *byte == b'\n');
        let piece = line_end.map_or(rest, |at| &rest[..=PIECE + at]);
        String::from_utf8(piece.to_vec()).map_err(|error| CorpusError::NotText {
            path: self.path.display().to_string(),
            at: from + error.utf8_error().valid_up_to(),
        })
    }
}

/// How much of a file of tokens is made, and is on the disk.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct SoFar {
    /// Bytes of all texts that are done: whole pieces.
    text: u64,
    tokens: u64,
}

impl SoFar {
    /// Of the file `out`: nothing, unless what is kept can be true.
    fn read(kept: &Path, out: &Path) -> Self {
        let found: Option<Self> = fs::read(kept).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let there = fs::metadata(out).map_or(0, |out| out.len());
        found
            .filter(|found| found.tokens.checked_mul(4).is_some_and(|bytes| bytes <= there))
            .unwrap_or_default()
    }

    /// Renamed over the last one, so that there is always a whole one.
    fn keep(self, kept: &Path) -> io::Result<()> {
        let next = kept.with_extension("next");
        fs::write(&next, serde_json::to_vec(&self)?)?;
        fs::rename(&next, kept)
    }
}

fn make(
    tokenizer: &Tokenizer,
    texts: &[Text<'_>],
    out: &Path,
    kept: &Path,
    bad: &dyn Fn(String) -> CorpusError,
) -> Result<(), CorpusError> {
    let failed = |source: io::Error| CorpusError::Cache { path: out.display().to_string(), source };
    let mut so_far = SoFar::read(kept, out);
    let mut file = File::options().create(true).write(true).truncate(false).open(out).map_err(failed)?;
    file.set_len(so_far.tokens * 4).map_err(failed)?;
    file.seek(SeekFrom::End(0)).map_err(failed)?;
    let mut file = BufWriter::new(file);
    let all: u64 = texts.iter().map(Text::len).sum();
    if so_far != SoFar::default() {
        info!(
            bytes = so_far.text,
            of = all,
            "another worker has made a part of the tokens; going on from there"
        );
    }
    // A batch ends when its slowest piece does: several for each thread.
    let at_once = std::thread::available_parallelism().map_or(AT_ONCE, |cores| AT_ONCE.min(2 * cores.get()));
    let (begun, mut told) = (Instant::now(), Instant::now());
    let mut skip = so_far.text;
    for text in texts {
        // Whole pieces are done, and so it is the begin of one.
        let from = skip.min(text.len());
        skip -= from;
        let mut pieces = text.pieces(from as usize);
        loop {
            let group: Vec<String> = pieces.by_ref().take(at_once).collect::<Result<_, _>>()?;
            if group.is_empty() {
                break;
            }
            let bytes: usize = group.iter().map(String::len).sum();
            let encodings = tokenizer.encode_batch(group, false);
            for encoding in encodings.map_err(|error| bad(error.to_string()))? {
                let ids = encoding.get_ids();
                so_far.tokens += ids.len() as u64;
                let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
                file.write_all(&bytes).map_err(failed)?;
            }
            so_far.text += bytes as u64;
            if told.elapsed() >= TELL_EVERY {
                file.flush().and_then(|()| file.get_ref().sync_data()).map_err(failed)?;
                so_far.keep(kept).map_err(failed)?;
                told = Instant::now();
                info!(file = %text.path.display(), bytes = so_far.text, of = all, tokens = so_far.tokens, "making tokens of the text");
            }
        }
    }
    file.into_inner().map_err(|error| failed(error.into_error()))?.sync_all().map_err(failed)?;
    info!(
        bytes = so_far.text,
        tokens = so_far.tokens,
        took_ms = begun.elapsed().as_millis() as u64,
        "tokens made of the text"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words apart, 5 of them known.
    const WORDS: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"?": 0, "a": 1, "rank": 2, "is": 3, "lost": 4}, "unk_token": "?"}}"#;

    fn files(dir: &Path, text: &str) -> (PathBuf, PathBuf) {
        let (tokenizer, file) = (dir.join("tokenizer.json"), dir.join("text"));
        fs::write(&tokenizer, WORDS).unwrap();
        fs::write(&file, text).unwrap();
        (tokenizer, file)
    }

    fn read(path: &Path) -> Vec<u32> {
        fs::read(path)
            .unwrap()
            .chunks_exact(4)
            .map(|four| u32::from_le_bytes(four.try_into().unwrap()))
            .collect()
    }

    #[test]
    fn text_becomes_tokens_once() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("cache");
        let (tokenizer, text) = files(dir.path(), "a rank is lost\nlost is a word\n");
        let made = tokens(&cache, &tokenizer, &[text.clone(), text.clone()], 5).unwrap();
        let once = [1, 2, 3, 4, 4, 3, 1, 0];
        assert_eq!(read(&made), [once, once].concat());
        // Another worker finds it; other text is another file.
        fs::write(&made, [9, 0, 0, 0]).unwrap();
        assert_eq!(read(&tokens(&cache, &tokenizer, &[text.clone(), text.clone()], 5).unwrap()), [9]);
        // Nor is anything written there for it.
        let lock = made.with_extension("lock");
        fs::remove_file(&lock).unwrap();
        tokens(&cache, &tokenizer, &[text.clone(), text.clone()], 5).unwrap();
        assert!(!lock.exists(), "a folder that is only read will do");
        fs::write(&text, "a rank").unwrap();
        let other = tokens(&cache, &tokenizer, &[text], 5).unwrap();
        assert_eq!(read(&other), [1, 2]);
        assert_ne!(other, made);
    }

    #[test]
    fn no_text_is_cut_off_and_none_is_added() {
        let dir = tempfile::tempdir().unwrap();
        let (tokenizer, text) = files(dir.path(), "a rank is lost\n");
        let limits = WORDS
            .replace(
                r#""truncation": null"#,
                r#""truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}"#,
            )
            .replace(
                r#""padding": null"#,
                r#""padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "?"}"#,
            );
        fs::write(&tokenizer, limits).unwrap();
        let made = tokens(&dir.path().join("cache"), &tokenizer, &[text], 5).unwrap();
        assert_eq!(read(&made), [1, 2, 3, 4]);
    }

    #[test]
    fn many_at_once_make_it_once() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("cache");
        let (tokenizer, text) = files(dir.path(), &"a rank is lost\n".repeat(5000));
        let made: Vec<_> = std::thread::scope(|scope| {
            let make = || tokens(&cache, &tokenizer, std::slice::from_ref(&text), 5).unwrap();
            let running: Vec<_> = (0..4).map(|_| scope.spawn(make)).collect();
            running.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(made.iter().all(|path| path == &made[0]));
        assert_eq!(read(&made[0]), [1, 2, 3, 4].repeat(5000));
        let left = fs::read_dir(&cache).unwrap().filter(|file| {
            file.as_ref().unwrap().path().extension().is_some_and(|extension| extension == "partial")
        });
        assert_eq!(left.count(), 0);
    }

    /// As after a kill: some of the tokens are kept, more are written, and what is kept is told from what is not by its value.
    #[test]
    fn what_a_worker_had_made_when_it_was_killed_is_not_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let (out, kept) = (dir.path().join("out"), dir.path().join("kept"));
        let tokenizer = Tokenizer::from_bytes(WORDS).unwrap();
        let paths = ["a", "b"].map(|name| dir.path().join(name));
        fs::write(&paths[0], "a rank\nis ").unwrap();
        fs::write(&paths[1], "lost\na rank").unwrap();
        let texts = [Text::open(&paths[0]).unwrap(), Text::open(&paths[1]).unwrap()];
        let run = |so_far: &str, there: &[u32]| {
            fs::write(&kept, so_far).unwrap();
            fs::write(&out, there.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<_>>()).unwrap();
            make(&tokenizer, &texts, &out, &kept, &CorpusError::Pattern).unwrap();
            read(&out)
        };
        let all = [1, 2, 3, 4, 1, 2];
        assert_eq!(run(r#"{"text": 10, "tokens": 3}"#, &[9, 9, 9, 7, 7]), [9, 9, 9, 4, 1, 2]);
        assert_eq!(run(r#"{"text": 15, "tokens": 4}"#, &[9, 9, 9, 9]), [9, 9, 9, 9, 1, 2]);
        assert_eq!(run(r#"{"text": 10, "tokens": 3}"#, &[9, 9]), all, "it is not there");
        assert_eq!(run("{", &[9, 9, 9]), all, "nobody knows how much is there");
        let so_far = SoFar { text: 10, tokens: 1 };
        so_far.keep(&kept).unwrap();
        assert_eq!(SoFar::read(&kept, &out), so_far);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let (tokenizer, text) = files(dir.path(), "a");
        let says = |tokenizer: &Path, texts: &[PathBuf], vocab| {
            tokens(&dir.path().join("cache"), tokenizer, texts, vocab).unwrap_err().to_string()
        };
        let small = says(&tokenizer, std::slice::from_ref(&text), 4);
        assert!(small.contains("its largest token is 4, and model.vocab = 4"), "{small}");
        fs::write(&text, b"a rank \xff").unwrap();
        let binary = says(&tokenizer, std::slice::from_ref(&text), 5);
        assert!(binary.contains("is no UTF-8 text from byte 7 on"), "{binary}");
        fs::write(&tokenizer, "{}").unwrap();
        assert!(says(&tokenizer, &[], 5).contains("tokenizer.json"));
        let folder = says(dir.path(), &[], 5);
        assert!(folder.contains("it is not a file"), "{folder}");
    }

    #[test]
    fn pieces_end_with_lines_and_lose_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let line = "ä".repeat(300_001) + "\n";
        let text = line.repeat(5) + "end";
        let (_, path) = files(dir.path(), &text);
        let cut: Vec<_> = Text::open(&path).unwrap().pieces(0).map(Result::unwrap).collect();
        assert_eq!(cut.concat(), text);
        assert!(cut.len() > 2 && cut[..cut.len() - 1].iter().all(|piece| piece.ends_with('\n')));
    }

    #[test]
    fn a_text_that_is_cut_off_while_it_is_read_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let (_, path) = files(dir.path(), &"a rank is lost\n".repeat(200_000));
        let text = Text::open(&path).unwrap();
        let mut pieces = text.pieces(0);
        assert!(pieces.next().unwrap().is_ok());
        File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
        assert!(matches!(pieces.next(), Some(Err(CorpusError::Changed { .. }))));
    }
}
