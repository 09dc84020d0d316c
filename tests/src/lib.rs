//! Whole clusters of real processes, for the tests in `process`.

pub mod etcd;
pub mod job;
pub mod lab;
pub mod process;
pub mod watch;

pub use lab::{Lab, LabOptions};
pub use watch::Watch;

/// A whole number from the environment.
pub fn setting(name: &str, default: u64) -> anyhow::Result<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().map_err(|error| anyhow::anyhow!("{name}={text}: {error}")),
        Err(_) => Ok(default),
    }
}
