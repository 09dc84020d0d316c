//! The whole control plane in virtual time: several daemons around the real engine, a store with leases and fenced
//! writes, agents and workers, and a network that fails. Everything follows from a [`Script`]: a seed and a list of
//! faults. After every event the invariants of the design are checked ([`invariants`]).

mod agent;
mod carry;
mod cluster;
mod daemon;
mod dial;
mod faults;
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
mod worker;
mod world;

pub use outcome::{Ending, Outcome, Statistics, replay};
pub use sabotage::Sabotage;
pub use script::{Fault, Script, Way};
pub use world::World;
