//! Files of the state folder.

use std::fs;
use std::io;
use std::path::Path;

/// Replaces a file in one step. It outlives the agent, not a power cut: what it tells of ends with the boot,
/// or is found again.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, content)?;
    fs::rename(&new, path)
}
