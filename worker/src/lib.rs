//! One rank of a training job: the step protocol, the live reshard, and the session with the daemon.
//!
//! [`rank::Rank`] holds the state and does the work, on one thread and without knowing of the daemon.
//! [`control`] drives it by the daemon's orders; [`session`] carries orders and reports over gRPC.

pub mod abort;
pub mod ahead;
pub mod config;
pub mod control;
pub mod convert;
pub mod data;
pub mod exchange;
pub mod groups;
pub mod messages;
pub mod pace;
pub mod parcels;
pub mod rank;
pub mod reshard;
pub mod saver;
pub mod session;
pub mod status;
pub mod sync;
