//! Files that are there as a whole or not at all, and reading what others may have put there.

use crate::CheckpointError;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::path::Path;

/// Of a file that is compared, in memory at once.
const COMPARED: usize = 1 << 18;
const PARTIAL: &str = ".partial";

/// A regular file and its length. Anything else is refused unopened: to open a pipe is to wait for its writer.
pub(crate) fn open(path: &Path) -> Result<(File, u64), CheckpointError> {
    let length = |found: Metadata| {
        found.is_file().then_some(found.len()).ok_or_else(|| io::Error::other("it is not a regular file"))
    };
    let open = || {
        length(fs::metadata(path)?)?;
        let file = File::open(path)?;
        let length = length(file.metadata()?)?;
        Ok((file, length))
    };
    open().map_err(CheckpointError::io(path))
}

/// The first `length` bytes: fewer if the file has become shorter meanwhile, never more.
pub(crate) fn read(file: File, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(usize::try_from(length).map_err(io::Error::other)?)?;
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Whether a file is there whose content is this and nothing else.
pub(crate) fn holds(path: &Path, content: &[u8]) -> bool {
    let Ok((mut file, length)) = open(path) else { return false };
    let mut read = vec![0; COMPARED];
    let mut same =
        |part: &[u8]| file.read_exact(&mut read[..part.len()]).is_ok() && read[..part.len()] == *part;
    length == content.len() as u64 && content.chunks(COMPARED).all(&mut same)
}

/// The name that a file which is being written shall have.
pub(crate) fn whole_name(partial: &str) -> Option<&str> {
    let (whole, _writer) = partial.strip_suffix(PARTIAL)?.rsplit_once('.')?;
    Some(whole)
}

/// Under its name only once all of it is on the disk. `writer` keeps two who write the same file apart.
pub(crate) fn write_whole(path: &Path, writer: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut hidden = path.as_os_str().to_owned();
    hidden.push(format!(".{writer}{PARTIAL}"));
    let hidden = Path::new(&hidden);
    let write = || {
        let mut file = File::create(hidden)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(hidden, path)
    };
    write().map_err(|error| {
        // What is half there only takes up room.
        let _ = fs::remove_file(hidden);
        CheckpointError::io(path)(error)
    })
}

/// The names in a folder are on the disk too.
pub(crate) fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(CheckpointError::io(path))
}

/// The folder and those above it, their names on the disk.
pub(crate) fn make_folder(path: &Path) -> Result<(), CheckpointError> {
    if path.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(path).map_err(CheckpointError::io(path))?;
    for parent in path.ancestors().skip(1).take(2).filter(|parent| parent.parent().is_some()) {
        sync_folder(parent)?;
    }
    Ok(())
}
