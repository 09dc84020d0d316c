//! The wire protocol, generated from `proto/reknit/v1`.

/// Package `reknit.v1`.
#[allow(missing_debug_implementations, clippy::all, unused_qualifications, unreachable_pub)]
pub mod v1 {
    tonic::include_proto!("reknit.v1");
}

/// The compiled protocol, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/reknit.v1.bin"));
