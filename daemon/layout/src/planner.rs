//! The planner: from what is held and who shall train to a balanced layout and the way there.
//!
//! The same request always gives the same plan. What a slot owns is decided in [`partition`], who sends what in
//! [`sources`], the batch in [`crate::batch`], and where gradients meet in [`sync`].

mod partition;
mod sources;
mod sync;

use crate::{
    Axis, Draft, Group, Layout, Member, Place, Plan, PlanError, PlanRequest, ReplicaId, Slot, StageId, Units,
    WorkerKey, cost, memory,
};
use sources::{Holders, Need};
use std::collections::BTreeMap;

/// Plans a layout of `request.members` at `request.epoch`.
///
/// # Errors
/// Those of [`draft`], and [`PlanError::Unrecoverable`].
pub fn plan(request: &PlanRequest<'_>) -> Result<Plan, PlanError> {
    let Draft { plan, missing } = draft(request)?;
    if missing.is_empty() { Ok(plan) } else { Err(PlanError::Unrecoverable(missing)) }
}

/// Plans as [`plan`] does, but answers also where units have no live holder.
///
/// A replica trains if each of its groups has `min_tensor` members; members of other replicas get no place, but what
/// they hold still counts as a source. Members outside the nominal layout are ignored. The job must be valid
/// ([`crate::JobSpec::validate`]).
pub fn draft(request: &PlanRequest<'_>) -> Result<Draft, PlanError> {
    let job = request.job;
    let training = job.training(request.members.keys())?;
    let holders = Holders::new(request);
    let mut groups = Vec::new();
    let mut needs = Vec::new();
    let mut bytes_lower_bound = 0;
    for replica in (0..job.parallel.data).map(ReplicaId) {
        for stage in job.stages() {
            let workers = if training.contains(&replica) {
                workers_of(request, replica, stage)
            } else {
                vec![None; job.parallel.tensor as usize]
            };
            let mut partitions = BTreeMap::new();
            if workers.iter().any(Option::is_some) {
                for axis in job.stage_axes(stage) {
                    let held = held(request, &holders, axis, stage, &workers);
                    let units = job.model.units(axis.family);
                    let made = partition::partition(units, axis.layer.unwrap_or(0), &held);
                    if !request.fresh {
                        let moved = u64::from(units - made.kept);
                        bytes_lower_bound += moved * job.unit_bytes(stage, axis.family);
                        needs.extend(needed(replica, stage, axis, &workers, &held, &made.owned));
                    }
                    partitions.insert(axis, made.owned);
                }
            }
            if !request.fresh {
                for worker in workers.iter().flatten().copied() {
                    if !holders.has_state(worker, stage) {
                        bytes_lower_bound += job.replicated_bytes(stage);
                        needs.push(Need { replica, stage, axis: None, units: Units::new(), to: worker });
                    }
                }
            }
            let member = |worker: Option<&WorkerKey>| worker.cloned().map(|worker| Member { worker });
            groups.push(Group {
                replica,
                stage,
                slots: workers.into_iter().map(member).collect(),
                partitions: partitions.into(),
            });
        }
    }
    let (transfers, missing) = sources::transfers(job, &holders, &needs);
    memory::fits(job, request.topology, &groups)?;
    let (batch, predicted) = cost::predict(job, request.topology, &groups);
    let sync = job.stages().map(|stage| sync::columns(job, stage, &groups)).collect();
    let plan = Plan {
        layout: Layout { epoch: request.epoch, groups, batch, sync },
        bytes_moved: transfers.iter().map(|transfer| transfer.bytes).sum(),
        transfers,
        fresh: request.fresh,
        bytes_lower_bound,
        predicted,
    };
    debug_assert!(!missing.is_empty() || crate::check(request, &plan).is_empty());
    Ok(Draft { plan, missing })
}

/// The member of each nominal slot of a group.
fn workers_of<'a>(
    request: &PlanRequest<'a>,
    replica: ReplicaId,
    stage: StageId,
) -> Vec<Option<&'a WorkerKey>> {
    let slots = (0..request.job.parallel.tensor).map(Slot);
    slots.map(|slot| request.members.get(&Place { replica, stage, slot })).collect()
}

/// What each active slot starts from. A fresh job starts as if every member held its nominal units.
fn held(
    request: &PlanRequest<'_>,
    holders: &Holders<'_>,
    axis: Axis,
    stage: StageId,
    workers: &[Option<&WorkerKey>],
) -> Vec<Option<Units>> {
    let units = request.job.model.units(axis.family);
    if request.fresh {
        let nominal = partition::nominal(units, workers.len() as u32, axis.layer.unwrap_or(0));
        let slots = workers.iter().zip(nominal);
        return slots.map(|(worker, set)| worker.map(|_| set)).collect();
    }
    let all = Units::range(0, units);
    let of = |worker: &WorkerKey| holders.held(worker, stage, axis).intersection(&all);
    workers.iter().map(|worker| worker.map(of)).collect()
}

/// What the slots own but do not hold.
fn needed<'a>(
    replica: ReplicaId,
    stage: StageId,
    axis: Axis,
    workers: &[Option<&'a WorkerKey>],
    held: &[Option<Units>],
    owned: &[Units],
) -> Vec<Need<'a>> {
    let slots = workers.iter().zip(held).zip(owned);
    slots
        .filter_map(|((worker, held), owned)| {
            let units = owned.difference(held.as_ref()?);
            (!units.is_empty()).then_some(Need { replica, stage, axis: Some(axis), units, to: (*worker)? })
        })
        .collect()
}
