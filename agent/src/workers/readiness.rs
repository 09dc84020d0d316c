//! Registers a descriptor with the runtime; the one call for which it asks a promise.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Tells when `fd` is readable.
pub(super) fn readable(fd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the `AsyncFd` holds a share of the `OwnedFd`, so the descriptor stays open and the same for at
    // least as long as it does.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}
