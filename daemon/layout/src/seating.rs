//! Which GPU sits at which place, before anything is planned: the nominal seating, and what becomes of it when GPUs are
//! gone.
//!
//! A group sits within one domain. A GPU that is gone is first replaced by a spare ([`spares`]); what remains lost takes
//! slots out of training as the mode says ([`reduce`]); last the reduced groups are packed into few replicas ([`pack`]).

mod mode;
mod pack;
mod reduce;
mod seats;
mod spares;

pub use mode::{BadMode, Mode};
pub use seats::Seats;

use crate::topology::Domain;
use crate::{GpuId, JobSpec, Place, ReplicaId, StageId, Topology};
use std::collections::BTreeSet;

/// The topology has no room for a group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no domain has room for replica {replica} stage {stage}: it needs {needs} free GPUs that share NVLink, and no \
     domain has more than {most} ({free} in all); add a domain, or lower parallel.data, pipeline or tensor"
)]
pub struct SeatingError {
    pub replica: ReplicaId,
    pub stage: StageId,
    /// GPUs of one group.
    pub needs: u32,
    /// The most free GPUs of one domain.
    pub most: usize,
    /// Free GPUs of all domains.
    pub free: usize,
}

/// The nominal seating: groups, by replica, then stage, take the first domain with enough free GPUs, and in it the first free
/// ones in the order of nodes. A rack may seat several groups.
///
/// # Errors
/// For the first group that finds no domain.
pub fn seat(job: &JobSpec, topology: &Topology) -> Result<Seats, SeatingError> {
    let tensor = job.parallel.tensor as usize;
    let rooms = |domain: &Domain| {
        let groups = domain.gpus().count() / tensor;
        if topology.one_group_each { groups.min(1) } else { groups }
    };
    let mut seated = topology.domains().iter().flat_map(|domain| domain.gpus().take(rooms(domain) * tensor));
    let mut gpus = Vec::new();
    for replica in (0..job.parallel.data).map(ReplicaId) {
        for stage in job.stages() {
            let before = gpus.len();
            gpus.extend(seated.by_ref().take(tensor).cloned());
            if gpus.len() < before + tensor {
                let left =
                    topology.domains().iter().map(|domain| domain.gpus().count() - rooms(domain) * tensor);
                let (most, free) = (left.clone().max().unwrap_or(0), left.sum());
                return Err(SeatingError { replica, stage, needs: job.parallel.tensor, most, free });
            }
        }
    }
    Ok(Seats::nominal(job, gpus))
}

/// Seats after a change, and which of them train.
#[derive(Debug, Clone, PartialEq)]
pub struct Seating {
    /// Of all nominal places; at an inactive one the GPU stays that sat there.
    pub seats: Seats,
    /// The places that do not train.
    pub inactive: BTreeSet<Place>,
}

impl Seating {
    /// The places that train and their GPUs, in the order of places.
    pub fn active(&self) -> impl Iterator<Item = (Place, &GpuId)> {
        self.seats.iter().filter(|(place, _)| !self.inactive.contains(place))
    }
}

/// What becomes of `seats` when the GPUs `gone`, all that are failed or draining now, do not train. A GPU that is no longer
/// gone trains again where it sits.
///
/// The work is that of the groups that are hit, not of the job's size, but for a search for a spare domain.
pub fn reseat(
    job: &JobSpec,
    topology: &Topology,
    seats: &Seats,
    gone: &BTreeSet<GpuId>,
    mode: Mode,
) -> Seating {
    let mut seats = seats.clone();
    spares::replace(job, topology, &mut seats, gone);
    let lost = gone.iter().filter_map(|gpu| seats.place_of(gpu)).collect();
    let mut inactive = reduce::inactive(job, &lost, mode);
    if mode.packs() {
        for exchange in pack::exchanges(&pack::reduced(job, &inactive)) {
            seats.exchange(exchange.stage, exchange.replicas);
            exchange.carry(&mut inactive);
        }
    }
    Seating { seats, inactive }
}
