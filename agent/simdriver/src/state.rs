//! The control file: what the simulated driver tells of its GPUs.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The environment variable that names the control file.
pub const STATE_VARIABLE: &str = "REKNIT_SIMDRIVER_STATE";

/// Events that the file keeps; older ones are forgotten.
const EVENTS_KEPT: usize = 1024;

/// The control file's content. A key that is not listed here is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    pub node: String,
    pub driver_version: String,
    pub gpus: Vec<Gpu>,
    /// XID errors, oldest first, with growing sequence numbers. A client's event set sees those that
    /// were added after it registered.
    #[serde(default)]
    pub events: Vec<XidEvent>,
}

/// One GPU. Identity first, then what it reads, then what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    pub uuid: String,
    pub pci_bus_id: String,
    pub name: String,
    pub memory_bytes: u64,

    /// Degrees Celsius.
    pub temperature: u32,
    /// Milliwatts.
    pub power_mw: u32,
    /// Percent.
    pub utilization: u32,
    /// Volatile counts since the driver was loaded.
    pub ecc_corrected: u64,
    pub ecc_uncorrected: u64,
    /// NVML field 230: 0 none, 1 reset, 2 reboot, 3 drain peer-to-peer, 4 drain and reset.
    pub recovery_action: u32,

    /// Fallen off the bus: every call answers `GPU_IS_LOST` (15).
    pub lost: bool,
    /// Every call answers `RESET_REQUIRED` (16).
    pub reset_required: bool,
    /// Missing from enumeration; the indices of the GPUs after it shift.
    pub absent: bool,
    /// Calls on this GPU do not return while this is true.
    pub hang: bool,
}

/// An XID error of the GPU at `gpu` in the file's list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct XidEvent {
    pub sequence: u64,
    pub gpu: usize,
    pub xid: u64,
}

/// Why a control file could not be read, changed or written.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("cannot {action} the simulated driver's state file {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} is not a simulated driver's state file: {source}")]
    Content { path: PathBuf, source: serde_json::Error },
    #[error("there is no GPU {gpu}: the file has {count}, numbered from 0")]
    NoSuchGpu { gpu: usize, count: usize },
    #[error("unknown key `{key}`: a GPU has {known}")]
    UnknownKey { key: String, known: String },
    #[error("`{text}` is no change: write KEY=VALUE, such as lost=true")]
    NotAnAssignment { text: String },
    #[error("`{value}` is no value for `{key}`: {reason}")]
    BadValue { key: String, value: String, reason: String },
}

/// Keys that say which GPU it is. They stay as `init` made them.
const IDENTITY: [&str; 4] = ["uuid", "pci_bus_id", "name", "memory_bytes"];

impl State {
    /// A healthy node. The same node name and index always give the same UUID.
    pub fn healthy(node: &str, gpus: usize) -> Self {
        Self {
            node: node.to_owned(),
            driver_version: "580.95.05".to_owned(),
            gpus: (0..gpus).map(|index| Gpu::healthy(node, index)).collect(),
            events: Vec::new(),
        }
    }

    /// Reads the file at `path`.
    pub fn load(path: &Path) -> Result<Self, StateError> {
        let text = fs::read(path).map_err(|source| StateError::File {
            action: "read",
            path: path.to_owned(),
            source,
        })?;
        serde_json::from_slice(&text).map_err(|source| StateError::Content { path: path.to_owned(), source })
    }

    /// Replaces the file at `path` in one step: a reader sees the old content or the new, never a part.
    pub fn save(&self, path: &Path) -> Result<(), StateError> {
        let failed = |source| StateError::File { action: "write", path: path.to_owned(), source };
        let mut text = serde_json::to_vec_pretty(self)
            .map_err(|source| StateError::Content { path: path.to_owned(), source })?;
        text.push(b'\n');
        let mut file = tempfile::NamedTempFile::new_in(folder(path)).map_err(failed)?;
        file.write_all(&text).map_err(failed)?;
        file.persist(path).map_err(|e| failed(e.error))?;
        Ok(())
    }

    /// Reads the file, applies `change` and replaces it, one writer at a time.
    pub fn update<T>(
        path: &Path,
        change: impl FnOnce(&mut Self) -> Result<T, StateError>,
    ) -> Result<T, StateError> {
        let failed = |source| StateError::File { action: "lock", path: path.to_owned(), source };
        // The folder is locked, not the file: the file is another one after each change.
        let lock = File::open(folder(path)).map_err(failed)?;
        lock.lock().map_err(failed)?;
        let mut state = Self::load(path)?;
        let result = change(&mut state)?;
        state.save(path)?;
        Ok(result)
    }

    /// Changes GPU `gpu` as `KEY=VALUE` says. On an error nothing is changed.
    pub fn set(&mut self, gpu: usize, assignments: &[String]) -> Result<(), StateError> {
        let count = self.gpus.len();
        let target = self.gpus.get_mut(gpu).ok_or(StateError::NoSuchGpu { gpu, count })?;
        let mut changed = target.clone();
        for text in assignments {
            let (key, value) =
                text.split_once('=').ok_or_else(|| StateError::NotAnAssignment { text: text.to_owned() })?;
            changed = changed.with(key, value)?;
        }
        *target = changed;
        Ok(())
    }

    /// Adds an XID error of GPU `gpu` and returns its sequence number.
    pub fn raise_xid(&mut self, gpu: usize, xid: u64) -> Result<u64, StateError> {
        let count = self.gpus.len();
        if gpu >= count {
            return Err(StateError::NoSuchGpu { gpu, count });
        }
        let sequence = self.last_sequence() + 1;
        self.events.push(XidEvent { sequence, gpu, xid });
        let surplus = self.events.len().saturating_sub(EVENTS_KEPT);
        self.events.drain(..surplus);
        Ok(sequence)
    }

    /// The newest event's sequence number, 0 before the first.
    pub fn last_sequence(&self) -> u64 {
        self.events.last().map_or(0, |event| event.sequence)
    }
}

impl Gpu {
    fn healthy(node: &str, index: usize) -> Self {
        Self {
            uuid: uuid(node, index),
            pci_bus_id: format!("00000000:{:02X}:00.0", index + 1),
            name: "Simulated H100".to_owned(),
            memory_bytes: 80 << 30,
            temperature: 40,
            power_mw: 120_000,
            utilization: 0,
            ecc_corrected: 0,
            ecc_uncorrected: 0,
            recovery_action: 0,
            lost: false,
            reset_required: false,
            absent: false,
            hang: false,
        }
    }

    fn with(&self, key: &str, value: &str) -> Result<Self, StateError> {
        let bad_value = |reason: serde_json::Error| StateError::BadValue {
            key: key.to_owned(),
            value: value.to_owned(),
            reason: reason.to_string(),
        };
        let mut fields: Map<String, Value> = match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            Ok(_) => Map::new(),
            Err(reason) => return Err(bad_value(reason)),
        };
        let settable = |name: &&String| !IDENTITY.contains(&name.as_str());
        if !fields.keys().filter(settable).any(|name| name == key) {
            let known: Vec<&str> = fields.keys().filter(settable).map(String::as_str).collect();
            return Err(StateError::UnknownKey { key: key.to_owned(), known: known.join(", ") });
        }
        fields.insert(key.to_owned(), serde_json::from_str(value).map_err(bad_value)?);
        serde_json::from_value(Value::Object(fields)).map_err(bad_value)
    }
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        Some(_) | None => Path::new("."),
    }
}

/// FNV-1a over the node's name and the index, written as a UUID.
fn uuid(node: &str, index: usize) -> String {
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for byte in format!("{node}/{index}").bytes() {
        hash = (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    }
    let hex = format!("{hash:032x}");
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_differ_by_node_and_index_and_never_change() {
        let a = State::healthy("a", 8);
        let b = State::healthy("b", 8);
        let mut uuids: Vec<_> = a.gpus.iter().chain(&b.gpus).map(|g| &g.uuid).collect();
        uuids.sort();
        uuids.dedup();
        assert_eq!(uuids.len(), 16);
        assert_eq!(a, State::healthy("a", 8));
        assert_eq!(a.gpus[0].uuid.len(), "GPU-".len() + 36);
    }

    #[test]
    fn set_refuses_what_it_does_not_know() {
        let mut state = State::healthy("a", 2);
        let before = state.clone();
        let refused = |state: &mut State, gpu, text: &str| {
            let e = state.set(gpu, &["lost=true".to_owned(), text.to_owned()]);
            e.expect_err(text).to_string()
        };
        assert!(refused(&mut state, 0, "colour=red").contains("unknown key `colour`"));
        assert!(refused(&mut state, 0, "uuid=\"x\"").contains("unknown key `uuid`"));
        assert!(refused(&mut state, 0, "temperature=warm").contains("no value for"));
        assert!(refused(&mut state, 0, "temperature=-1").contains("no value for"));
        assert!(refused(&mut state, 0, "lost").contains("KEY=VALUE"));
        assert!(refused(&mut state, 2, "lost=true").contains("no GPU 2"));
        assert_eq!(state, before, "a refused change changes nothing");
        state.set(1, &["lost=true".to_owned(), "temperature=91".to_owned()]).unwrap();
        assert!(state.gpus[1].lost && state.gpus[1].temperature == 91 && !state.gpus[0].lost);
    }

    #[test]
    fn an_unknown_key_in_the_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        let state = State::healthy("a", 1);
        state.save(&path).unwrap();
        assert_eq!(State::load(&path).unwrap(), state);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replacen("\"lost\"", "\"lots\"", 1)).unwrap();
        assert!(matches!(State::load(&path), Err(StateError::Content { .. })));
    }

    #[test]
    fn writers_at_the_same_time_lose_no_event() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        State::healthy("a", 1).save(&path).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for xid in 0..25 {
                        State::update(&path, |state| state.raise_xid(0, xid)).unwrap();
                    }
                });
            }
        });
        let state = State::load(&path).unwrap();
        let sequences: Vec<u64> = state.events.iter().map(|e| e.sequence).collect();
        assert_eq!(sequences, (1..=100).collect::<Vec<_>>());
    }
}
