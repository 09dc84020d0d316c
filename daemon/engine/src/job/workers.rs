//! The workers of a job that may be alive, and which of them a transition looks at.
//!
//! A transition touches a worker or two of many thousands, so it never walks through all. Every change of a worker goes
//! through [`Change`], which keeps the sets in step.

use super::worker::{Fate, Worker};
use crate::Time;
use reknit_layout::{GpuId, Incarnation, NodeName, Place, WorkerKey};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};

#[derive(Debug, Clone, Default)]
pub(crate) struct Workers {
    all: BTreeMap<WorkerKey, Worker>,
    on_node: BTreeMap<NodeName, BTreeSet<WorkerKey>>,
    marks: Marks,
    /// The place that each GPU fills.
    seats: BTreeMap<GpuId, Place>,
    /// Places whose GPU has no worker.
    vacant: BTreeMap<Place, GpuId>,
}

/// What is looked for among all workers.
#[derive(Debug, Clone, Default)]
struct Marks {
    deadlines: BTreeSet<(Time, WorkerKey)>,
    preparable: BTreeSet<WorkerKey>,
    /// Those with a session that have not trained to the end, by their last progress.
    progress: BTreeSet<(Time, WorkerKey)>,
    completed: usize,
}

/// What one worker counts for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Mark {
    deadline: Option<Time>,
    preparable: bool,
    progress: Option<Time>,
    completed: bool,
}

impl Mark {
    fn of(worker: &Worker) -> Self {
        let completed = worker.completed.is_some();
        Self {
            deadline: worker.deadline(),
            preparable: worker.can_prepare(),
            progress: (worker.session && !completed).then_some(worker.last_progress),
            completed,
        }
    }
}

impl Marks {
    fn update(&mut self, key: &WorkerKey, before: Mark, after: Mark) {
        if before == after {
            return;
        }
        let timed = [
            (&mut self.deadlines, before.deadline, after.deadline),
            (&mut self.progress, before.progress, after.progress),
        ];
        for (set, before, after) in timed {
            if before == after {
                continue;
            }
            if let Some(time) = before {
                set.remove(&(time, key.clone()));
            }
            if let Some(time) = after {
                set.insert((time, key.clone()));
            }
        }
        match (before.preparable, after.preparable) {
            (false, true) => {
                self.preparable.insert(key.clone());
            }
            (true, false) => {
                self.preparable.remove(key);
            }
            (false, false) | (true, true) => {}
        }
        self.completed = self.completed + usize::from(after.completed) - usize::from(before.completed);
    }
}

/// A worker that is being changed.
#[derive(Debug)]
pub(crate) struct Change<'a> {
    key: &'a WorkerKey,
    worker: &'a mut Worker,
    before: Mark,
    marks: &'a mut Marks,
}

impl Deref for Change<'_> {
    type Target = Worker;

    fn deref(&self) -> &Worker {
        self.worker
    }
}

impl DerefMut for Change<'_> {
    fn deref_mut(&mut self) -> &mut Worker {
        self.worker
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.marks.update(self.key, self.before, Mark::of(self.worker));
    }
}

/// The lowest key of a GPU's workers.
fn first_on(gpu: &GpuId) -> WorkerKey {
    WorkerKey { gpu: gpu.clone(), incarnation: Incarnation(0) }
}

impl Workers {
    pub(crate) fn get(&self, key: &WorkerKey) -> Option<&Worker> {
        self.all.get(key)
    }

    pub(crate) fn get_mut(&mut self, key: &WorkerKey) -> Option<Change<'_>> {
        let (key, worker) = self.all.range_mut(key..=key).next()?;
        let before = Mark::of(worker);
        Some(Change { key, worker, before, marks: &mut self.marks })
    }

    pub(crate) fn insert(&mut self, key: WorkerKey, worker: Worker) {
        self.remove(&key);
        if let Some(place) = self.seats.get(&key.gpu) {
            self.vacant.remove(place);
        }
        self.marks.update(&key, Mark::default(), Mark::of(&worker));
        self.on_node.entry(worker.node.clone()).or_default().insert(key.clone());
        self.all.insert(key, worker);
    }

    pub(crate) fn remove(&mut self, key: &WorkerKey) {
        let Some(worker) = self.all.remove(key) else {
            return;
        };
        self.marks.update(key, Mark::of(&worker), Mark::default());
        if let Some(here) = self.on_node.get_mut(&worker.node) {
            here.remove(key);
            if here.is_empty() {
                self.on_node.remove(&worker.node);
            }
        }
        if let (Some(place), None) = (self.seats.get(&key.gpu), self.on_gpu(&key.gpu)) {
            self.vacant.insert(*place, key.gpu.clone());
        }
    }

    /// Tells which GPU fills which place: to be called whenever that changes.
    pub(crate) fn seat(&mut self, places: &BTreeMap<Place, GpuId>) {
        self.seats = places.iter().map(|(place, gpu)| (gpu.clone(), *place)).collect();
        let vacant = places.iter().filter(|(_, gpu)| self.on_gpu(gpu).is_none());
        self.vacant = vacant.map(|(place, gpu)| (*place, gpu.clone())).collect();
    }

    pub(crate) fn seat_of(&self, gpu: &GpuId) -> Option<Place> {
        self.seats.get(gpu).copied()
    }

    /// The GPUs that fill places, in order, from `first` on.
    pub(crate) fn seated_from(&self, first: &GpuId) -> impl Iterator<Item = &GpuId> {
        self.seats.range(first..).map(|(gpu, _)| gpu)
    }

    /// Places whose GPU has no worker, in the order of places.
    pub(crate) fn vacant(&self) -> impl Iterator<Item = (&Place, &GpuId)> {
        self.vacant.iter()
    }

    /// The newest worker on the GPU.
    pub(crate) fn on_gpu(&self, gpu: &GpuId) -> Option<(&WorkerKey, &Worker)> {
        let last = WorkerKey { gpu: gpu.clone(), incarnation: Incarnation(u64::MAX) };
        self.all.range(first_on(gpu)..=last).next_back()
    }

    pub(crate) fn on_node(&self, node: &NodeName) -> impl Iterator<Item = (&WorkerKey, &Worker)> {
        let keys = self.on_node.get(node).into_iter().flatten();
        keys.filter_map(|key| self.all.get_key_value(key))
    }

    /// Those that [can be prepared](Worker::can_prepare).
    pub(crate) fn preparable(&self) -> impl ExactSizeIterator<Item = &WorkerKey> {
        self.marks.preparable.iter()
    }

    /// How many have trained to the end.
    pub(crate) fn completed(&self) -> usize {
        self.marks.completed
    }

    /// Those with a session that still have to train, the one without progress for longest first.
    pub(crate) fn by_progress(&self) -> impl Iterator<Item = (Time, &WorkerKey)> {
        self.marks.progress.iter().map(|(time, key)| (*time, key))
    }

    /// When the first single worker's deadline passes.
    pub(crate) fn next_deadline(&self) -> Option<Time> {
        self.marks.deadlines.first().map(|(time, _)| *time)
    }

    /// Those whose deadline has passed, with what was wanted of them.
    pub(crate) fn late(&self, now: Time) -> Vec<(WorkerKey, Fate)> {
        let late = self.marks.deadlines.iter().take_while(|(time, _)| *time <= now);
        let mut late: Vec<_> =
            late.filter_map(|(_, key)| Some((key.clone(), self.all.get(key)?.fate))).collect();
        late.sort_by(|(a, _), (b, _)| a.cmp(b));
        late
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&WorkerKey, &Worker)> {
        self.all.iter()
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &WorkerKey> {
        self.all.keys()
    }

    /// There, and neither leaving nor being killed.
    pub(crate) fn is_alive(&self, key: &WorkerKey) -> bool {
        self.get(key).is_some_and(Worker::alive)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(gpu: &str, incarnation: u64) -> WorkerKey {
        WorkerKey { gpu: GpuId::from(gpu), incarnation: Incarnation(incarnation) }
    }

    fn worker() -> Worker {
        Worker::new(NodeName::from("n"), Time(0))
    }

    #[test]
    fn a_change_moves_the_worker_between_the_sets() {
        let mut workers = Workers::default();
        workers.insert(key("a", 1), worker());
        workers.insert(key("b", 2), worker());
        assert_eq!((workers.next_deadline(), workers.preparable().len(), workers.completed()), (None, 0, 0));
        let change = |workers: &mut Workers, gpu: &str, number, act: fn(&mut Worker)| {
            act(&mut workers.get_mut(&key(gpu, number)).unwrap());
        };
        change(&mut workers, "a", 1, |worker| worker.fate = Fate::Fencing { deadline: Time(7) });
        change(&mut workers, "b", 2, |worker| worker.joined_by = Some(Time(5)));
        assert_eq!(workers.next_deadline(), Some(Time(5)));
        assert_eq!(workers.late(Time(6)).len(), 1);
        change(&mut workers, "b", 2, |worker| {
            worker.joined_by = None;
            worker.session = true;
            worker.last_progress = Time(9);
        });
        assert_eq!(workers.next_deadline(), Some(Time(7)));
        assert_eq!(workers.by_progress().collect::<Vec<_>>(), [(Time(9), &key("b", 2))]);
        workers.remove(&key("a", 1));
        workers.remove(&key("b", 2));
        assert!(
            workers.is_empty() && workers.marks.progress.is_empty() && workers.marks.deadlines.is_empty()
        );
        assert_eq!(workers.on_node(&NodeName::from("n")).count(), 0);
    }

    #[test]
    fn a_place_is_vacant_while_its_gpu_has_no_worker() {
        let mut workers = Workers::default();
        workers.insert(key("a", 1), worker());
        let places = [(Place::new(0, 0, 0), GpuId::from("a")), (Place::new(0, 0, 1), GpuId::from("b"))];
        workers.seat(&places.into());
        let vacant = |workers: &Workers| workers.vacant().map(|(place, _)| place.slot.0).collect::<Vec<_>>();
        assert_eq!(vacant(&workers), [1]);
        workers.insert(key("a", 2), worker());
        workers.remove(&key("a", 1));
        assert_eq!(vacant(&workers), [1]);
        assert_eq!(workers.on_gpu(&GpuId::from("a")).unwrap().0, &key("a", 2));
        workers.remove(&key("a", 2));
        workers.insert(key("b", 3), worker());
        assert_eq!(vacant(&workers), [0]);
    }
}
