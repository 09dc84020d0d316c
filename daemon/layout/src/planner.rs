//! The planner: from what is held and who shall train to a balanced layout and the way there.
//!
//! The same request always gives the same plan. What is held is sorted out in [`stock`], what each slot owns is decided in
//! [`split`] and [`partition`], who sends what in [`sources`] and [`spread`], the batch in [`crate::batch`], and where gradients
//! meet in [`sync`].
//!
//! **Scale.** Groups whose slots hold the same are split alike: each such situation is worked out once and shared, so
//! thousands of untouched groups cost a lookup each.

mod partition;
mod sources;
mod split;
mod spread;
mod stock;
mod sync;

use crate::grid::Grid;
use crate::{
    Axis, Draft, DraftError, Group, Layout, Member, Plan, PlanError, PlanRequest, Units, cost, memory,
};
use sources::Need;
use split::Splits;
use std::collections::BTreeMap;
use std::sync::Arc;
use stock::Stock;

/// Plans a layout of `request.workers` at `request.epoch`.
///
/// # Errors
/// Those of [`draft`], and [`PlanError::Unrecoverable`].
pub fn plan(request: &PlanRequest<'_>) -> Result<Plan, PlanError> {
    let drafted = draft(request);
    let missing = match &drafted {
        Ok(draft) => draft.missing.clone(),
        Err(_) if request.fresh => BTreeMap::new(),
        // What nobody holds does not come back with more slots.
        Err(_) => lost(request),
    };
    if missing.is_empty() { Ok(drafted?.plan) } else { Err(PlanError::Unrecoverable(missing)) }
}

/// The units that nobody holds at the newest step, each stage asked for itself.
pub fn lost(request: &PlanRequest<'_>) -> BTreeMap<Axis, Units> {
    let job = request.job;
    let stock = Stock::new(request, Grid::new(job));
    let mut lost: BTreeMap<Axis, Units> = BTreeMap::new();
    for stage in job.stages() {
        let shards = stock.shards.iter().filter(|shard| shard.stage == stage && !shard.holders.is_empty());
        for axis in job.stage_axes(stage) {
            let all = Units::range(0, job.model.units(axis.family));
            let held = shards.clone().filter_map(|shard| shard.units.get(&axis));
            let left = held.fold(all, |left, held| left.difference(held));
            if !left.is_empty() {
                let units = lost.entry(axis).or_default();
                *units = units.union(&left);
            }
        }
    }
    lost
}

/// Plans as [`plan`] does, but answers also where units have no live holder.
///
/// A replica trains if each of its groups has `min_tensor` members; members of other replicas get no place, but what
/// they hold still counts as a source. Members outside the nominal layout are ignored. The job must be valid
/// ([`crate::JobSpec::validate`]).
///
/// # Errors
/// [`DraftError::TooFew`] when no replica trains, [`DraftError::Memory`] when a slot's share is too large for its GPU.
pub fn draft(request: &PlanRequest<'_>) -> Result<Draft, DraftError> {
    let job = request.job;
    let grid = Grid::new(job);
    let stock = Stock::new(request, grid);
    let training = job.training(stock.places(grid))?;
    let mut splits = Splits::new(job, request.fresh, &stock);
    let trains = |group| training.binary_search(&grid.replica(group)).is_ok();
    let split_of: Vec<Option<usize>> =
        (0..grid.groups()).map(|group| trains(group).then(|| splits.of(grid, group))).collect();

    let mut groups = Vec::with_capacity(grid.groups());
    let mut needs = Vec::new();
    let (mut bytes_lower_bound, mut bytes_to_balance) = (0, 0);
    let nothing = Arc::default();
    for (group, split) in split_of.iter().enumerate() {
        let (replica, stage, members) =
            (grid.replica(group), grid.stage(group), stock.members(grid.of(group)));
        let Some(split) = split.map(|split| splits.get(split)) else {
            let slots = vec![None; members.len()];
            groups.push(Group { replica, stage, slots, partitions: Arc::clone(&nothing) });
            continue;
        };
        bytes_lower_bound += split.bytes_lower_bound;
        bytes_to_balance += split.bytes_to_balance;
        needs.extend(split.lacks.iter().filter_map(|lack| {
            let to = members[lack.slot]?.worker;
            Some(Need { group, stage, axis: lack.axis, units: &lack.units, to })
        }));
        let member = |at: &Option<stock::Member<'_>>| at.map(|at| Member { worker: at.worker.clone() });
        let slots = members.iter().map(member).collect();
        groups.push(Group { replica, stage, slots, partitions: split.partitions.clone() });
    }
    let (transfers, missing) = sources::transfers(request, grid, &stock, &needs);
    memory::fits(job, request.topology, &groups)?;
    let (batch, predicted) = cost::predict(job, request.topology, &groups);
    let sync = job.stages().map(|stage| sync::columns(job, stage, &groups)).collect();
    let plan = Plan {
        layout: Layout { epoch: request.epoch, groups, batch, sync },
        bytes_moved: transfers.iter().map(|transfer| transfer.bytes).sum(),
        transfers,
        fresh: request.fresh,
        bytes_lower_bound,
        bytes_to_balance,
        predicted,
    };
    if missing.is_empty() {
        debug_assert_eq!(crate::check(request, &plan), Vec::new());
    }
    Ok(Draft { plan, missing })
}
