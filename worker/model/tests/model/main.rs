//! The model as a whole: gradients, sharding, movement of state, training.

mod definition;
mod differences;
mod modes;
mod optimizer;
mod reshard;
mod sharded;
mod sink;
mod support;
mod threads;
mod training;
