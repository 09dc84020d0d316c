//! A GPU for every nominal place.

use crate::grid::Grid;
use crate::{GpuId, JobSpec, Place, ReplicaId, Slot, StageId};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Which GPU sits at each nominal place of a job, each at one.
///
/// Kept as the nominal seating, shared by all that come from it, and what has changed since: a copy costs as much as the
/// changes, whatever the size of the job.
#[derive(Debug, Clone)]
pub struct Seats {
    nominal: Arc<Nominal>,
    /// The places at which another GPU sits than nominally.
    moved: BTreeMap<usize, GpuId>,
    /// The same by GPU.
    moved_to: HashMap<GpuId, usize>,
}

#[derive(Debug, PartialEq)]
struct Nominal {
    grid: Grid,
    /// By place number.
    gpus: Vec<GpuId>,
    place_of: HashMap<GpuId, usize>,
}

impl PartialEq for Seats {
    fn eq(&self, other: &Self) -> bool {
        let nominal = Arc::ptr_eq(&self.nominal, &other.nominal) || self.nominal == other.nominal;
        nominal && self.moved == other.moved
    }
}

impl Seats {
    /// `gpus` by replica, then stage, then slot; one for every place.
    pub(super) fn nominal(job: &JobSpec, gpus: Vec<GpuId>) -> Self {
        let place_of = gpus.iter().cloned().zip(0..).collect();
        let nominal = Arc::new(Nominal { grid: Grid::new(job), gpus, place_of });
        Self { nominal, moved: BTreeMap::new(), moved_to: HashMap::new() }
    }

    /// The GPU at the place; `None` outside the nominal layout.
    pub fn get(&self, place: Place) -> Option<&GpuId> {
        self.nominal.grid.number(place).and_then(|index| self.at(index))
    }

    /// Where the GPU sits.
    pub fn place_of(&self, gpu: &GpuId) -> Option<Place> {
        let nominal =
            || self.nominal.place_of.get(gpu).copied().filter(|index| !self.moved.contains_key(index));
        self.moved_to.get(gpu).copied().or_else(nominal).map(|index| self.nominal.grid.place(index))
    }

    /// Every place and its GPU, in the order of places.
    pub fn iter(&self) -> impl Iterator<Item = (Place, &GpuId)> {
        let mut moved = self.moved.iter().peekable();
        self.nominal.gpus.iter().enumerate().map(move |(index, gpu)| {
            let here = moved.next_if(|(at, _)| **at == index);
            (self.nominal.grid.place(index), here.map_or(gpu, |(_, gpu)| gpu))
        })
    }

    /// The places at which another GPU sits than nominally, in order.
    pub fn moved(&self) -> impl Iterator<Item = (Place, &GpuId)> {
        self.moved.iter().map(|(index, gpu)| (self.nominal.grid.place(*index), gpu))
    }

    /// GPUs with a place that have none nominally.
    pub fn spares(&self) -> impl Iterator<Item = &GpuId> {
        self.moved.values().filter(|gpu| !self.is_nominal(gpu))
    }

    /// Whether the GPU has a place nominally.
    pub(super) fn is_nominal(&self, gpu: &GpuId) -> bool {
        self.nominal.place_of.contains_key(gpu)
    }

    /// The GPUs of a group in slot order.
    pub(super) fn group(
        &self,
        (replica, stage): (ReplicaId, StageId),
    ) -> impl Iterator<Item = (Place, &GpuId)> {
        let grid = self.nominal.grid;
        let places =
            grid.number(Place { replica, stage, slot: Slot(0) }).map(|first| grid.of(grid.group(first)));
        let places = places.into_iter().flatten();
        places.filter_map(move |index| Some((grid.place(index), self.at(index)?)))
    }

    /// Seats GPUs at places of which none is named twice. Whoever sits there and is not named has no place any more.
    pub fn take(&mut self, seated: Vec<(Place, GpuId)>) {
        let seated: Vec<_> = seated
            .into_iter()
            .filter_map(|(place, gpu)| Some((self.nominal.grid.number(place)?, gpu)))
            .collect();
        for (index, _) in &seated {
            if let Some(gpu) = self.moved.remove(index) {
                self.moved_to.remove(&gpu);
            }
        }
        for (index, gpu) in seated {
            if self.nominal.gpus.get(index) != Some(&gpu) {
                self.moved_to.insert(gpu.clone(), index);
                self.moved.insert(index, gpu);
            }
        }
    }

    /// The groups of one stage in two replicas change places, slot by slot.
    pub(super) fn exchange(&mut self, stage: StageId, [a, b]: [ReplicaId; 2]) {
        let of = |from, replica| {
            let group = self.group((from, stage));
            group.map(move |(place, gpu)| (Place { replica, ..place }, gpu.clone()))
        };
        let exchanged = of(a, b).chain(of(b, a)).collect();
        self.take(exchanged);
    }

    fn at(&self, index: usize) -> Option<&GpuId> {
        self.moved.get(&index).or_else(|| self.nominal.gpus.get(index))
    }
}
