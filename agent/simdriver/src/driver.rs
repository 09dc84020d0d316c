//! The loaded driver: the control file's newest content, and which GPU a handle means.

use crate::abi::{Code, DeviceHandle};
use crate::state::{Gpu, STATE_VARIABLE, State};
use std::fs;
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
#[derive(PartialEq, Eq)]
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
        let mut loaded = Self { path, stamp: None, state: Err(Code::DriverNotLoaded) };
        loaded.read();
        loaded
    }

    fn read(&mut self) {
        // The stamp comes first: if the file changes in between, the next call reads it once more.
        self.stamp = Stamp::of(&self.path);
        self.state = State::load(&self.path).map(Arc::new).map_err(|e| {
            eprintln!("simulated NVML driver: {e}");
            Code::DriverNotLoaded
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
        return Err(Code::DriverNotLoaded);
    };
    let mut driver = driver();
    if driver.users == 0 {
        let mut loaded = Loaded::new(PathBuf::from(path));
        loaded.state()?;
        driver.loaded = Some(loaded);
    }
    driver.users += 1;
    Ok(())
}

pub(crate) fn shutdown() -> Result<(), Code> {
    let mut driver = driver();
    match driver.users {
        0 => return Err(Code::Uninitialized),
        1 => driver.loaded = None,
        2.. => {}
    }
    driver.users -= 1;
    Ok(())
}

/// The control file's newest content.
pub(crate) fn state() -> Result<Arc<State>, Code> {
    driver().loaded.as_mut().ok_or(Code::Uninitialized)?.state()
}

pub(crate) fn state_path() -> Result<PathBuf, Code> {
    let driver = driver();
    let loaded = driver.loaded.as_ref().ok_or(Code::Uninitialized)?;
    Ok(loaded.path.clone())
}

/// Places in the file of the GPUs that enumeration shows; a client's index counts these.
pub(crate) fn enumerated(state: &State) -> impl Iterator<Item = usize> {
    (0..state.gpus.len()).filter(|place| !state.gpus[*place].absent)
}

pub(crate) fn handle_of(place: usize) -> DeviceHandle {
    std::ptr::without_provenance_mut(place + 1)
}

pub(crate) fn place_of(handle: DeviceHandle) -> Result<usize, Code> {
    handle.addr().checked_sub(1).ok_or(Code::InvalidArgument)
}

/// The GPU at `place`, once it answers: waits while it hangs, fails as it is told to.
pub(crate) fn answering(place: usize) -> Result<Gpu, Code> {
    loop {
        let state = state()?;
        let gpu = state.gpus.get(place).ok_or(Code::InvalidArgument)?;
        if gpu.hang {
            thread::sleep(HANG_POLL);
            continue;
        }
        return if gpu.absent {
            Err(Code::InvalidArgument)
        } else if gpu.lost {
            Err(Code::GpuIsLost)
        } else if gpu.reset_required {
            Err(Code::ResetRequired)
        } else {
            Ok(gpu.clone())
        };
    }
}

pub(crate) fn gpu(handle: DeviceHandle) -> Result<Gpu, Code> {
    answering(place_of(handle)?)
}
