//! Files of the state folder, and what the kernel tells of this boot.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::io;
use std::path::Path;
use tracing::warn;

/// Replaces a file in one step. It outlives the agent, not a power cut: what it tells of ends with the boot,
/// or is found again.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, content)?;
    fs::rename(&new, path)
}

/// `None` when there is no such file, or none that can be read; the latter is said.
pub(crate) fn load_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    // Opening a pipe in its place might never return.
    if path.exists() && !path.is_file() {
        warn!(path = %path.display(), "is no file; going on without it");
        return None;
    }
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return None,
        Err(e) => {
            warn!(path = %path.display(), %e, "cannot be read; going on without it");
            return None;
        }
    };
    let parsed = serde_json::from_slice(&text);
    parsed.inspect_err(|e| warn!(path = %path.display(), %e, "makes no sense; going on without it")).ok()
}

/// A failure is said and survived.
pub(crate) fn save_json<T: Serialize>(path: &Path, content: &T) {
    let saved =
        serde_json::to_vec_pretty(content).map_err(io::Error::from).and_then(|text| replace(path, &text));
    if let Err(e) = saved {
        warn!(path = %path.display(), %e, "cannot be written; the agent's next start will not know it");
    }
}

pub(crate) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// A number that nobody else has.
pub(crate) fn unique() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned())
}
