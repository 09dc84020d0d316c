//! Memory asked of the kernel in one go, and given back to it.

#![allow(unsafe_code)]

use crate::Real;
use rustix::mm::{Advice, madvise};
use rustix::param::page_size;
use std::mem::MaybeUninit;

/// Asked for at a time, in bytes: so little that it is in the cache when it is written.
const AT_A_TIME: usize = 256 << 10;

/// Makes the buffer longer, by zeros. A page that is first touched by writing costs a fault of its own, which takes longer than to
/// make the page.
pub(crate) fn lengthen<T: Real>(buffer: &mut Vec<T>, len: usize) {
    buffer.reserve_exact(len.saturating_sub(buffer.len()));
    while buffer.len() < len {
        let more = (len - buffer.len()).min(AT_A_TIME / size_of::<T>());
        populate(&mut buffer.spare_capacity_mut()[..more]);
        buffer.resize(buffer.len() + more, T::ZERO);
    }
}

/// Has the kernel make the pages that lie wholly inside. Those that it does not are made when they are written.
fn populate<T>(room: &mut [MaybeUninit<T>]) {
    let start = room.as_mut_ptr().cast::<u8>();
    let before = start.align_offset(page_size());
    let len = size_of_val(room).saturating_sub(before) / page_size() * page_size();
    if len > 0 {
        // SAFETY: the pages are part of `room`, which is borrowed for this alone, and this advice changes no byte of them.
        let _ = unsafe { madvise(start.wrapping_add(before).cast(), len, Advice::LinuxPopulateWrite) };
    }
}

/// Gives what is free back to the kernel, also between blocks that are in use: by itself the C library does so at the end of
/// its heap only. The free pages that are used again cost a fault each.
pub(crate) fn give_back() {
    // SAFETY: this may be called at any time, from any thread.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_stays_and_zeros_follow() {
        for (from, to) in [(0, 0), (0, 3), (3, 3), (5, 1 << 17), (70_001, 500_003)] {
            let mut buffer: Vec<f32> = (0..from).map(|at| at as f32 + 1.0).collect();
            let before = buffer.clone();
            lengthen(&mut buffer, to);
            assert_eq!((&buffer[..from], buffer.len(), buffer.capacity()), (&before[..], to, to));
            assert!(buffer[from..].iter().all(|&value| value == 0.0), "{from} to {to}");
        }
    }
}
