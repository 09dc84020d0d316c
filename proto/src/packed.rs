//! What thousands are sent, made small once: the parts of a layout are long and say the same again and again.

use flate2::Compression;
use flate2::read::{DeflateDecoder, DeflateEncoder};
use std::io::{self, Read};

/// Nothing unpacks to more: a plan of a large cluster is some megabytes.
const LARGEST: u64 = 64 << 20;

/// Raw deflate (RFC 1951), quick rather than small. Empty stays empty.
#[must_use]
pub fn pack(bytes: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    if !bytes.is_empty() {
        // Reading from memory and writing to memory does not fail.
        let _ = DeflateEncoder::new(bytes, Compression::fast()).read_to_end(&mut packed);
    }
    packed
}

/// What [`pack`] was given.
///
/// # Errors
/// When it was not made by [`pack`], or would be larger than 64 MiB.
pub fn unpack(packed: &[u8]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if !packed.is_empty() {
        let read = DeflateDecoder::new(packed).take(LARGEST + 1).read_to_end(&mut bytes)?;
        if read as u64 > LARGEST {
            return Err(io::Error::other("it unpacks to more than 64 MiB"));
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_comes_back() {
        for bytes in [&b""[..], b"a", &[7; 100_000]] {
            let packed = pack(bytes);
            assert_eq!(unpack(&packed).unwrap(), bytes);
        }
        assert!(pack(&[7; 100_000]).len() < 1_000);
    }

    #[test]
    fn nonsense_and_what_grows_without_end_are_refused() {
        assert!(unpack(b"\xff\xff\xff").is_err());
        let bomb = pack(&vec![0; (LARGEST + 1) as usize]);
        assert!(bomb.len() < 1 << 20);
        assert!(unpack(&bomb).is_err());
    }
}
