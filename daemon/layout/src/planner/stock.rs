//! What is held at the newest step, and by whom.

use super::places::Places;
use crate::{Axis, Holding, JobSpec, PlanRequest, StageId, Units, WorkerKey};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Workers that hold the same units share one shard.
pub(super) struct Stock<'a> {
    pub(super) shards: Vec<Shard<'a>>,
    /// In the order of their keys.
    pub(super) holders: Vec<&'a WorkerKey>,
    /// What the member at each place holds, by the place's number.
    at: Vec<Option<Held>>,
}

#[derive(Clone, Copy)]
struct Held {
    holder: usize,
    shard: usize,
}

/// Units that someone holds, and of which stage they are.
pub(super) struct Shard<'a> {
    pub(super) units: &'a BTreeMap<Axis, Units>,
    pub(super) stage: StageId,
    /// Indices of those who hold just these.
    pub(super) holders: Vec<usize>,
}

impl<'a> Stock<'a> {
    /// Holdings of older steps do not count (SAME-STEP), nor empty ones.
    pub(super) fn new(request: &PlanRequest<'a>, places: &Places<'a>) -> Self {
        let full = request.holdings.iter().filter(|(_, holding)| !holding.is_empty());
        let newest = full.clone().map(|(_, holding)| holding.step).max();
        let mut stock =
            Self { shards: Vec::new(), holders: Vec::with_capacity(request.holdings.len()), at: Vec::new() };
        let mut by_worker = HashMap::with_capacity(request.holdings.len());
        let mut known = Known::default();
        for (worker, holding) in full.filter(|(_, holding)| Some(holding.step) == newest) {
            let shard = known.shard(request.job, holding, &mut stock.shards);
            let holder = stock.holders.len();
            stock.shards[shard].holders.push(holder);
            stock.holders.push(worker);
            by_worker.insert(worker, Held { holder, shard });
        }
        let held = |worker: &Option<&WorkerKey>| by_worker.get((*worker)?).copied();
        stock.at = places.all().iter().map(held).collect();
        stock
    }

    /// The shard of `stage` that the member at a place holds; with it come the replicated parameters.
    pub(super) fn held(&self, place: usize, stage: StageId) -> Option<usize> {
        let shard = self.at[place].map(|held| held.shard);
        shard.filter(|&shard| self.shards[shard].stage == stage)
    }

    /// The group that each holder is a member of; `None` for one that leaves.
    pub(super) fn groups(&self, places: &Places<'_>) -> Vec<Option<usize>> {
        let mut groups = vec![None; self.holders.len()];
        for (place, held) in self.at.iter().enumerate() {
            if let Some(held) = held {
                groups[held.holder] = Some(places.group(place));
            }
        }
        groups
    }
}

/// The shards met so far: found by pointer, since most holdings are shared, else by content.
#[derive(Default)]
struct Known<'a> {
    by_pointer: HashMap<*const BTreeMap<Axis, Units>, usize>,
    by_content: BTreeMap<&'a BTreeMap<Axis, Units>, usize>,
}

impl<'a> Known<'a> {
    fn shard(&mut self, job: &JobSpec, holding: &'a Holding, shards: &mut Vec<Shard<'a>>) -> usize {
        let by_content = &mut self.by_content;
        *self.by_pointer.entry(Arc::as_ptr(&holding.units)).or_insert_with(|| {
            *by_content.entry(&holding.units).or_insert_with(|| {
                let stage = stage_of(job, holding);
                shards.push(Shard { units: &holding.units, stage, holders: Vec::new() });
                shards.len() - 1
            })
        })
    }
}

/// The stage whose layers are held. What holds only vocabulary rows counts as the first stage's.
fn stage_of(job: &JobSpec, holding: &Holding) -> StageId {
    let held = holding.units.iter().filter(|(_, units)| !units.is_empty());
    let layer = held.filter_map(|(axis, _)| axis.layer).next().unwrap_or(0);
    job.stages().find(|stage| job.stage_layers(*stage).contains(&layer)).unwrap_or_default()
}
