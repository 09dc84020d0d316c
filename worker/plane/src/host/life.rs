//! A sign of life between the ranks of one node, which ends before anything else of a killed process does.
//!
//! The kernel tears down a killed process's memory before it closes its sockets, about 65 ms for each GiB, and a pidfd
//! speaks later still. But first of all it releases the futexes on the *robust list* of each dying thread. So a plane's
//! engine thread has a page full of futexes on its list, and each peer of the node waits for one of them.

#![allow(unsafe_code)]

use super::work::lock;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};
use rustix::fs::{fcntl_get_seals, fstat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex::{self, Wait, WaitFlags, WaitPtr};
use rustix::thread::gettid;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const PAGE: usize = 4096;
/// A slot: the address of the next one, and the futex.
const SLOT: usize = 32;
const FUTEX: usize = 8;
const SLOTS: usize = PAGE / SLOT;

#[derive(Debug)]
struct Page(NonNull<u8>);

// SAFETY: the mapping belongs to this value alone, and all accesses to it are atomic.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    fn map(file: impl AsFd, protection: ProtFlags) -> Result<Page, Errno> {
        // SAFETY: the kernel chooses a place that nothing else uses.
        let start = unsafe { mmap(std::ptr::null_mut(), PAGE, protection, MapFlags::SHARED, file, 0)? };
        NonNull::new(start.cast()).map(Page).ok_or(Errno::NOMEM)
    }

    /// `slot < SLOTS`.
    fn futex(&self, slot: usize) -> &AtomicU32 {
        // SAFETY: inside the page and aligned; it is only ever accessed atomically, and by peers and on a read-only
        // mapping only loaded.
        unsafe { AtomicU32::from_ptr(self.0.as_ptr().add(slot * SLOT + FUTEX).cast()) }
    }

    /// `slot < SLOTS`.
    fn next(&self, slot: usize) -> &AtomicU64 {
        // SAFETY: inside the page and aligned; only its owner uses it, atomically.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr().add(slot * SLOT).cast()) }
    }

    fn address(&self, slot: usize) -> u64 {
        self.0.as_ptr() as u64 + (slot * SLOT) as u64
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `map` made, and nothing can use it any more.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), PAGE) };
    }
}

/// What the kernel reads of a thread's list (`struct robust_list_head`).
#[repr(C)]
#[derive(Debug)]
struct Head {
    first: u64,
    futex_offset: i64,
    pending: u64,
}

/// The signs of life that a plane gives.
#[derive(Debug)]
pub(super) struct Life {
    page: Page,
    file: OwnedFd,
    taken: Mutex<[bool; SLOTS]>,
}

impl Life {
    /// Alive from [`Life::tie`] on.
    pub(super) fn new() -> Result<Life, Errno> {
        let file = memfd_create("reknit-life", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        fallocate(&file, FallocateFlags::empty(), 0, PAGE as u64)?;
        let page = Page::map(&file, ProtFlags::READ | ProtFlags::WRITE)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        fcntl_add_seals(&file, seals)?;
        Ok(Life { page, file, taken: Mutex::new([false; SLOTS]) })
    }

    /// Ties all signs to the life of the calling thread, until the answer is dropped, on the same thread.
    pub(super) fn tie(&self) -> Result<Tie<'_>, Errno> {
        // What the kernel looks for: the futex is held by the dying thread, and somebody waits.
        let held = gettid().as_raw_nonzero().get() as u32 | futex::WAITERS;
        let mut head = Box::new(Head { first: 0, futex_offset: FUTEX as i64, pending: 0 });
        let end = &raw const *head as u64;
        for slot in 0..SLOTS {
            let next = if slot + 1 < SLOTS { self.page.address(slot + 1) } else { end };
            self.page.next(slot).store(next, Ordering::Relaxed);
            self.page.futex(slot).store(held, Ordering::Release);
        }
        head.first = self.page.address(0);
        let (mut before, mut size) = (std::ptr::null_mut::<libc::c_void>(), 0_usize);
        // SAFETY: both pointers are to variables of the right size; 0 is this thread.
        let got = unsafe { libc::syscall(libc::SYS_get_robust_list, 0, &raw mut before, &raw mut size) };
        if got != 0 || size != size_of::<Head>() {
            return Err(Errno::NOSYS);
        }
        // SAFETY: the head and the list behind it stay where they are until the tie is dropped: it owns the one, and
        // borrows the page of the other. The kernel checks every address and writes only to a futex that holds this
        // thread's number. The C library's list, for robust mutexes of its own, is put back then; the thread that is
        // tied has none, since it only runs this plane's engine.
        let set = unsafe { libc::syscall(libc::SYS_set_robust_list, &raw const *head, size_of::<Head>()) };
        if set != 0 {
            return Err(Errno::NOSYS);
        }
        Ok(Tie { _life: self, head, before })
    }

    /// A free sign of life for one more peer.
    pub(super) fn give(&self) -> Option<usize> {
        let mut taken = lock(&self.taken);
        let slot = taken.iter().position(|taken| !taken)?;
        taken[slot] = true;
        Some(slot)
    }

    pub(super) fn take_back(&self, slot: usize) {
        lock(&self.taken)[slot] = false;
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// While it lives, the end of this thread is the end of all signs.
#[derive(Debug)]
pub(super) struct Tie<'a> {
    _life: &'a Life,
    /// Where the kernel looks.
    head: Box<Head>,
    before: *mut libc::c_void,
}

impl Drop for Tie<'_> {
    fn drop(&mut self) {
        // SAFETY: this puts back what the C library had set for this thread. It cannot fail with the right size.
        unsafe { libc::syscall(libc::SYS_set_robust_list, self.before, size_of::<Head>()) };
        self.head.first = 0;
    }
}

/// A peer's sign of life.
#[derive(Debug)]
pub(super) struct Sign {
    page: Page,
    slot: usize,
    alive: u32,
}

impl Sign {
    /// `None` when that is no sign of life.
    pub(super) fn open(file: impl AsFd, slot: usize) -> Option<Sign> {
        let sealed = fcntl_get_seals(&file).ok()?.contains(SealFlags::SHRINK | SealFlags::GROW);
        let fits = fstat(&file).ok()?.st_size == PAGE as i64;
        if slot >= SLOTS || !sealed || !fits {
            return None;
        }
        let page = Page::map(file, ProtFlags::READ).ok()?;
        let alive = page.futex(slot).load(Ordering::Acquire);
        Some(Sign { page, slot, alive })
    }

    /// It changes only once, when its owner dies. An owner that changes it otherwise is not to be trusted either.
    pub(super) fn is_over(&self) -> bool {
        self.page.futex(self.slot).load(Ordering::Acquire) != self.alive
    }

    /// For [`futex::waitv`], as long as this sign lives.
    pub(super) fn wait(&self) -> Wait {
        wait(self.page.futex(self.slot), self.alive, WaitFlags::SIZE_U32)
    }
}

/// To wait as long as the futex, which must outlive the call, has this value.
pub(super) fn wait(futex: &AtomicU32, value: u32, flags: WaitFlags) -> Wait {
    let mut wait = Wait::new();
    wait.val = value.into();
    wait.uaddr = WaitPtr::new(futex.as_ptr().cast());
    wait.flags = flags;
    wait
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::thread;

    #[test]
    fn a_sign_is_over_when_its_thread_ends_with_the_tie_and_not_before() {
        let life = Life::new().unwrap();
        let slot = life.give().unwrap();
        let (tied, ready) = channel();
        let (end, ended) = channel::<()>();
        let sign = thread::scope(|scope| {
            let life = &life;
            scope.spawn(move || {
                // As when the process is killed: nothing is put back.
                std::mem::forget(life.tie().unwrap());
                tied.send(()).unwrap();
                let _the_end = ended.recv();
            });
            ready.recv().unwrap();
            let sign = Sign::open(life.file(), slot).unwrap();
            assert!(!sign.is_over());
            let no_time = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
            let flags = futex::WaitvFlags::empty();
            let clock = rustix::thread::ClockId::Monotonic;
            assert_eq!(futex::waitv(&[sign.wait()], flags, Some(&no_time), clock), Err(Errno::TIMEDOUT));
            drop(end);
            // The kernel wakes this thread: nobody else does.
            while !sign.is_over() {
                let _over_already = futex::waitv(&[sign.wait()], flags, None, clock);
            }
            sign
        });
        assert!(sign.is_over());
    }

    #[test]
    fn signs_run_out_and_come_back() {
        let life = Life::new().unwrap();
        let given: Vec<usize> = std::iter::from_fn(|| life.give()).collect();
        assert_eq!(given.len(), SLOTS);
        life.take_back(7);
        assert_eq!((life.give(), life.give()), (Some(7), None));
        assert!(Sign::open(life.file(), SLOTS).is_none());
    }
}
