//! What failures cost: closed forms and a small Monte Carlo on top of the planner's unit balance.
//!
//! A pure crate: no clock, file, socket or thread; random numbers come from a seed and counters.

mod availability;
mod random;
mod throughput;

pub use availability::{availability, failed_gpus};
pub use throughput::{Fleet, FleetError, Strategy, throughput_loss};
