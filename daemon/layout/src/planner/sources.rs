//! Who sends what to whom.
//!
//! Every unit that a slot owns but does not hold comes from a live holder of the newest step: one in the same group if
//! there is one, else a worker that leaves (it has nothing else to do), else another replica's. Among equals the one
//! that sends least so far is taken, units without a choice first.

use crate::{
    Axis, Holding, JobSpec, Place, PlanRequest, ReplicaId, StageId, Step, Transfer, Units, WorkerKey,
};
use std::collections::BTreeMap;

/// Units of one axis that a worker must receive; the replicated parameters where `axis` is `None`.
pub(super) struct Need<'a> {
    pub(super) replica: ReplicaId,
    pub(super) stage: StageId,
    pub(super) axis: Option<Axis>,
    pub(super) units: Units,
    pub(super) to: &'a WorkerKey,
}

/// The workers that hold state at the newest step, in the order of their keys.
pub(super) struct Holders<'a> {
    all: Vec<Holder<'a>>,
}

struct Holder<'a> {
    worker: &'a WorkerKey,
    holding: &'a Holding,
    /// The stage whose layers it holds.
    stage: StageId,
    /// The replica it is a member of; `None` for a worker that leaves.
    replica: Option<ReplicaId>,
}

impl<'a> Holders<'a> {
    pub(super) fn new(request: &PlanRequest<'a>) -> Self {
        let places: BTreeMap<&WorkerKey, &Place> =
            request.members.iter().map(|(place, worker)| (worker, place)).collect();
        let holding = request.holdings.iter().filter(|(_, holding)| !holding.is_empty());
        let newest = holding.clone().map(|(_, holding)| holding.step).max().unwrap_or(Step(0));
        let all = holding
            .filter(|(_, holding)| holding.step == newest)
            .map(|(worker, holding)| Holder {
                worker,
                holding,
                stage: stage_of(request.job, holding),
                replica: places.get(worker).map(|place| place.replica),
            })
            .collect();
        Self { all }
    }

    fn find(&self, worker: &WorkerKey, stage: StageId) -> Option<&Holder<'a>> {
        let at = self.all.binary_search_by(|holder| holder.worker.cmp(worker));
        at.ok().map(|at| &self.all[at]).filter(|holder| holder.stage == stage)
    }

    /// Whether the worker holds anything of `stage`, and so the replicated parameters.
    pub(super) fn has_state(&self, worker: &WorkerKey, stage: StageId) -> bool {
        self.find(worker, stage).is_some()
    }

    pub(super) fn held(&self, worker: &WorkerKey, stage: StageId, axis: Axis) -> Units {
        self.find(worker, stage).map(|holder| holder.holding.of(axis)).unwrap_or_default()
    }
}

/// The stage whose layers are held. What holds only vocabulary rows counts as the first stage's.
fn stage_of(job: &JobSpec, holding: &Holding) -> StageId {
    let held = holding.units.iter().filter(|(_, units)| !units.is_empty());
    let layer = held.filter_map(|(axis, _)| axis.layer).next().unwrap_or(0);
    job.stages().find(|stage| job.stage_layers(*stage).contains(&layer)).unwrap_or_default()
}

/// One parcel: a unit, or the replicated parameters, for one need.
struct Parcel<'a> {
    need: &'a Need<'a>,
    unit: Option<u32>,
    /// Indices of the best holders.
    from: Vec<usize>,
}

/// Finds a source for everything needed, and what has none. Parcels of one axis between one pair of workers make one transfer.
pub(super) fn transfers(
    job: &JobSpec,
    holders: &Holders<'_>,
    needs: &[Need<'_>],
) -> (Vec<Transfer>, BTreeMap<Axis, Units>) {
    let mut missing: BTreeMap<Axis, Units> = BTreeMap::new();
    let mut parcels = Vec::new();
    for need in needs {
        for (unit, from) in candidates(holders, need) {
            match (need.axis, unit) {
                (Some(axis), Some(unit)) if from.is_empty() => missing.entry(axis).or_default().insert(unit),
                _ => parcels.push(Parcel { need, unit, from }),
            }
        }
    }
    // A stable sort: those without a choice first, otherwise in the order of needs.
    parcels.sort_by_key(|parcel| parcel.from.len() > 1);
    let mut sent = vec![0; holders.all.len()];
    let mut found: BTreeMap<_, (Vec<u32>, u64)> = BTreeMap::new();
    for parcel in &parcels {
        let need = parcel.need;
        let bytes = match need.axis {
            Some(axis) => job.unit_bytes(need.stage, axis.family),
            None => job.replicated_bytes(need.stage),
        };
        if let Some(&from) = parcel.from.iter().min_by_key(|&&from| sent[from]) {
            sent[from] += bytes;
            let (units, total) = found.entry((need.axis, holders.all[from].worker, need.to)).or_default();
            units.extend(parcel.unit);
            *total += bytes;
        }
    }
    let transfers = found.into_iter().map(|((axis, from, to), (units, bytes))| Transfer {
        axis,
        units: units.into_iter().collect(),
        from: from.clone(),
        to: to.clone(),
        bytes,
    });
    (transfers.collect(), missing)
}

/// The best holders of each needed unit.
fn candidates(holders: &Holders<'_>, need: &Need<'_>) -> Vec<(Option<u32>, Vec<usize>)> {
    let rank = |holder: &Holder<'_>| match holder.replica {
        Some(replica) if replica == need.replica => 0,
        None => 1,
        Some(_) => 2,
    };
    let of_stage = || holders.all.iter().enumerate().filter(|(_, holder)| holder.stage == need.stage);
    let best = |able: Vec<(usize, &Holder<'_>)>| {
        let least = able.iter().map(|(_, holder)| rank(holder)).min();
        let best = able.iter().filter(|(_, holder)| Some(rank(holder)) == least);
        best.map(|(index, _)| *index).collect::<Vec<_>>()
    };
    let Some(axis) = need.axis else {
        return vec![(None, best(of_stage().collect()))];
    };
    let holds: Vec<_> = of_stage()
        .filter_map(|(index, holder)| Some((index, holder, holder.holding.units.get(&axis)?)))
        .filter(|(_, _, units)| !units.intersection(&need.units).is_empty())
        .collect();
    let of_unit = |unit| {
        let able = holds.iter().filter(|(_, _, units)| units.contains(unit));
        best(able.map(|(index, holder, _)| (*index, *holder)).collect())
    };
    need.units.iter().map(|unit| (Some(unit), of_unit(unit))).collect()
}
