//! The whole control plane in virtual time: several daemons around the real engine, a store with leases and fenced
//! writes, agents and workers, and a network that fails. Everything follows from a [`Script`]: a seed, a cluster and a
//! list of faults. After every event the invariants of the design are checked ([`invariants`]).
//!
//! A story ([`World::story`]) is a quiet world: one daemon, whose writes are done at once, and no fault but those told.

mod agent;
mod brief;
mod carry;
mod cluster;
mod daemon;
mod dial;
mod faults;
mod harm;
pub mod invariants;
mod memory;
mod net;
mod orders;
mod outcome;
mod plane;
mod random;
mod sabotage;
mod script;
mod store;
mod story;
mod wish;
mod worker;
mod world;

pub use agent::killed;
pub use brief::brief;
pub use cluster::{Cluster, ENDLESS, TIMEOUTS, Who, gpu, node, spec};
pub use net::MS;
pub use outcome::{Ending, Outcome, Statistics, replay};
pub use random::Random;
pub use sabotage::Sabotage;
pub use script::{Fault, NEVER, Script, Way};
pub use story::*;
pub use worker::Worker;
pub use world::World;
