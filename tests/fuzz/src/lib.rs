//! What the fuzz targets share: a job that is carried from one plan to the next, with the linter at each.

use reknit_layout::{
    Draft, DraftError, Epoch, GpuId, Holding, Incarnation, JobSpec, Mode, Place, PlanRequest, Seats, Step,
    Topology, WorkerKey, candidates, check, contingency, draft, memory, reseat,
};
use std::collections::{BTreeMap, BTreeSet};

/// Whether planning the job takes no longer than a fuzzer may wait.
pub fn is_small(job: &JobSpec) -> bool {
    let (model, parallel) = (&job.model, &job.parallel);
    let places = u64::from(parallel.data) * u64::from(parallel.pipeline) * u64::from(parallel.tensor);
    let units = u64::from(model.kv_heads)
        + u64::from(model.ffn / model.ffn_block)
        + u64::from(model.vocab / model.vocab_block);
    places <= 64 && model.layers <= 16 && units <= 512 && job.recovery.spares <= 64
}

fn worker(gpu: &GpuId) -> WorkerKey {
    WorkerKey { gpu: gpu.clone(), incarnation: Incarnation(0) }
}

fn members<'a>(places: impl Iterator<Item = (Place, &'a GpuId)>) -> impl Iterator<Item = (Place, WorkerKey)> {
    places.map(|(place, gpu)| (place, worker(gpu)))
}

/// What every place holds in the nominal layout. `None` where the job does not fit the topology's memory.
pub fn nominal(job: &JobSpec, topology: &Topology, seats: &Seats) -> Option<BTreeMap<Place, Holding>> {
    let request = PlanRequest {
        job,
        topology,
        epoch: Epoch(1),
        workers: &candidates(members(seats.iter()), []),
        fresh: true,
    };
    let layout = match draft(&request) {
        Ok(draft) => draft.plan.layout,
        Err(DraftError::Memory { .. }) => return None,
        Err(error @ DraftError::TooFew { .. }) => {
            panic!("the nominal layout: {error}")
        }
    };
    Some(layout.holdings(Step(0)).collect())
}

/// Plans without the GPUs at `lost` and checks what can be checked.
pub fn lose(
    job: &JobSpec,
    topology: &Topology,
    seats: &Seats,
    held: &BTreeMap<Place, Holding>,
    lost: &BTreeSet<Place>,
    mode: Mode,
) {
    let gone: BTreeSet<GpuId> = lost.iter().filter_map(|place| seats.get(*place).cloned()).collect();
    let seating = reseat(job, topology, seats, &gone, mode);
    let sitting: BTreeSet<&GpuId> = seating.seats.iter().map(|(_, gpu)| gpu).collect();
    assert_eq!(sitting.len(), seating.seats.iter().count(), "a GPU sits twice");
    assert!(seating.active().all(|(_, gpu)| !gone.contains(gpu)), "a lost GPU trains");
    let live = held.iter().filter(|(place, _)| !lost.contains(place));
    let holdings = live.filter_map(|(place, holding)| Some((worker(seats.get(*place)?), holding.clone())));
    let workers = candidates(members(seating.active()), holdings);
    let request = PlanRequest { job, topology, epoch: Epoch(2), workers: &workers, fresh: false };
    match draft(&request) {
        Ok(Draft { plan, missing }) => {
            if missing.is_empty() {
                assert_eq!(check(&request, &plan), Vec::new());
            }
            for k in [1, 2] {
                let ahead = contingency(&plan.layout, topology, k);
                for exposure in [ahead.gpu, ahead.node, ahead.domain] {
                    assert!(exposure.unrecoverable <= exposure.sets);
                }
            }
            for group in &plan.layout.groups {
                assert!(group.active().into_iter().all(|slot| memory::slot_bytes(job, group, slot) > 0));
            }
        }
        Err(DraftError::TooFew { .. } | DraftError::Memory { .. }) => {}
    }
}
