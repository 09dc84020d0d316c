//! The loaded driver: the control file's newest content, and which GPU a handle means.

use crate::abi::{Code, DeviceHandle};
use crate::state::{Gpu, STATE_VARIABLE, State};
use std::fs;
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How often a hanging call looks whether it may return.
const HANG_POLL: Duration = Duration::from_millis(10);

static DRIVER: Mutex<Driver> = Mutex::new(Driver { users: 0, loaded: None });

struct Driver {
    /// `nvmlInit` calls without their `nvmlShutdown`.
    users: u32,
    loaded: Option<Loaded>,
}

struct Loaded {
    path: PathBuf,
    stamp: Option<Stamp>,
    state: Result<Arc<State>, Code>,
}

/// Tells one content of the file from the next.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Stamp {
    inode: u64,
    seconds: i64,
    nanoseconds: i64,
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().map(|file| Self {
            inode: file.ino(),
            seconds: file.mtime(),
            nanoseconds: file.mtime_nsec(),
        })
    }
}

impl Loaded {
    fn new(path: PathBuf) -> Self {
        let mut loaded = Self { path, stamp: None, state: Err(Code::DRIVER_NOT_LOADED) };
        loaded.read();
        loaded
    }

    fn read(&mut self) {
        // The stamp comes first: if the file changes in between, the next call reads it once more.
        self.stamp = Stamp::of(&self.path);
        self.state = State::load(&self.path).map(Arc::new).map_err(|e| {
            eprintln!("simulated NVML driver: {e}");
            Code::DRIVER_NOT_LOADED
        });
    }

    fn state(&mut self) -> Result<Arc<State>, Code> {
        if Stamp::of(&self.path) != self.stamp {
            self.read();
        }
        self.state.clone()
    }
}

fn driver() -> MutexGuard<'static, Driver> {
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn init() -> Result<(), Code> {
    let Some(path) = std::env::var_os(STATE_VARIABLE) else {
        eprintln!(
            "simulated NVML driver: set {STATE_VARIABLE} to the control file that `reknit-simdriver init` wrote"
        );
        return Err(Code::DRIVER_NOT_LOADED);
    };
    let mut loaded = Loaded::new(PathBuf::from(path));
    let state = loop {
        let state = loaded.state()?;
        if !state.hang {
            break state;
        }
        thread::sleep(HANG_POLL);
    };
    if let Some(code) = state.init_error {
        return Err(Code(code));
    }
    let mut driver = driver();
    driver.loaded.get_or_insert(loaded);
    driver.users += 1;
    Ok(())
}

pub(crate) fn shutdown() -> Result<(), Code> {
    // A driver that hangs holds this call too; one whose file is gone can still be left.
    let _ = state();
    let mut driver = driver();
    match driver.users {
        0 => return Err(Code::UNINITIALIZED),
        1 => driver.loaded = None,
        2.. => {}
    }
    driver.users -= 1;
    Ok(())
}

/// The control file's newest content, hanging or not.
fn newest() -> Result<Arc<State>, Code> {
    driver().loaded.as_mut().ok_or(Code::UNINITIALIZED)?.state()
}

/// The control file's newest content, once the driver answers.
pub(crate) fn state() -> Result<Arc<State>, Code> {
    loop {
        let state = newest()?;
        if !state.hang {
            return Ok(state);
        }
        thread::sleep(HANG_POLL);
    }
}

pub(crate) fn state_path() -> Result<PathBuf, Code> {
    let driver = driver();
    let loaded = driver.loaded.as_ref().ok_or(Code::UNINITIALIZED)?;
    Ok(loaded.path.clone())
}

/// Places in the file of the GPUs that enumeration shows; a client's index counts these.
pub(crate) fn enumerated(state: &State) -> impl Iterator<Item = usize> {
    (0..state.gpus.len()).filter(|place| !state.gpus[*place].absent)
}

/// Which GPU a client means, and since which reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) place: usize,
    generation: u32,
}

impl Handle {
    /// Bits of the pointer that hold the place, plus one: no handle is null.
    const PLACE_BITS: u32 = 16;

    pub(crate) fn to_c(self) -> DeviceHandle {
        std::ptr::without_provenance_mut((self.generation as usize) << Self::PLACE_BITS | (self.place + 1))
    }

    pub(crate) fn from_c(handle: DeviceHandle) -> Result<Self, Code> {
        let place = handle.addr() & ((1 << Self::PLACE_BITS) - 1);
        let generation = u32::try_from(handle.addr() >> Self::PLACE_BITS);
        Ok(Self {
            place: place.checked_sub(1).ok_or(Code::INVALID_ARGUMENT)?,
            generation: generation.map_err(|_| Code::INVALID_ARGUMENT)?,
        })
    }
}

/// One GPU in one content of the file.
pub(crate) struct Answering {
    pub(crate) state: Arc<State>,
    pub(crate) place: usize,
}

impl Deref for Answering {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.state.gpus[self.place]
    }
}

impl Answering {
    pub(crate) fn handle(&self) -> Handle {
        Handle { place: self.place, generation: self.generation }
    }

    /// How many enumerated GPUs stand before this one.
    pub(crate) fn index(&self) -> usize {
        enumerated(&self.state).take_while(|place| *place < self.place).count()
    }
}

/// The GPU that `handle` means, as [`answering`] finds it.
pub(crate) fn gpu(handle: DeviceHandle, call: &str) -> Result<Answering, Code> {
    let handle = Handle::from_c(handle)?;
    answering(handle.place, call, Some(handle))
}

/// The entry of every call on a GPU: waits while the GPU or this call hangs, takes as long as the file
/// says, and fails as it says.
pub(crate) fn answering(place: usize, call: &str, handle: Option<Handle>) -> Result<Answering, Code> {
    let mut delayed = false;
    loop {
        let gpu = Answering { state: state()?, place };
        if place >= gpu.state.gpus.len() {
            return Err(Code::INVALID_ARGUMENT);
        }
        let delay = gpu.delays_ms.get(call).or_else(|| gpu.delays_ms.get("*"));
        if gpu.hang || gpu.hangs.contains(call) {
            thread::sleep(HANG_POLL);
        } else if let (Some(milliseconds), false) = (delay, delayed) {
            thread::sleep(Duration::from_millis(*milliseconds));
            delayed = true;
        } else if gpu.absent || handle.is_some_and(|handle| handle != gpu.handle()) {
            return Err(Code::INVALID_ARGUMENT);
        } else {
            return match failure(&gpu, call) {
                Some(code) => Err(code),
                None => Ok(gpu),
            };
        }
    }
}

/// The code that the file makes `call` fail with on this GPU.
fn failure(gpu: &Gpu, call: &str) -> Option<Code> {
    let reset = gpu.reset_required.then_some(Code::RESET_REQUIRED);
    forced(gpu, call).or(lost(gpu)).or(reset)
}

pub(crate) fn forced(gpu: &Gpu, call: &str) -> Option<Code> {
    let code = gpu.errors.get(call).or_else(|| gpu.errors.get("*"));
    code.map(|code| Code(*code))
}

pub(crate) fn lost(gpu: &Gpu) -> Option<Code> {
    gpu.lost.then_some(Code::GPU_IS_LOST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn each_content_of_the_file_has_its_own_stamp() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        let state = State::healthy("a", 1);
        let stamps: HashSet<Stamp> = (0..200)
            .map(|_| {
                state.save(&path).unwrap();
                Stamp::of(&path).unwrap()
            })
            .collect();
        assert_eq!(stamps.len(), 200);
    }
}
