//! Where a job's GPUs sit and what they hold.

use super::files;
use crate::failure::Failure;
use reknit_layout::{
    Epoch, GpuId, Holding, Incarnation, JobSpec, Place, PlanRequest, ReplicaId, Seats, StageId, Step,
    Topology, WorkerKey, candidates, draft, seat,
};
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Debug, Clone)]
pub(crate) struct State {
    pub(crate) seats: Seats,
    /// A place that holds nothing is absent.
    pub(crate) holdings: BTreeMap<Place, Holding>,
}

impl State {
    /// Every place filled, each with its nominal units.
    pub(crate) fn nominal(job: &JobSpec, topology: &Topology) -> Result<Self, Failure> {
        let seats = seat(job, topology).map_err(Failure::usage)?;
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
        Ok(Self { seats, holdings: draft.plan.layout.holdings(Step(0)).collect() })
    }

    /// What a holdings file says.
    pub(crate) fn read(job: &JobSpec, topology: &Topology, file: &Path) -> Result<Self, Failure> {
        let read = files::holdings(file, job)?;
        let mut seats = seat(job, topology).map_err(Failure::usage)?;
        let planned = read.seats.unwrap_or_default();
        expect_domains(topology, &planned).map_err(|problem| {
            let file = file.display();
            Failure::Usage(format!("{file}: {problem}; give the --topology that the plan was made with"))
        })?;
        seats.take(planned.into_iter().collect());
        Ok(Self { seats, holdings: read.holdings })
    }

    /// The holdings as the planner takes them, of the places that `reachable` names.
    pub(crate) fn workers(&self, reachable: impl Fn(&Place) -> bool) -> BTreeMap<WorkerKey, Holding> {
        let held = self.holdings.iter().filter(|(place, _)| reachable(place));
        held.filter_map(|(place, holding)| Some((worker(self.seats.get(*place)?.clone()), holding.clone())))
            .collect()
    }
}

/// The topology knows every GPU, and each group sits within one domain.
fn expect_domains(topology: &Topology, seats: &BTreeMap<Place, GpuId>) -> Result<(), String> {
    let mut first: BTreeMap<(ReplicaId, StageId), (&GpuId, usize)> = BTreeMap::new();
    for (place, gpu) in seats {
        let Some(domain) = topology.domain_of(gpu) else {
            return Err(format!("GPU {gpu} at {place} is not in the topology"));
        };
        let (other, expected) = *first.entry((place.replica, place.stage)).or_insert((gpu, domain));
        if domain != expected {
            let name = |domain: usize| &topology.domains()[domain].name;
            return Err(format!(
                "group {}.{}: GPU {other} is in domain {}, but {gpu} in {}; a group sits within one",
                place.replica,
                place.stage,
                name(expected),
                name(domain)
            ));
        }
    }
    Ok(())
}

/// No process of this plan ever starts: each GPU has the one worker.
pub(crate) fn worker(gpu: GpuId) -> WorkerKey {
    WorkerKey { gpu, incarnation: Incarnation(0) }
}
