//! Who holds which slice of the model: ids, topology, units, partitions, the planner and its linter.
//!
//! A pure crate: plain functions over plain data. No clock, file, socket, thread or randomness.

mod batch;
pub mod check;
pub mod checkpoint;
mod circles;
mod contingency;
mod cost;
mod grid;
pub mod holding;
mod holdings_file;
pub mod ids;
pub mod job;
pub mod layout;
pub mod memory;
pub mod plan;
mod planner;
pub mod power;
mod seating;
mod stages;
mod table;
pub mod toml_file;
pub mod topology;
pub mod units;

pub use check::{Rule, Violation, check};
pub use checkpoint::{BadCheckpointId, CheckpointId};
pub use circles::{Circle, Circles, Part};
pub use contingency::{Contingency, Exposure, contingency, contingency_of_lost};
pub use cost::Predicted;
pub use holding::Holding;
pub use holdings_file::HoldingsFile;
pub use ids::{
    Axis, DomainName, Epoch, Family, GpuId, Incarnation, NodeName, Place, ReplicaId, Slot, StageId, Step,
    WorkerKey,
};
pub use job::JobSpec;
pub use layout::{Group, Layout, Member, Partitions, SyncAxis, SyncColumns};
pub use plan::{Candidate, Draft, DraftError, Plan, PlanError, PlanRequest, Transfer, candidates};
pub use planner::{draft, lost, plan};
pub use seating::{BadMode, Mode, Seating, SeatingError, Seats, reseat, seat};
pub use toml_file::FileError;
pub use topology::Topology;
pub use units::Units;
