//! How agents, workers and operators reach the daemon that leads.

mod daemons;
mod dialer;

pub use daemons::{BadAddress, Daemons, LEADER, Next, leader};
pub use dialer::{Dialer, Ended, Opening};

/// The innermost error says what happened; those around it say such as `transport error`.
#[must_use]
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut inner = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}
