//! ATTRIBUTED: one record per fault.

use crate::{JobName, Time};
use reknit_layout::{Epoch, GpuId, NodeName, Place};
use serde::{Deserialize, Serialize};

/// What failed, who saw it first, how long each phase took, what it cost, what to do.
///
/// A time is `None` when its phase was not reached.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Incident {
    pub id: u64,
    pub job: JobName,
    pub kind: IncidentKind,
    pub place: Option<Place>,
    pub gpu: Option<GpuId>,
    /// The GPU's number on its node.
    #[serde(default)]
    pub index: Option<u32>,
    pub node: Option<NodeName>,
    /// What was seen, in words.
    pub signal: String,
    pub first_reporter: String,
    pub epoch_before: Epoch,
    pub epoch_after: Option<Epoch>,
    /// The first sign of it. The others follow in this order; each phase starts where the one before ended.
    pub detected: Time,
    pub quiesced: Option<Time>,
    pub fenced: Option<Time>,
    pub planned: Option<Time>,
    pub ready: Option<Time>,
    pub committed: Option<Time>,
    /// The first step after it was committed.
    pub recovered: Option<Time>,
    pub steps_lost: u64,
    pub bytes_moved: u64,
    pub bytes_lower_bound: u64,
    pub degrees_before: Vec<u32>,
    pub degrees_after: Vec<u32>,
    pub advice: String,
    /// Only told: nothing is to be recovered from, and `recovered` says when it was over.
    #[serde(default)]
    pub told: bool,
}

/// How many incidents of a job are kept for operators.
pub const KEPT: usize = 1000;

impl Incident {
    /// The incident of its job that is forgotten when this one is kept.
    pub fn replaces(&self) -> Option<u64> {
        self.id.checked_sub(KEPT as u64).filter(|id| *id > 0)
    }

    /// A recovery that begins anew goes through its phases again: what the attempt before reached is over.
    pub(crate) fn forget_earlier_attempt(&mut self) {
        let mut reached = self.detected;
        for phase in
            [&mut self.quiesced, &mut self.fenced, &mut self.planned, &mut self.ready, &mut self.committed]
        {
            *phase = phase.filter(|at| *at >= reached);
            reached = phase.unwrap_or(reached);
        }
    }

    /// When a phase ends by a clock that says `now`: never before what is recorded already. The clock of a daemon that took
    /// over may be behind the one that the record was begun by.
    pub(crate) fn not_before(&self, now: Time) -> Time {
        let phases = [self.quiesced, self.fenced, self.planned, self.ready, self.committed, self.recovered];
        phases.into_iter().flatten().fold(now.max(self.detected), Time::max)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IncidentKind {
    WorkerKilled,
    WorkerExited,
    GpuLost,
    PlaneFailed,
    Frozen,
    /// Takes longer than its share of the work explains.
    Slow,
    NodeLost,
    /// Not a fault: a drain or a rejoin.
    Planned,
}
