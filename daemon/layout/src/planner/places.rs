//! The nominal places and who fills them, by number.

use crate::{PlanRequest, ReplicaId, StageId, WorkerKey};
use std::ops::Range;

/// Groups are numbered by replica, then stage.
pub(super) struct Places<'a> {
    stages: usize,
    slots: usize,
    /// By group, then slot.
    workers: Vec<Option<&'a WorkerKey>>,
}

impl<'a> Places<'a> {
    pub(super) fn new(request: &PlanRequest<'a>) -> Self {
        let parallel = &request.job.parallel;
        let [data, stages, slots] =
            [parallel.data, parallel.pipeline, parallel.tensor].map(|count| count as usize);
        let mut workers = vec![None; data * stages * slots];
        for (place, worker) in request.members {
            let [replica, stage, slot] =
                [place.replica.0, place.stage.0, place.slot.0].map(|number| number as usize);
            if replica < data && stage < stages && slot < slots {
                workers[(replica * stages + stage) * slots + slot] = Some(worker);
            }
        }
        Self { stages, slots, workers }
    }

    /// How many groups there are.
    pub(super) fn groups(&self) -> usize {
        self.workers.len() / self.slots
    }

    /// The group of a place.
    pub(super) fn group(&self, place: usize) -> usize {
        place / self.slots
    }

    pub(super) fn replica(&self, group: usize) -> ReplicaId {
        ReplicaId((group / self.stages) as u32)
    }

    pub(super) fn stage(&self, group: usize) -> StageId {
        StageId((group % self.stages) as u32)
    }

    /// The members in the order of places.
    pub(super) fn all(&self) -> &[Option<&'a WorkerKey>] {
        &self.workers
    }

    /// The numbers of a group's places.
    pub(super) fn of(&self, group: usize) -> Range<usize> {
        group * self.slots..(group + 1) * self.slots
    }

    /// The member of each slot of a group.
    pub(super) fn workers(&self, group: usize) -> &[Option<&'a WorkerKey>] {
        &self.workers[self.of(group)]
    }
}
