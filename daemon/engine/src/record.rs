//! What is stored of a job.

use crate::JobName;
use reknit_layout::{Epoch, GpuId, Incarnation, JobSpec, Layout, Place, Step};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Enough for a new daemon to go on, together with what agents and workers report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    pub name: JobName,
    pub spec: JobSpec,
    pub phase: Phase,
    pub explanation: String,
    /// The last committed layout.
    pub layout: Option<Arc<Layout>>,
    /// The highest epoch ever prepared or closed. The next one is higher: epochs never repeat.
    pub last_epoch: Epoch,
    /// The highest incarnation ever spawned.
    pub last_incarnation: Incarnation,
    /// True from the first commit on. State is never made from the seed again (NO-GUESS).
    pub ever_committed: bool,
    /// The epoch under which it last went back to a checkpoint: steps of earlier ones were given up.
    #[serde(default)]
    pub restored: Epoch,
    /// Taken out until an operator takes them back, and by whom.
    pub drained: BTreeMap<GpuId, DrainedBy>,
    pub last_incident: u64,
    /// Incidents up to this one are of earlier runs under the same name.
    #[serde(default)]
    pub earlier_incidents: u64,
    /// Incarnations up to this one too: such a worker may still be writing that run's last checkpoint.
    #[serde(default)]
    pub earlier_incarnations: Incarnation,
    /// Where training stood when the job ended or was told to; before that it is not stored.
    #[serde(default)]
    pub committed_step: Step,
    #[serde(default)]
    pub last_loss: Option<f64>,
    /// Which GPU fills which nominal place. Assigned once, when enough healthy GPUs are known.
    #[serde(default)]
    pub places: BTreeMap<Place, GpuId>,
    /// The GPUs that had the places where spares sit now.
    #[serde(default)]
    pub replaced: BTreeMap<Place, GpuId>,
}

impl JobRecord {
    /// A job nothing was done for yet.
    pub fn new(spec: JobSpec) -> Self {
        Self {
            name: JobName(spec.name.clone()),
            spec,
            phase: Phase::Pending,
            explanation: String::new(),
            layout: None,
            last_epoch: Epoch(0),
            last_incarnation: Incarnation(0),
            ever_committed: false,
            restored: Epoch(0),
            drained: BTreeMap::new(),
            last_incident: 0,
            earlier_incidents: 0,
            earlier_incarnations: Incarnation(0),
            committed_step: Step(0),
            last_loss: None,
            places: BTreeMap::new(),
            replaced: BTreeMap::new(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DrainedBy {
    Operator,
    /// It is a straggler, and the job's policy is to act on those.
    Policy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Not enough healthy GPUs are known yet.
    Pending,
    /// Workers are being started.
    Starting,
    Running,
    Quiescing,
    Resharding,
    /// Too few GPUs, or units without a live holder. The explanation says which and what the ways out are.
    Waiting,
    /// Being stopped by an operator.
    Draining,
    Stopped,
    Completed,
    Failed,
    /// A new daemon waits for reports and declares nothing lost before everyone had time.
    Rebuilding,
}

impl Phase {
    /// Nothing happens any more; the name may be used again.
    pub fn ended(self) -> bool {
        match self {
            Self::Stopped | Self::Completed | Self::Failed => true,
            Self::Pending
            | Self::Starting
            | Self::Running
            | Self::Quiescing
            | Self::Resharding
            | Self::Waiting
            | Self::Draining
            | Self::Rebuilding => false,
        }
    }
}
