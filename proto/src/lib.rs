//! The wire protocol, generated from `proto/reknit/v1`, and how what is sent to many is packed.

/// Package `reknit.v1`.
#[allow(missing_debug_implementations, clippy::all, unused_qualifications, unreachable_pub)]
pub mod v1 {
    tonic::include_proto!("reknit.v1");
}

/// To encode a message ahead, and what that gives.
pub use prost::Message;
pub use prost::bytes::Bytes;

mod packed;
mod verdict;

pub use packed::{pack, unpack};

/// The compiled protocol, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/reknit.v1.bin"));
