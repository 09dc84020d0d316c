//! The commands that talk to a daemon.

pub(crate) mod checkpoint;
pub(crate) mod daemon;
pub(crate) mod events;
pub(crate) mod gpu;
pub(crate) mod incidents;
pub(crate) mod job;
pub(crate) mod node;
mod tokenizer;
