//! Clusters of real processes on this machine. Needs all programs: `cargo build --workspace` first.

mod agents;
mod checkpoints;
mod faults;
mod hang;
mod load;
mod recovery;
mod takeover;
mod takeover_embedded;
mod takeover_standby;
mod wrong_store;
