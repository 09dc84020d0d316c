//! Files that are there as a whole or not at all.

use crate::CheckpointError;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

/// Under its name only once all of it is on the disk. `writer` keeps two who write the same file apart.
pub(crate) fn write_whole(path: &Path, writer: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut hidden = path.as_os_str().to_owned();
    hidden.push(format!(".{writer}.partial"));
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
