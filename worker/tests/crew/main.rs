//! A job's ranks as threads of one process, over the real host plane, led by a small script instead of a daemon.
//!
//! Here faults hit exact operations, which no signal to a process can do: the same faults at the same points.

#![allow(clippy::unwrap_used)] // A failed set-up fails the test.

mod chaos;
mod checkpoints;
mod crew;
mod expecting;
mod fault;
mod overlap;
mod parcels;
mod recovery;
