//! What the slots of a group shall own, given what they hold. Groups in the same situation share one answer.

use super::grid::Grid;
use super::partition;
use super::stock::{Member, Stock};
use crate::{Axis, Family, JobSpec, Partitions, StageId, Units};
use std::collections::HashMap;
use std::sync::Arc;

/// How a group is split, and what that takes.
pub(super) struct Split {
    pub(super) partitions: Arc<Partitions>,
    /// In a fixed order. Nothing in a fresh job.
    pub(super) lacks: Vec<Lack>,
    /// The least that must move into the group's slots.
    pub(super) bytes_lower_bound: u64,
    /// What moves though a slot of the group holds it.
    pub(super) bytes_to_balance: u64,
}

/// What a slot shall own and does not hold; the replicated parameters where `axis` is `None`.
pub(super) struct Lack {
    pub(super) slot: usize,
    pub(super) axis: Option<Axis>,
    pub(super) units: Units,
}

/// What a slot starts with.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Start {
    Inactive,
    Empty,
    Shard(usize),
}

pub(super) struct Splits<'a> {
    job: &'a JobSpec,
    fresh: bool,
    stock: &'a Stock<'a>,
    all: Vec<Split>,
    known: HashMap<(StageId, Vec<Start>), usize>,
}

impl<'a> Splits<'a> {
    pub(super) fn new(job: &'a JobSpec, fresh: bool, stock: &'a Stock<'a>) -> Self {
        Self { job, fresh, stock, all: Vec::new(), known: HashMap::new() }
    }

    pub(super) fn get(&self, split: usize) -> &Split {
        &self.all[split]
    }

    /// The split of a group with its members.
    pub(super) fn of(&mut self, grid: Grid, group: usize) -> usize {
        let stage = grid.stage(group);
        let start = |member: &Option<Member<'_>>| match member {
            None => Start::Inactive,
            Some(member) => self.stock.held(member, stage).map_or(Start::Empty, Start::Shard),
        };
        let members = self.stock.members(grid.of(group)).iter();
        let starts = (stage, members.map(start).collect::<Vec<_>>());
        if let Some(&split) = self.known.get(&starts) {
            return split;
        }
        self.all.push(self.make(stage, &starts.1));
        self.known.insert(starts, self.all.len() - 1);
        self.all.len() - 1
    }

    fn make(&self, stage: StageId, starts: &[Start]) -> Split {
        let job = self.job;
        let mut split = Split {
            partitions: Arc::default(),
            lacks: Vec::new(),
            bytes_lower_bound: 0,
            bytes_to_balance: 0,
        };
        let mut partitions = Partitions::new();
        for axis in job.stage_axes(stage) {
            let units = job.model.units(axis.family);
            let first_extra = |degree| first_extra(job, stage, axis, degree);
            let held = self.held(starts, axis, &first_extra);
            let made = partition::partition(units, &first_extra, &held);
            if !self.fresh {
                let bytes = job.unit_bytes(stage, axis.family);
                let anywhere = held.iter().flatten().fold(Units::new(), |sum, held| sum.union(held));
                split.bytes_lower_bound += u64::from(units - made.could_stay) * bytes;
                split.bytes_to_balance += u64::from(anywhere.len() - made.kept) * bytes;
                split.lacks.extend(lacks(axis, &held, &made.owned));
            }
            partitions.insert(axis, made.owned);
        }
        let empty = (0..starts.len()).filter(|slot| !self.fresh && starts[*slot] == Start::Empty);
        for slot in empty {
            split.bytes_lower_bound += job.replicated_bytes(stage);
            split.lacks.push(Lack { slot, axis: None, units: Units::new() });
        }
        split.partitions = partitions.into();
        split
    }

    /// What each active slot starts from. A fresh job starts as if every member held its nominal units.
    fn held(&self, starts: &[Start], axis: Axis, first_extra: &dyn Fn(u32) -> u32) -> Vec<Option<Units>> {
        let units = self.job.model.units(axis.family);
        if self.fresh {
            let slots = starts.len() as u32;
            let nominal = partition::nominal(units, slots, first_extra(slots));
            let slots = starts.iter().zip(nominal);
            return slots.map(|(start, set)| (*start != Start::Inactive).then_some(set)).collect();
        }
        let all = Units::range(0, units);
        let of = |start: &Start| match start {
            Start::Inactive => None,
            Start::Empty => Some(Units::new()),
            Start::Shard(shard) => {
                let held = self.stock.shards[*shard].units.get(&axis);
                Some(held.map(|held| held.intersection(&all)).unwrap_or_default())
            }
        };
        starts.iter().map(of).collect()
    }
}

/// Which of `degree` slots is the first with an extra unit. Each axis of the stage goes on where the one before it, by family, then
/// layer, has ended, so no slot carries more than one extra unit more than another.
fn first_extra(job: &JobSpec, stage: StageId, axis: Axis, degree: u32) -> u32 {
    let layers = job.stage_layers(stage);
    let count = layers.len() as u64;
    let before = u64::from(axis.layer.unwrap_or(0).saturating_sub(layers.start));
    let extras = |family| u64::from(job.model.units(family) % degree);
    let given = match axis.family {
        Family::Attn => before * extras(Family::Attn),
        Family::Ffn => count * extras(Family::Attn) + before * extras(Family::Ffn),
        Family::Vocab => count * (extras(Family::Attn) + extras(Family::Ffn)),
    };
    (given % u64::from(degree)) as u32
}

/// What the slots own but do not hold.
fn lacks(axis: Axis, held: &[Option<Units>], owned: &[Units]) -> Vec<Lack> {
    let slots = held.iter().zip(owned).enumerate();
    slots
        .filter_map(|(slot, (held, owned))| {
            let units = owned.difference(held.as_ref()?);
            (!units.is_empty()).then_some(Lack { slot, axis: Some(axis), units })
        })
        .collect()
}
