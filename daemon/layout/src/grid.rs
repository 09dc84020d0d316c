//! The nominal places by number: by replica, then stage, then slot. Groups are numbered alike.

use crate::{JobSpec, Place, ReplicaId, Slot, StageId};
use std::ops::Range;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    replicas: usize,
    stages: usize,
    slots: usize,
}

impl Grid {
    pub(crate) fn new(job: &JobSpec) -> Self {
        let parallel = &job.parallel;
        let [replicas, stages, slots] =
            [parallel.data, parallel.pipeline, parallel.tensor].map(|count| count as usize);
        Self { replicas, stages, slots }
    }

    /// How many places there are.
    pub(crate) fn places(self) -> usize {
        self.groups() * self.slots
    }

    pub(crate) fn groups(self) -> usize {
        self.replicas * self.stages
    }

    /// The number of a place of the nominal layout.
    pub(crate) fn number(self, place: Place) -> Option<usize> {
        let [replica, stage, slot] =
            [place.replica.0, place.stage.0, place.slot.0].map(|number| number as usize);
        let inside = replica < self.replicas && stage < self.stages && slot < self.slots;
        inside.then_some((replica * self.stages + stage) * self.slots + slot)
    }

    pub(crate) fn place(self, number: usize) -> Place {
        let group = self.group(number);
        let slot = Slot((number % self.slots) as u32);
        Place { replica: self.replica(group), stage: self.stage(group), slot }
    }

    /// The group of a place.
    pub(crate) fn group(self, place: usize) -> usize {
        place / self.slots
    }

    /// The places of a group.
    pub(crate) fn of(self, group: usize) -> Range<usize> {
        group * self.slots..(group + 1) * self.slots
    }

    pub(crate) fn replica(self, group: usize) -> ReplicaId {
        ReplicaId((group / self.stages) as u32)
    }

    pub(crate) fn stage(self, group: usize) -> StageId {
        StageId((group % self.stages) as u32)
    }
}
