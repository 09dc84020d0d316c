//! What the slots of a group shall own, given what they hold. Groups in the same situation share one answer.

use super::partition;
use super::stock::{Member, Stock};
use crate::grid::Grid;
use crate::{Axis, Family, JobSpec, Partitions, StageId, Units};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
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
        let cuts = self.cuts(stage, starts);
        let mut turns = Turns::new(&cuts, starts.len());
        for Cut { axis, unit_bytes, nominal, held } in cuts {
            let units = job.model.units(axis.family);
            let order = turns.order(axis.family, &held);
            let made = partition::partition(units, nominal, &held, &order);
            turns.count(axis.family, unit_bytes, &held, &made.owned);
            if !self.fresh {
                let anywhere = held.iter().flatten().fold(Units::new(), |sum, held| sum.union(held));
                split.bytes_lower_bound += u64::from(units - made.could_stay) * unit_bytes;
                split.bytes_to_balance += u64::from(anywhere.len() - made.kept) * unit_bytes;
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

    /// What there is to partition at a stage, the largest units first.
    fn cuts(&self, stage: StageId, starts: &[Start]) -> Vec<Cut> {
        let job = self.job;
        let slots = starts.len() as u32;
        let axes = job.stage_axes(stage).into_iter();
        let mut cuts: Vec<Cut> = axes
            .map(|axis| {
                let first_extra = first_extra(job, stage, axis, slots);
                let nominal = partition::nominal(job.model.units(axis.family), slots, first_extra);
                let held = self.held(starts, axis, &nominal);
                Cut { axis, unit_bytes: job.unit_bytes(stage, axis.family), nominal, held }
            })
            .collect();
        cuts.sort_by_key(|cut| Reverse(cut.unit_bytes));
        cuts
    }

    /// What each active slot starts from. A fresh job starts as if every member held its nominal units.
    fn held(&self, starts: &[Start], axis: Axis, nominal: &[Units]) -> Vec<Option<Units>> {
        if self.fresh {
            let slots = starts.iter().zip(nominal);
            return slots.map(|(start, set)| (*start != Start::Inactive).then(|| set.clone())).collect();
        }
        let all = Units::range(0, self.job.model.units(axis.family));
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

/// One axis to partition over the slots of a group.
struct Cut {
    axis: Axis,
    unit_bytes: u64,
    nominal: Vec<Units>,
    /// `None` for an inactive slot.
    held: Vec<Option<Units>>,
}

impl Cut {
    /// What every active slot owns at least.
    fn size(&self) -> u32 {
        let units: u32 = self.nominal.iter().map(Units::len).sum();
        units / self.held.iter().flatten().count().max(1) as u32
    }
}

/// Whose turn it is to have an extra unit in a reduced group: who has had fewest of the family, and of those who has to receive
/// least. So they rotate over the layers, and the most loaded receiver gets little.
struct Turns {
    /// Extra units by slot.
    had: BTreeMap<Family, Vec<u32>>,
    /// Bytes by slot: without extra units for the axes to come, with them for those that were.
    received: Vec<u64>,
}

impl Turns {
    fn new(cuts: &[Cut], slots: usize) -> Self {
        let mut received = vec![0; slots];
        for cut in cuts {
            for (received, held) in received.iter_mut().zip(&cut.held) {
                let lacks = cut.size().saturating_sub(held.as_ref().map_or(0, Units::len));
                *received += u64::from(lacks) * cut.unit_bytes;
            }
        }
        Self { had: BTreeMap::new(), received }
    }

    /// The active slots.
    fn order(&mut self, family: Family, held: &[Option<Units>]) -> Vec<usize> {
        let had = self.had.entry(family).or_insert_with(|| vec![0; held.len()]);
        let mut order: Vec<usize> = (0..held.len()).filter(|&slot| held[slot].is_some()).collect();
        order.sort_by_key(|&slot| (had[slot], self.received[slot]));
        order
    }

    fn count(&mut self, family: Family, unit_bytes: u64, held: &[Option<Units>], owned: &[Units]) {
        let size =
            owned.iter().zip(held).filter(|(_, held)| held.is_some()).map(|(owned, _)| owned.len()).min();
        let had = self.had.entry(family).or_insert_with(|| vec![0; held.len()]);
        for (slot, owned) in owned.iter().enumerate().filter(|(_, owned)| Some(owned.len()) > size) {
            had[slot] += 1;
            if held[slot].as_ref().is_some_and(|held| held.len() < owned.len()) {
                self.received[slot] += unit_bytes;
            }
        }
    }
}

/// Which slot is the first with an extra unit at full degree. Each axis of the stage goes on where the one before it, by family, then
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
