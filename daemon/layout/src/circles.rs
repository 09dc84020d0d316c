//! Who meets whom under a plan: everyone is told of its own circles only, so that a plan for many thousands does not
//! mean as many messages that each name them all.

use crate::{Plan, StageId, WorkerKey};
use std::collections::BTreeMap;

/// Workers that communicate, in the order of their ranks.
pub type Circle = Vec<WorkerKey>;

/// Every circle of a plan, and who is in which.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Circles {
    /// The tensor-parallel groups: one per group of the layout, empty where it does not train.
    pub tensor: Vec<Circle>,
    /// The hosts of each sync column over all training replicas; a single replica has none.
    pub columns: Vec<Circle>,
    /// The first member of every training group: together with the groups they reach everyone.
    pub speakers: Circle,
    /// Those that exchange transfers: each set that is connected by them, in the order of workers.
    pub movers: Vec<Circle>,
    parts: BTreeMap<WorkerKey, Part>,
}

/// One worker's part: numbers of circles in [`Circles`] and of transfers in the plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Part {
    /// Of the group in the layout, too.
    pub tensor: Option<usize>,
    pub column: Option<usize>,
    pub speaks: bool,
    pub movers: Option<usize>,
    pub transfers: Vec<usize>,
}

impl Circles {
    pub fn new(plan: &Plan) -> Self {
        let mut circles = Self::default();
        circles.add_groups(plan);
        circles.add_columns(plan);
        circles.add_movers(plan);
        circles
    }

    /// `None`: the plan does without this worker.
    pub fn part(&self, worker: &WorkerKey) -> Option<&Part> {
        self.parts.get(worker)
    }

    fn add_groups(&mut self, plan: &Plan) {
        for (number, group) in plan.layout.groups.iter().enumerate() {
            let circle: Circle = group.members().map(|(_, member)| member.worker.clone()).collect();
            for worker in &circle {
                self.parts.entry(worker.clone()).or_default().tensor = Some(number);
            }
            if let Some(first) = circle.first() {
                self.parts.entry(first.clone()).or_default().speaks = true;
                self.speakers.push(first.clone());
            }
            self.tensor.push(circle);
        }
    }

    fn add_columns(&mut self, plan: &Plan) {
        let layout = &plan.layout;
        let mut columns: BTreeMap<(StageId, usize), Circle> = BTreeMap::new();
        for group in &layout.groups {
            let sync = layout.sync.iter().find(|sync| sync.stage == group.stage);
            let hosts = sync.and_then(|sync| sync.hosts.get(group.replica.0 as usize));
            for (column, slot) in hosts.into_iter().flatten().enumerate() {
                if let Some(Some(host)) = group.slots.get(slot.0 as usize) {
                    columns.entry((group.stage, column)).or_default().push(host.worker.clone());
                }
            }
        }
        for circle in columns.into_values().filter(|circle| circle.len() > 1) {
            for worker in &circle {
                self.parts.entry(worker.clone()).or_default().column = Some(self.columns.len());
            }
            self.columns.push(circle);
        }
    }

    fn add_movers(&mut self, plan: &Plan) {
        let mut numbers: BTreeMap<&WorkerKey, usize> = BTreeMap::new();
        for worker in plan.transfers.iter().flat_map(|transfer| [&transfer.from, &transfer.to]) {
            numbers.insert(worker, 0);
        }
        for (number, (_, assigned)) in numbers.iter_mut().enumerate() {
            *assigned = number;
        }
        let mut sets = Sets::new(numbers.len());
        for (number, transfer) in plan.transfers.iter().enumerate() {
            let (from, to) = (&transfer.from, &transfer.to);
            self.parts.entry(from.clone()).or_default().transfers.push(number);
            if to != from {
                self.parts.entry(to.clone()).or_default().transfers.push(number);
            }
            sets.join(numbers[from], numbers[to]);
        }
        let mut circle_of: BTreeMap<usize, usize> = BTreeMap::new();
        for (worker, number) in numbers {
            let circle = *circle_of.entry(sets.of(number)).or_insert_with(|| {
                self.movers.push(Circle::new());
                self.movers.len() - 1
            });
            self.movers[circle].push(worker.clone());
            self.parts.entry(worker.clone()).or_default().movers = Some(circle);
        }
    }
}

/// Disjoint sets of numbers.
struct Sets(Vec<usize>);

impl Sets {
    fn new(count: usize) -> Self {
        Self((0..count).collect())
    }

    /// The number that stands for the set of `at`.
    fn of(&mut self, mut at: usize) -> usize {
        while self.0[at] != at {
            // Halves the way for the next who asks.
            self.0[at] = self.0[self.0[at]];
            at = self.0[at];
        }
        at
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.of(a), self.of(b));
        self.0[a.max(b)] = a.min(b);
    }
}
