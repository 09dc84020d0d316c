//! Copies of more than a cache holds: they leave it to what else is worked with, and to the ring that is copied from. On
//! x86-64 an ordinary store would first fetch the line that it is going to overwrite.

#![allow(unsafe_code)]

/// Copies `count` bytes; they are seen by other threads no later than what this one writes afterwards.
///
/// # Safety
/// `from` can be read and `to` can be written for `count` bytes, and the two do not overlap.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, count: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    let head = to.align_offset(LINE).min(count);
    let lines = (count - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: head, lines and tail are `count` bytes together, so all stays inside what the caller allows. SSE2 is part
    // of x86-64. `to + head` is aligned for the stores; the loads need no alignment.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        let (source, target) = (from.add(head).cast::<__m128i>(), to.add(head).cast::<__m128i>());
        for line in 0..lines {
            let (source, target) = (source.add(4 * line), target.add(4 * line));
            let words = [0, 1, 2, 3].map(|at| _mm_loadu_si128(source.add(at)));
            for (at, word) in words.into_iter().enumerate() {
                _mm_stream_si128(target.add(at), word);
            }
        }
        std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), count - tail);
        // These stores are not ordered with later ones by themselves.
        _mm_sfence();
    }
}

/// Copies `count` bytes.
///
/// # Safety
/// `from` can be read and `to` can be written for `count` bytes, and the two do not overlap.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(from, to, count) };
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_byte_arrives_and_no_other_is_touched() {
        let from: Vec<u8> = (0..400_u16).map(|byte| byte as u8).collect();
        for start in 0..70 {
            for count in [0, 1, 15, 16, 63, 64, 65, 128, 200, 300] {
                let mut to = vec![0xee; 400];
                // SAFETY: both vectors are longer than 70 + 300 bytes.
                unsafe { super::copy(from.as_ptr().add(start / 3), to.as_mut_ptr().add(start), count) };
                let mut expected = vec![0xee; 400];
                expected[start..start + count].copy_from_slice(&from[start / 3..start / 3 + count]);
                assert_eq!(to, expected, "{count} bytes at {start}");
            }
        }
    }
}
