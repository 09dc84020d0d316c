//! What the demo trains on.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Enough that a run of a few hundred steps sees no sample twice.
const DEFAULT_BYTES: u64 = 8 << 20;
/// One step's worth of samples.
pub(crate) const LEAST_BYTES: u64 = 16 << 10;
/// Smaller files are mostly lists of modules, larger ones mostly tables.
const DEFAULT_FILE_SIZES: std::ops::RangeInclusive<u64> = (2 << 10)..=(256 << 10);

#[derive(Debug, thiserror::Error)]
pub(crate) enum DataError {
    #[error("--data {path}: {source}; name files, folders or patterns that can be read")]
    Read { path: String, source: std::io::Error },
    #[error("--data {0}: no file matches; name files, folders or patterns that can be read")]
    NoMatch(String),
    #[error("--data {pattern}: {problem}; correct the pattern")]
    Pattern { pattern: String, problem: String },
    #[error("--data: {bytes} bytes in {files} files are too few; give at least {LEAST_BYTES}")]
    TooSmall { bytes: u64, files: usize },
    #[error("no Rust sources of at least {LEAST_BYTES} bytes in {0}; name text files with --data")]
    NoDefault(String),
}

/// Files with their sizes, in a fixed order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub(crate) files: Vec<PathBuf>,
    pub(crate) bytes: u64,
}

/// The user's files: each argument is a file, a folder (all files under it) or a pattern. Every file is opened.
pub(crate) fn named(arguments: &[String]) -> Result<Chosen, DataError> {
    let mut files = Vec::new();
    let mut bytes = 0;
    for argument in arguments {
        let before = files.len();
        for path in expand(argument)? {
            let read = |source| DataError::Read { path: path.display().to_string(), source };
            if path.is_dir() {
                for (file, size) in files_under(&path).map_err(read)? {
                    readable(&file)?;
                    files.push(file);
                    bytes += size;
                }
            } else {
                bytes += readable(&path)?;
                files.push(std::path::absolute(&path).map_err(read)?);
            }
        }
        if files.len() == before {
            return Err(DataError::NoMatch(argument.clone()));
        }
    }
    if bytes < LEAST_BYTES {
        return Err(DataError::TooSmall { bytes, files: files.len() });
    }
    Ok(Chosen { files, bytes })
}

/// The Rust sources of our own dependencies: any machine that built Reknit has them.
pub(crate) fn default() -> Result<Chosen, DataError> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::home_dir().map(|home| home.join(".cargo")));
    let registry = home.unwrap_or_default().join("registry/src");
    let found = files_under(&registry).unwrap_or_default();
    let chosen = choose(found, DEFAULT_BYTES);
    if chosen.bytes < LEAST_BYTES {
        return Err(DataError::NoDefault(registry.display().to_string()));
    }
    Ok(chosen)
}

/// The first Rust sources in the order of their paths, up to `limit` bytes. The order of `found` does not matter.
fn choose(mut found: Vec<(PathBuf, u64)>, limit: u64) -> Chosen {
    found.retain(|(path, size)| {
        path.extension().is_some_and(|extension| extension == "rs")
            && path.to_str().is_some()
            && DEFAULT_FILE_SIZES.contains(size)
    });
    found.sort();
    let mut chosen = Chosen { files: Vec::new(), bytes: 0 };
    for (path, size) in found {
        if chosen.bytes + size > limit {
            break;
        }
        chosen.bytes += size;
        chosen.files.push(path);
    }
    chosen
}

/// A plain path stays itself, also when it has the letters of a pattern in it and exists.
fn expand(argument: &str) -> Result<Vec<PathBuf>, DataError> {
    let plain = PathBuf::from(argument);
    if plain.exists() || !argument.contains(['*', '?', '[']) {
        return Ok(vec![plain]);
    }
    let matches = glob::glob(argument)
        .map_err(|error| DataError::Pattern { pattern: argument.to_owned(), problem: error.to_string() })?;
    matches
        .map(|path| {
            path.map_err(|error| DataError::Read {
                path: error.path().display().to_string(),
                source: error.into(),
            })
        })
        .collect()
}

/// Opens the file and reads from it; returns its size.
fn readable(path: &Path) -> Result<u64, DataError> {
    let open = || {
        let mut file = File::open(path)?;
        // A folder can be opened too; only reading tells.
        let _ = file.read(&mut [0])?;
        Ok(file.metadata()?.len())
    };
    open().map_err(|source| DataError::Read { path: path.display().to_string(), source })
}

/// All regular files under a folder with their sizes, sorted; hidden ones are left out.
fn files_under(folder: &Path) -> std::io::Result<Vec<(PathBuf, u64)>> {
    let mut found = Vec::new();
    let mut folders = vec![std::path::absolute(folder)?];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            // The entry's own kind: links are not followed, so there are no loops.
            let kind = entry.file_type()?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                found.push((entry.path(), entry.metadata()?.len()));
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_does_not_depend_on_the_order_found() {
        let file = |name: &str, size| (PathBuf::from(name), size);
        let found = vec![
            file("/r/b/lib.rs", 5000),
            file("/r/a/lib.rs", 4000),
            file("/r/a/README.md", 4000),
            file("/r/a/tiny.rs", 10),
            file("/r/c/lib.rs", 5000),
        ];
        let mut turned = found.clone();
        turned.reverse();
        let chosen = choose(found, 9_500);
        assert_eq!(chosen, choose(turned, 9_500));
        assert_eq!(chosen.files, [PathBuf::from("/r/a/lib.rs"), PathBuf::from("/r/b/lib.rs")]);
        assert_eq!(chosen.bytes, 9000);
    }

    #[test]
    fn files_folders_and_patterns() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("sub/.hidden")).unwrap();
        for name in ["a.txt", "b.txt", "sub/c.md", "sub/.hidden/d.txt"] {
            std::fs::write(dir.path().join(name), vec![b'x'; 20_000]).unwrap();
        }
        let path = |name: &str| dir.path().join(name).display().to_string();
        assert_eq!(named(&[path("a.txt")]).unwrap().bytes, 20_000);
        assert_eq!(named(&[path("*.txt")]).unwrap().files.len(), 2);
        assert_eq!(named(&[path("")]).unwrap().files.len(), 3);
    }

    #[test]
    fn refusals_name_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing.txt").display().to_string();
        assert!(named(std::slice::from_ref(&missing)).unwrap_err().to_string().contains(&missing));
        let none = dir.path().join("*.txt").display().to_string();
        assert!(matches!(named(&[none]), Err(DataError::NoMatch(_))));
        let small = dir.path().join("small.txt");
        std::fs::write(&small, "short").unwrap();
        assert!(matches!(
            named(&[small.display().to_string()]),
            Err(DataError::TooSmall { bytes: 5, files: 1 })
        ));
    }
}
