//! Files in memory, as the kernel maps them.

#![allow(unsafe_code)]

use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file that is mapped, with its length when it was.
#[derive(Debug)]
pub(crate) struct Map {
    file: File,
    bytes: Mmap,
}

impl Map {
    /// A regular file; `None` where it is empty.
    pub(crate) fn open(path: &Path) -> io::Result<Option<Self>> {
        // Looked at first: opening a pipe would wait for its writer.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::other("it is not a file"));
        }
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(None);
        }
        // SAFETY: the bytes are only ever copied out, as numbers for which any value is allowed, and no reference to them
        // outlives the copy. A file that changes meanwhile gives other numbers. One that is cut off below the map
        // would end the process with SIGBUS; `bytes` asks for the length before every use, and docs/data.md says that
        // data files must not be changed while a job trains on them.
        let bytes = unsafe { Mmap::map(&file)? };
        Ok(Some(Self { file, bytes }))
    }

    pub(crate) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Other numbers once the file is another or was written to: what it is known by, its length, and when it was changed.
    pub(crate) fn version(&self) -> io::Result<[i128; 6]> {
        let of = self.file.metadata()?;
        Ok([
            of.ino().into(),
            of.len().into(),
            of.mtime().into(),
            of.mtime_nsec().into(),
            of.ctime().into(),
            of.ctime_nsec().into(),
        ])
    }

    /// `None`: the file has become shorter than it was.
    pub(crate) fn bytes(&self) -> io::Result<Option<&[u8]>> {
        let whole = self.file.metadata()?.len() >= self.len();
        Ok(whole.then_some(&self.bytes[..]))
    }
}
