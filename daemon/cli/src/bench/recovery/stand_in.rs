//! What takes the cores of a worker that is gone for good.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// A thread that always computes, until this is dropped.
///
/// A GPU that is lost takes its arithmetic with it. Here the workers share the machine's cores, and those that are left
/// would get the lost one's share: training would not become slower at all.
#[derive(Debug)]
pub(super) struct StandIn {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl StandIn {
    pub(super) fn start() -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let computing = move || {
            while !told.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        };
        let thread = std::thread::Builder::new().name("stand-in".to_owned()).spawn(computing)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
