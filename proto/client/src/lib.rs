//! How agents, workers and operators reach the daemon that leads, and how what is sent to many is packed.

mod daemons;
mod dialer;
mod packed;

pub use daemons::{BadAddress, Daemons, LEADER, Next, leader};
pub use dialer::{Dialer, Ended, Opening};
pub use packed::{pack, unpack};

/// The innermost error says what happened; those around it say such as `transport error`.
#[must_use]
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut inner = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}
