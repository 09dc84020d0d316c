//! The coordinator: a shell of sockets, stores and one clock around the pure engine.
//!
//! One task, [`run::Coordinator`], owns the engine's state. Everything that happens reaches it through one
//! bounded channel, and it carries out the engine's commands in order.

pub mod agents;
pub mod clock;
pub mod config;
pub mod failure;
pub mod input;
pub mod rpc;
pub mod run;
pub mod serve;
pub mod sessions;
pub mod store;
pub mod tickets;

pub use config::Config;
pub use failure::Failure;
