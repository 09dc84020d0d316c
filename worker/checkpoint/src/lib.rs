//! Checkpoints: the state of a job on disk, in coordinates that no layout is part of.
//!
//! A job's checkpoints lie in one folder that all its nodes share, each in a folder of its own, named by a
//! [`CheckpointId`](reknit_layout::CheckpointId). In it lie
//!
//! - safetensors files, each with some units of one axis, or with the replicated parameters: `weights`, `first_moments` and
//!   `second_moments`, of the shape `[units, rows, hidden]` (see [`codec`]). Their names hold the SHA-256 of their content,
//!   so that what has not changed since the last checkpoint is linked and not written again;
//! - one `part-WRITER.json` per writer: what it wrote, with the full checksums. Until it is done, whose folder this is;
//! - `manifest.json`, all parts in one: only a folder that has it is a checkpoint. The writer that finds that the parts
//!   have every unit (COVER) makes it, so nobody has to be told who the others are.
//!
//! Nothing is changed in place: a file gets its name when all of it is on the disk, the manifest last. Who dies half-way
//! leaves a folder without a manifest, and every earlier checkpoint as it was.
//!
//! A plain library: it starts no thread and knows no job but by its [`Heading`].

pub mod codec;
mod disk;
mod error;
pub mod export;
mod manifest;
mod reader;
mod store;
mod writer;

pub use error::CheckpointError;
pub use manifest::{FORMAT_VERSION, FileEntry, Heading, Manifest, SavedVote, job_sha256};
pub use reader::Checkpoint;
pub use store::{Found, Store};
pub use writer::{Snapshot, Written, to_write};
