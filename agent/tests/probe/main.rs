//! The probe itself, spoken to over its socket as the supervisor does, over the simulated driver.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod events;
mod hangs;
#[path = "../harness/mod.rs"]
mod harness;
mod orders;
mod process;
mod readings;
