//! Memory that two ranks of one node share: one writes it, the other only reads it.
//!
//! The writer makes an anonymous file, maps it, and seals it: nobody can resize it, punch holes into it, or map it for
//! writing again. So a peer can neither make this rank's mapping fault nor change what this rank wrote. What it reads
//! of a peer's window is plain bytes and numbers that it must check: a peer may write anything there, at any time.

#![allow(unsafe_code)]

use super::streaming;
use rustix::fs::memfd_create;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Before the ring's bytes: the words, each on a cache line of its own.
const WORDS: usize = 4096;
const LINE: usize = 128;

/// A number in a window's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// Bytes the owner has put into this window's ring so far.
    Written,
    /// Bytes the owner has taken out of its peer's ring so far.
    Taken,
    /// The owner sleeps until the peer has written more than this.
    UntilWritten,
    /// The owner sleeps until the peer has taken this much.
    UntilTaken,
}

impl Word {
    fn offset(self) -> usize {
        let place = match self {
            Word::Written => 0,
            Word::Taken => 1,
            Word::UntilWritten => 2,
            Word::UntilTaken => 3,
        };
        place * LINE
    }
}

/// Why a descriptor that a peer passed is no window.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoWindow {
    #[error("it is not sealed against resizing")]
    Unsealed,
    #[error("it has {found} bytes, expected {expected}")]
    Size { found: u64, expected: u64 },
    #[error("{0}")]
    System(#[from] Errno),
}

/// A shared mapping of `WORDS + ring` bytes, unmapped when dropped.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    ring: usize,
}

// SAFETY: the mapping belongs to this value alone and may be used from any thread; all its methods that write take
// `&mut self` or are atomic.
unsafe impl Send for Mapping {}

impl Mapping {
    /// `ring` is a power of two, and the file has `WORDS + ring` bytes.
    fn new(file: impl AsFd, ring: usize, protection: ProtFlags) -> Result<Mapping, Errno> {
        // SAFETY: the kernel chooses a place that nothing else uses; the length is not zero.
        let start =
            unsafe { mmap(std::ptr::null_mut(), WORDS + ring, protection, MapFlags::SHARED, file, 0)? };
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Mapping { start, ring })
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        // SAFETY: the word lies within the first page of the mapping, which starts on a page boundary, so it is
        // aligned; it is only ever accessed atomically, by this process and by its peer. On a read-only mapping the
        // callers only load, which on this width is a plain read.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(word.offset()).cast()) }
    }

    /// Where byte number `position` of the stream lies, and how many follow before the ring's end.
    fn place(&self, position: u64) -> (*mut u8, usize) {
        let at = (position % self.ring as u64) as usize;
        // SAFETY: `at < ring`, so the place is inside the mapping.
        (unsafe { self.start.as_ptr().add(WORDS + at) }, self.ring - at)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `new` made, and nothing can use it any more. It cannot fail on what `mmap`
        // returned.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), WORDS + self.ring) };
    }
}

/// The window that this rank writes.
#[derive(Debug)]
pub(super) struct OwnWindow(Mapping);

impl OwnWindow {
    /// A fresh window with a ring of `ring` bytes, all its memory there; and the descriptor that opens it for a peer.
    pub(super) fn create(ring: usize) -> Result<(OwnWindow, OwnedFd), Errno> {
        let file = memfd_create("reknit-window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        // Now, so that a lack of memory shows here and not as a fault later.
        fallocate(&file, FallocateFlags::empty(), 0, (WORDS + ring) as u64)?;
        let mapping = Mapping::new(&file, ring, ProtFlags::READ | ProtFlags::WRITE)?;
        // The mapping above stays writable, every later one is not.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        fcntl_add_seals(&file, seals)?;
        let window = OwnWindow(mapping);
        window.set(Word::UntilWritten, u64::MAX);
        window.set(Word::UntilTaken, u64::MAX);
        Ok((window, file))
    }

    /// Everything put before is seen by whoever sees this.
    pub(super) fn set(&self, word: Word, value: u64) {
        self.0.word(word).store(value, Ordering::Release);
    }

    /// Copies to byte number `position` of the stream, up to the ring's end. Returns how many bytes.
    pub(super) fn put(&mut self, position: u64, bytes: &[u8]) -> usize {
        let (to, room) = self.0.place(position);
        let count = bytes.len().min(room);
        // SAFETY: `count` bytes from `to` on are inside the mapping and `bytes` is outside of it. No reference to the
        // mapping's bytes exists in this process, and no peer can write them; one that reads them too early gets bytes
        // that are wrong, nothing worse.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, count) };
        count
    }
}

/// The window that a peer writes.
#[derive(Debug)]
pub(super) struct PeerWindow(Mapping);

impl PeerWindow {
    /// Fails unless the file has the right size and keeps it.
    pub(super) fn open(file: impl AsFd, ring: usize) -> Result<PeerWindow, NoWindow> {
        let (found, expected) = (fstat(&file)?.st_size as u64, (WORDS + ring) as u64);
        if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(NoWindow::Unsealed);
        }
        if found != expected {
            return Err(NoWindow::Size { found, expected });
        }
        Ok(PeerWindow(Mapping::new(file, ring, ProtFlags::READ)?))
    }

    /// Everything the peer put before is seen afterwards.
    pub(super) fn get(&self, word: Word) -> u64 {
        self.0.word(word).load(Ordering::Acquire)
    }

    /// Copies from byte number `position` of the stream, up to the ring's end. Returns how many bytes. `past_cache`: more
    /// of them go to one place than a cache holds.
    pub(super) fn take(&self, position: u64, into: &mut [u8], past_cache: bool) -> usize {
        let (from, room) = self.0.place(position);
        let count = into.len().min(room);
        // SAFETY: `count` bytes from `from` on are inside the mapping, whose file can neither shrink nor lose pages, and
        // `into` is outside of it. A peer that keeps to the protocol does not write them now (it waits for `Taken`); one
        // that does not can only change which bytes are copied, and any bytes are valid here. No reference to them is
        // ever made.
        unsafe {
            if past_cache {
                streaming::copy(from, into.as_mut_ptr(), count);
            } else {
                std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), count);
            }
        }
        count
    }
}
