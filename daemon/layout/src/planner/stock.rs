//! Who is there, at which place, and what each holds at the newest step.

use crate::grid::Grid;
use crate::{Axis, Holding, JobSpec, Place, PlanRequest, StageId, Step, Units, WorkerKey};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Workers that hold the same units share one shard.
pub(super) struct Stock<'a> {
    /// By place number.
    members: Vec<Option<Member<'a>>>,
    pub(super) shards: Vec<Shard<'a>>,
    /// Those who hold something, in the order of their keys.
    pub(super) holders: Vec<Holder<'a>>,
}

/// Who shall train at a place.
#[derive(Clone, Copy)]
pub(super) struct Member<'a> {
    pub(super) worker: &'a WorkerKey,
    shard: Option<usize>,
}

/// Units that someone holds, and of which stage they are.
pub(super) struct Shard<'a> {
    pub(super) units: &'a BTreeMap<Axis, Units>,
    pub(super) stage: StageId,
    /// Indices of those who hold just these; none when all stand at an older step.
    pub(super) holders: Vec<usize>,
}

pub(super) struct Holder<'a> {
    pub(super) worker: &'a WorkerKey,
    /// The number of its place; `None` for one that leaves.
    pub(super) place: Option<usize>,
}

impl<'a> Stock<'a> {
    /// Holdings of older steps do not count (SAME-STEP), nor empty ones.
    pub(super) fn new(request: &PlanRequest<'a>, grid: Grid) -> Self {
        let mut known = Known::default();
        let there = request.workers.iter().map(|(worker, candidate)| {
            let place = candidate.place.and_then(|place| grid.number(place));
            let shard = known.shard(request.job, &candidate.holding);
            (worker, place, shard.map(|shard| (candidate.holding.step, shard)))
        });
        let there: Vec<_> = there.collect();
        let newest = there.iter().filter_map(|(_, _, held)| held.map(|(step, _)| step)).max();
        let is_newest = |(step, _): &(Step, usize)| Some(*step) == newest;

        let mut members = vec![None; grid.places()];
        let mut shards = known.shards;
        let mut holders = Vec::with_capacity(there.len());
        for (worker, place, held) in there {
            let shard = held.filter(is_newest).map(|(_, shard)| shard);
            if let Some(place) = place {
                members[place] = Some(Member { worker, shard });
            }
            if let Some(shard) = shard {
                shards[shard].holders.push(holders.len());
                holders.push(Holder { worker, place });
            }
        }
        Self { members, shards, holders }
    }

    /// The places where somebody shall train.
    pub(super) fn places(&self, grid: Grid) -> impl Iterator<Item = Place> {
        let filled = self.members.iter().enumerate().filter(|(_, member)| member.is_some());
        filled.map(move |(place, _)| grid.place(place))
    }

    /// The members at these places.
    pub(super) fn members(&self, places: std::ops::Range<usize>) -> &[Option<Member<'a>>] {
        &self.members[places]
    }

    /// The shard of `stage` that the member holds; with it come the replicated parameters.
    pub(super) fn held(&self, member: &Member<'_>, stage: StageId) -> Option<usize> {
        member.shard.filter(|&shard| self.shards[shard].stage == stage)
    }
}

/// The shards met so far: found by pointer, since most holdings are shared, else by content.
#[derive(Default)]
struct Known<'a> {
    shards: Vec<Shard<'a>>,
    by_pointer: HashMap<*const BTreeMap<Axis, Units>, Option<usize>>,
    by_content: BTreeMap<&'a BTreeMap<Axis, Units>, usize>,
}

impl<'a> Known<'a> {
    /// `None` for an empty holding, and one of no known stage.
    fn shard(&mut self, job: &JobSpec, holding: &'a Holding) -> Option<usize> {
        let Self { shards, by_pointer, by_content } = self;
        *by_pointer.entry(Arc::as_ptr(&holding.units)).or_insert_with(|| {
            if holding.is_empty() {
                return None;
            }
            let stage = stage_of(job, holding)?;
            Some(*by_content.entry(&holding.units).or_insert_with(|| {
                shards.push(Shard { units: &holding.units, stage, holders: Vec::new() });
                shards.len() - 1
            }))
        })
    }
}

/// The stage whose layers are held. Rows of the vocabulary alone could be the embedding's or the head's, if the stages differ:
/// then nobody knows (NO-GUESS).
fn stage_of(job: &JobSpec, holding: &Holding) -> Option<StageId> {
    let held = holding.units.iter().filter(|(_, units)| !units.is_empty());
    match held.filter_map(|(axis, _)| axis.layer).next() {
        Some(layer) => job.stage_of(layer),
        None => (job.parallel.pipeline == 1).then_some(StageId(0)),
    }
}
