//! The nominal places by number: by replica, then stage, then slot. Groups are numbered alike.

use crate::{JobSpec, Place, ReplicaId, Slot, StageId};
use std::ops::Range;

#[derive(Clone, Copy)]
pub(super) struct Grid {
    replicas: usize,
    stages: usize,
    slots: usize,
}

impl Grid {
    pub(super) fn new(job: &JobSpec) -> Self {
        let parallel = &job.parallel;
        let [replicas, stages, slots] =
            [parallel.data, parallel.pipeline, parallel.tensor].map(|count| count as usize);
        Self { replicas, stages, slots }
    }

    /// How many places there are.
    pub(super) fn places(self) -> usize {
        self.groups() * self.slots
    }

    pub(super) fn groups(self) -> usize {
        self.replicas * self.stages
    }

    /// The number of a place of the nominal layout.
    pub(super) fn number(self, place: Place) -> Option<usize> {
        let [replica, stage, slot] =
            [place.replica.0, place.stage.0, place.slot.0].map(|number| number as usize);
        let inside = replica < self.replicas && stage < self.stages && slot < self.slots;
        inside.then_some((replica * self.stages + stage) * self.slots + slot)
    }

    pub(super) fn place(self, number: usize) -> Place {
        let group = self.group(number);
        let slot = Slot((number % self.slots) as u32);
        Place { replica: self.replica(group), stage: self.stage(group), slot }
    }

    /// The group of a place.
    pub(super) fn group(self, place: usize) -> usize {
        place / self.slots
    }

    /// The places of a group.
    pub(super) fn of(self, group: usize) -> Range<usize> {
        group * self.slots..(group + 1) * self.slots
    }

    pub(super) fn replica(self, group: usize) -> ReplicaId {
        ReplicaId((group / self.stages) as u32)
    }

    pub(super) fn stage(self, group: usize) -> StageId {
        StageId((group % self.stages) as u32)
    }
}
