//! What is planned for a question, and what everything printed is made from.

use super::losses::Losses;
use super::shift::Shift;
use super::state::{State, worker};
use crate::failure::Failure;
use reknit_layout::{
    Axis, Contingency, Draft, DraftError, Epoch, Group, Holding, JobSpec, Layout, Mode, Place, Plan,
    PlanRequest, Predicted, ReplicaId, Seating, Slot, SyncColumns, Topology, Transfer, Units, WorkerKey,
    candidates, contingency, contingency_of_lost, draft, lost, reseat,
};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Answer<'a> {
    pub(crate) job: &'a JobSpec,
    pub(crate) topology: &'a Topology,
    pub(crate) mode: Mode,
    pub(crate) before: &'a State,
    pub(crate) losses: &'a Losses,
    /// Who sits where afterwards.
    pub(crate) seating: Seating,
    pub(crate) plan: Plan,
    /// NO-GUESS: what no live GPU holds. Not empty: the plan cannot be carried out.
    pub(crate) missing: BTreeMap<Axis, Units>,
    /// Why nobody trains although every unit lives.
    pub(crate) too_few: Option<String>,
    /// Who sits elsewhere than before.
    pub(crate) shift: Shift,
}

impl<'a> Answer<'a> {
    pub(crate) fn find(
        job: &'a JobSpec,
        topology: &'a Topology,
        mode: Mode,
        before: &'a State,
        losses: &'a Losses,
    ) -> Result<Self, Failure> {
        let seating = reseat(job, topology, &before.seats, &losses.gone, mode);
        let members = seating.active().map(|(place, gpu)| (place, worker(gpu.clone())));
        let holdings = before.workers(|place| !losses.failed.contains(place));
        let request = PlanRequest {
            job,
            topology,
            epoch: Epoch(2),
            workers: &candidates(members, holdings),
            fresh: false,
        };
        let mut too_few = None;
        let Draft { plan, missing } = match draft(&request) {
            Ok(draft) => draft,
            Err(error @ DraftError::TooFew { .. }) => {
                let missing = lost(&request);
                too_few = missing.is_empty().then(|| {
                    format!("{error}; every unit still has a live holder: the job waits until GPUs return")
                });
                Draft { plan: nobody(job), missing }
            }
            Err(error @ DraftError::Memory { .. }) => return Err(Failure::Failed(error.to_string())),
        };
        let shift = Shift::of(job, &before.seats, &seating.seats);
        Ok(Self { job, topology, mode, before, losses, seating, plan, missing, too_few, shift })
    }

    /// Where the worker's GPU sits now, if it has a place.
    pub(crate) fn place_of(&self, worker: &WorkerKey) -> Option<Place> {
        self.seating.seats.place_of(&worker.gpu)
    }

    /// The worker's place now, or its GPU.
    pub(crate) fn name_of(&self, worker: &WorkerKey) -> String {
        self.place_of(worker).map_or_else(|| worker.gpu.to_string(), |place| place.to_string())
    }

    pub(crate) fn ahead(&self, k: u32) -> Contingency {
        match self.missing.is_empty() {
            true => contingency(&self.plan.layout, self.topology, k),
            false => contingency_of_lost(&self.plan.layout, self.topology, k),
        }
    }

    /// Where the GPU that sits at the place now sat before; `None` for a spare.
    pub(crate) fn origin(&self, place: Place) -> Option<Place> {
        self.before.seats.place_of(self.seating.seats.get(place)?)
    }

    /// What the GPU that sits at the place now held of the place's stage before.
    pub(crate) fn held(&self, place: Place) -> Option<&Holding> {
        let origin = self.origin(place).filter(|origin| origin.stage == place.stage);
        self.before.holdings.get(&origin?)
    }

    /// How many slots of the group held something before. A group that came as a whole brings its own.
    pub(crate) fn degree_before(&self, group: &Group) -> usize {
        let replica = self.shift.source(group.replica, group.stage);
        let places =
            (0..group.slots.len() as u32).map(|slot| Place { replica, stage: group.stage, slot: Slot(slot) });
        places.filter(|place| self.before.holdings.contains_key(place)).count()
    }

    /// The most bytes that one GPU sends, and that one receives.
    pub(crate) fn busiest(&self) -> (u64, u64) {
        let most = |end: fn(&Transfer) -> &WorkerKey| {
            let mut bytes: BTreeMap<&WorkerKey, u64> = BTreeMap::new();
            for transfer in &self.plan.transfers {
                *bytes.entry(end(transfer)).or_default() += transfer.bytes;
            }
            bytes.values().copied().max().unwrap_or(0)
        };
        (most(|transfer| &transfer.from), most(|transfer| &transfer.to))
    }
}

/// The layout in which nobody trains.
fn nobody(job: &JobSpec) -> Plan {
    let replicas = 0..job.parallel.data;
    let slots = vec![None; job.parallel.tensor as usize];
    let partitions = Arc::default();
    let group = |replica, stage| Group {
        replica: ReplicaId(replica),
        stage,
        slots: slots.clone(),
        partitions: Arc::clone(&partitions),
    };
    let groups = replicas.clone().flat_map(|replica| job.stages().map(move |stage| (replica, stage)));
    let sync = job.stages().map(|stage| SyncColumns {
        stage,
        columns: 0,
        hosts: vec![Vec::<Slot>::new(); job.parallel.data as usize],
        axes: Vec::new(),
    });
    let layout = Layout {
        epoch: Epoch(2),
        groups: groups.map(|(replica, stage)| group(replica, stage)).collect(),
        batch: replicas.map(|_| 0).collect(),
        sync: sync.collect(),
    };
    let predicted =
        Predicted { step_time_ratio: f64::INFINITY, throughput_ratio: 0.0, power: BTreeMap::new() };
    Plan {
        layout,
        transfers: Vec::new(),
        fresh: false,
        bytes_moved: 0,
        bytes_lower_bound: 0,
        bytes_to_balance: 0,
        predicted,
    }
}
