//! The data plane: how the ranks of a group exchange tensors.
//!
//! A [`Plane`] joins groups; a [`Group`] runs operations in the order they are submitted, on every rank the same.
//! Nothing waits without a deadline, and everything can be aborted from another thread.

pub mod buffer;
pub mod error;
pub mod group;
pub mod host;
pub mod lent;

pub use buffer::{Buffer, Element, Kind};
pub use error::{AbortReason, PlaneError};
pub use group::{Aborter, Endpoint, Group, GroupSpec, Op, Plane, Reduce, Ticket, WAITING_SHOWN, Work};
pub use host::{HostError, HostPlane, Transport};
pub use lent::Lent;
