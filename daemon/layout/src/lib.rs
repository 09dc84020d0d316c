//! Who holds which slice of the model: ids, topology, units, partitions, the planner and its linter.
//!
//! A pure crate: plain functions over plain data. No clock, file, socket, thread or randomness.

pub mod check;
pub mod holding;
pub mod ids;
pub mod job;
pub mod layout;
pub mod plan;
mod planner;
mod stages;
pub mod units;

pub use check::{Rule, Violation, check};
pub use holding::Holding;
pub use ids::{
    Axis, Epoch, Family, GpuId, Incarnation, NodeName, Place, ReplicaId, Slot, StageId, Step, WorkerKey,
};
pub use job::{JobError, JobSpec};
pub use layout::{Group, Layout, Member, SyncAxis, SyncColumns};
pub use plan::{Plan, PlanError, PlanRequest, Transfer};
pub use planner::plan;
pub use units::Units;
