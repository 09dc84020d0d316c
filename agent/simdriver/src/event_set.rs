//! Event sets: each has its own cursor in the sequence of events.

#![allow(unsafe_code)]

use crate::abi::Code;
use crate::driver::{self, Answering, Handle};
use crate::state::{EVENT_BITS, Event, Gpu, State};
use std::ffi::CString;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often the file is looked at when the kernel cannot tell of changes.
const POLL: Duration = Duration::from_millis(10);
/// How long a wait that hangs sleeps before it looks at the file again, changed or not.
const HANG_LOOK: Duration = Duration::from_secs(1);

pub(crate) struct EventSet {
    registrations: Mutex<Vec<Registration>>,
    /// Readable when something in the control file's folder was replaced. `None` where inotify is exhausted.
    changes: Option<File>,
}

struct Registration {
    handle: Handle,
    /// The kinds of events, as the header's bits.
    types: u64,
    /// Events up to this sequence number were delivered or are older than the registration.
    cursor: u64,
}

/// What a wait delivers.
pub(crate) struct Delivered {
    pub(crate) handle: Handle,
    pub(crate) event: Event,
}

impl EventSet {
    pub(crate) fn new() -> Result<Self, Code> {
        driver::state()?;
        Ok(Self { registrations: Mutex::new(Vec::new()), changes: watch(&driver::state_path()?) })
    }

    /// From now on this set delivers the GPU's events of these types.
    pub(crate) fn register(&self, gpu: &Answering, types: u64) -> Result<(), Code> {
        if types & !EVENT_BITS != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let cursor = gpu.state.last_sequence();
        self.lock().push(Registration { handle: gpu.handle(), types, cursor });
        Ok(())
    }

    /// The oldest event not yet delivered, within `timeout`. As with the real library a lost GPU in the
    /// set makes the wait fail at once.
    pub(crate) fn wait(&self, timeout: Duration, call: &str) -> Result<Delivered, Code> {
        let deadline = Instant::now() + timeout;
        loop {
            let state = driver::state()?;
            if let Some(code) = state.wait_error {
                return Err(Code(code));
            }
            let places: Vec<usize> = self.lock().iter().map(|r| r.handle.place).collect();
            let gpus: Vec<&Gpu> = places.iter().filter_map(|place| state.gpus.get(*place)).collect();
            if gpus.iter().any(|gpu| gpu.hangs.contains(call)) {
                self.sleep(HANG_LOOK);
                continue;
            }
            if let Some(event) = self.next(&state) {
                return Ok(event);
            }
            let failure = gpus.iter().find_map(|gpu| driver::forced(gpu, call).or(driver::lost(gpu)));
            if let Some(code) = failure {
                return Err(code);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Code::TIMEOUT);
            }
            self.sleep(left);
        }
    }

    fn next(&self, state: &State) -> Option<Delivered> {
        let mut registrations = self.lock();
        state.events.iter().find_map(|event| {
            let waiting = registrations.iter_mut().find(|r| {
                r.handle.place == event.gpu && r.types & event.kind.bit() != 0 && r.cursor < event.sequence
            })?;
            waiting.cursor = event.sequence;
            Some(Delivered { handle: waiting.handle, event: event.clone() })
        })
    }

    /// Returns when the folder changed, or after `left`.
    fn sleep(&self, left: Duration) {
        let Some(mut changes) = self.changes.as_ref() else {
            return std::thread::sleep(left.min(POLL));
        };
        let mut poll = libc::pollfd { fd: changes.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let milliseconds = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
        // SAFETY: `poll` is one valid pollfd for the length of the call.
        unsafe { libc::poll(&raw mut poll, 1, milliseconds) };
        let mut buffer = [0; 4096];
        loop {
            match changes.read(&mut buffer) {
                Ok(1..) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => return,
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Registration>> {
        self.registrations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches the folder that holds the file: the file itself is another one after each change.
fn watch(path: &Path) -> Option<File> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        Some(_) | None => Path::new("."),
    };
    let name = CString::new(folder.as_os_str().as_bytes()).ok()?;
    // SAFETY: takes no pointers; a negative answer is an error and is not made a descriptor.
    let fd = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the descriptor was just opened and nothing else owns it.
    let inotify = unsafe { OwnedFd::from_raw_fd(fd) };
    let mask = libc::IN_MOVED_TO | libc::IN_CLOSE_WRITE | libc::IN_DELETE;
    // SAFETY: `name` is a C string that outlives the call.
    let watch = unsafe { libc::inotify_add_watch(fd, name.as_ptr(), mask) };
    (watch >= 0).then(|| File::from(inotify))
}
