//! The life of a job as a pure state machine: events in, commands out.
//!
//! The shell feeds [`Event`]s with the time they were seen and carries out the [`Command`]s in order.
//! Nothing here reads a clock, a file or a socket.

mod cluster;
pub mod command;
pub mod event;
mod hold;
pub mod incident;
mod job;
pub mod record;
pub mod refusal;
pub mod state;
mod step;
pub mod timeouts;
pub mod view;

pub use command::{Command, Notice, Participant};
pub use event::{
    Activity, Endpoint, Event, ExitStatus, GpuReport, HealthClass, StepPart, StepVote, WorkerPhase,
    WorkerState,
};
pub use hold::Hold;
pub use incident::{Incident, IncidentKind};
pub use record::{DrainedBy, JobRecord, Phase};
pub use refusal::Refusal;
pub use state::State;
pub use step::step;
pub use timeouts::Timeouts;
pub use view::{GpuView, JobView, NodeLink, NodeView, WorkerView};

use serde::{Deserialize, Serialize};

/// Microseconds since the Unix epoch, from the shell's one clock (which never runs backwards).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Time(pub u64);

impl Time {
    pub fn after(self, wait: std::time::Duration) -> Self {
        Self(self.0.saturating_add(wait.as_micros() as u64))
    }
}

/// A job's name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobName(pub String);

impl std::fmt::Display for JobName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}
