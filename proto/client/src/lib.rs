//! How agents, workers and operators reach the daemon that leads, and what both ends need for that.

mod daemons;
mod dialer;
mod files;

pub use daemons::{BadAddress, Daemons, LEADER, Next, leader};
pub use dialer::{Dialer, Ended, Opening};
pub use files::{allow_files, outlive_full_files};

/// The innermost error says what happened; those around it say such as `transport error`.
#[must_use]
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut inner = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}
