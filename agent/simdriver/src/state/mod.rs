//! The control file: what the simulated driver tells of its GPUs.

mod change;
mod error;
mod event;
mod gpu;
mod setter_call;
mod values;

pub use crate::calls::{AnyCall, Call};
pub use change::Target;
pub use error::StateError;
pub use event::{Event, EventKind};
pub use gpu::Gpu;
pub use setter_call::SetterCall;
pub use values::{Architecture, Fabric, FabricState, LinksDown, RecoveryAction, Throttle};

pub(crate) use event::EVENT_BITS;
pub(crate) use gpu::BusNumbers;
pub(crate) use values::THROTTLES;

use serde::{Deserialize, Serialize};
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::SystemTime;

/// The environment variable that names the control file.
pub const STATE_VARIABLE: &str = "REKNIT_SIMDRIVER_STATE";

/// Events that the file keeps; older ones are forgotten.
const EVENTS_KEPT: usize = 1024;

/// The control file's content. A key that is not listed here is refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    pub node: String,
    pub driver_version: String,
    /// The NVML return code that `nvmlInit` fails with.
    #[serde(default)]
    pub init_error: Option<u32>,
    /// The NVML return code that a wait for events returns at once.
    #[serde(default)]
    pub wait_error: Option<u32>,
    /// No call returns while this is true, on any GPU or none.
    #[serde(default)]
    pub hang: bool,
    pub gpus: Vec<Gpu>,
    /// Oldest first, with growing sequence numbers. A client's event set sees those that were added
    /// after it registered.
    #[serde(default)]
    pub events: Vec<Event>,
}

impl State {
    /// A healthy node. The same node name and index always give the same UUID.
    pub fn healthy(node: &str, gpus: usize) -> Self {
        Self {
            node: node.to_owned(),
            driver_version: "580.95.05".to_owned(),
            init_error: None,
            wait_error: None,
            hang: false,
            gpus: (0..gpus).map(|index| Gpu::healthy(node, index)).collect(),
            events: Vec::new(),
        }
    }

    /// Reads the file at `path`.
    pub fn load(path: &Path) -> Result<Self, StateError> {
        let text = fs::read(path).map_err(|source| StateError::File {
            action: "read the simulated driver's state file",
            path: path.to_owned(),
            source,
        })?;
        let state: Self = serde_json::from_slice(&text)
            .map_err(|source| StateError::Content { path: path.to_owned(), source })?;
        for (place, gpu) in state.gpus.iter().enumerate() {
            if gpu.uuid.is_empty() {
                return Err(StateError::NoUuid { path: path.to_owned(), gpu: place });
            }
            gpu.bus_numbers()?;
        }
        Ok(state)
    }

    /// Replaces the file at `path` in one step: a reader sees the old content or the new, never a part.
    pub fn save(&self, path: &Path) -> Result<(), StateError> {
        let failed = |source| StateError::File {
            action: "write the simulated driver's state file",
            path: path.to_owned(),
            source,
        };
        let mut text = serde_json::to_vec_pretty(self)
            .map_err(|source| StateError::Content { path: path.to_owned(), source })?;
        text.push(b'\n');
        let mut file = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o644))
            .tempfile_in(folder(path))
            .map_err(failed)?;
        file.write_all(&text).map_err(failed)?;
        // The kernel's own stamp is coarse and inodes come back: two contents could look like one.
        file.as_file().set_modified(SystemTime::now()).map_err(failed)?;
        file.persist(path).map_err(|e| failed(e.error))?;
        Ok(())
    }

    /// Reads the file, applies `change` and replaces it, one writer at a time.
    pub fn update<T>(
        path: &Path,
        change: impl FnOnce(&mut Self) -> Result<T, StateError>,
    ) -> Result<T, StateError> {
        let failed = |source| StateError::File {
            action: "lock the simulated driver's state file",
            path: path.to_owned(),
            source,
        };
        // The folder is locked, not the file: the file is another one after each change.
        let lock = File::open(folder(path)).map_err(failed)?;
        lock.lock().map_err(failed)?;
        let mut state = Self::load(path)?;
        let result = change(&mut state)?;
        state.save(path)?;
        Ok(result)
    }

    /// Adds an event of GPU `gpu` and returns its sequence number.
    pub fn raise(&mut self, gpu: usize, kind: EventKind, data: u64) -> Result<u64, StateError> {
        self.gpu(gpu)?;
        let sequence = self.last_sequence() + 1;
        self.events.push(Event { sequence, gpu, kind, data });
        let surplus = self.events.len().saturating_sub(EVENTS_KEPT);
        self.events.drain(..surplus);
        Ok(sequence)
    }

    /// Adds an XID error of GPU `gpu` and returns its sequence number.
    pub fn raise_xid(&mut self, gpu: usize, xid: u64) -> Result<u64, StateError> {
        self.raise(gpu, EventKind::Xid, xid)
    }

    /// Adds the event that GPU `gpu` has a new recovery action, and returns its sequence number.
    pub fn raise_recovery_action(&mut self, gpu: usize) -> Result<u64, StateError> {
        let action = self.gpu(gpu)?.recovery_action;
        self.raise(gpu, EventKind::RecoveryAction, action as u64)
    }

    /// Appends to the file at `log` what the kernel would log for an XID of GPU `gpu`, as a record of
    /// `/dev/kmsg`. `message` is the line's end; for an NVLink XID (144 to 150) all that follows the number.
    pub fn log_xid(&self, gpu: usize, xid: u64, message: Option<&str>, log: &Path) -> Result<(), StateError> {
        let line = event::kernel_line(self.gpu(gpu)?.bus_numbers()?, xid, message);
        event::append_record(log, &line).map_err(|source| StateError::File {
            action: "append to the kernel log",
            path: log.to_owned(),
            source,
        })
    }

    /// The newest event's sequence number, 0 before the first.
    pub fn last_sequence(&self) -> u64 {
        self.events.last().map_or(0, |event| event.sequence)
    }

    fn gpu(&self, gpu: usize) -> Result<&Gpu, StateError> {
        self.gpus.get(gpu).ok_or(StateError::NoSuchGpu { gpu, count: self.gpus.len() })
    }
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        Some(_) | None => Path::new("."),
    }
}

#[cfg(test)]
mod tests;
