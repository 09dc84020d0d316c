//! Where a job's GPUs sit and what they hold.

use super::files;
use crate::failure::Failure;
use reknit_layout::{
    Epoch, GpuId, Holding, Incarnation, JobSpec, Layout, Partitions, Place, PlanRequest, Seats, Slot, Step,
    Topology, WorkerKey, candidates, draft, seat,
};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

#[derive(Debug, Clone)]
pub(crate) struct State {
    pub(crate) seats: Seats,
    /// A place that holds nothing is absent.
    pub(crate) holdings: BTreeMap<Place, Holding>,
}

impl State {
    /// Every place filled, each with its nominal units.
    pub(crate) fn nominal(job: &JobSpec, topology: &Topology) -> Result<Self, Failure> {
        let seats = seat(job, topology).map_err(|error| Failure::Usage(error.to_string()))?;
        let members = seats.iter().map(|(place, gpu)| (place, worker(gpu.clone())));
        let draft = draft(&PlanRequest {
            job,
            topology,
            epoch: Epoch(1),
            workers: &candidates(members, []),
            fresh: true,
        });
        // The nominal layout is everybody's: only memory can be missing.
        let draft = draft.map_err(|error| Failure::Failed(error.to_string()))?;
        Ok(Self { seats, holdings: owned(&draft.plan.layout) })
    }

    /// What a holdings file says.
    pub(crate) fn read(job: &JobSpec, topology: &Topology, file: &Path) -> Result<Self, Failure> {
        let read = files::holdings(file, job)?;
        let mut seats = seat(job, topology).map_err(|error| Failure::Usage(error.to_string()))?;
        let unknown = read.seats.iter().flatten().find(|(_, gpu)| topology.domain_of(gpu).is_none());
        match unknown {
            Some((place, gpu)) => Err(Failure::Usage(format!(
                "{}: GPU {gpu} at {place} is not in the topology; give the --topology that the plan was made with",
                file.display()
            ))),
            None => {
                seats.take(read.seats.into_iter().flatten().collect());
                Ok(Self { seats, holdings: read.holdings })
            }
        }
    }

    /// The holdings as the planner takes them, of the places that `reachable` names.
    pub(crate) fn workers(&self, reachable: impl Fn(&Place) -> bool) -> BTreeMap<WorkerKey, Holding> {
        let held = self.holdings.iter().filter(|(place, _)| reachable(place));
        held.filter_map(|(place, holding)| Some((worker(self.seats.get(*place)?.clone()), holding.clone())))
            .collect()
    }
}

/// No process of this plan ever starts: each GPU has the one worker.
pub(crate) fn worker(gpu: GpuId) -> WorkerKey {
    WorkerKey { gpu, incarnation: Incarnation(0) }
}

/// What every active slot owns, shared by the slots that own the same.
fn owned(layout: &Layout) -> BTreeMap<Place, Holding> {
    let mut shared: HashMap<(*const Partitions, Slot), Arc<_>> = HashMap::new();
    let mut holdings = BTreeMap::new();
    for group in &layout.groups {
        for slot in group.active() {
            let key = (Arc::as_ptr(&group.partitions), slot);
            let units = shared.entry(key).or_insert_with(|| Arc::new(group.owned(slot)));
            let place = Place { replica: group.replica, stage: group.stage, slot };
            holdings.insert(place, Holding { step: Step(0), units: Arc::clone(units) });
        }
    }
    holdings
}
