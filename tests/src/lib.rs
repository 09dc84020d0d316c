//! Whole clusters of real processes, for the tests in `process`.

pub mod etcd;
pub mod job;
pub mod lab;
pub mod watch;

pub use lab::{Lab, LabOptions};
pub use watch::Watch;
