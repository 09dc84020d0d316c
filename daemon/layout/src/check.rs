//! An independent linter of plans: it shares no code with the planner beyond the types.

use crate::job::BatchPolicy;
use crate::{
    Axis, Group, Holding, JobSpec, Place, Plan, PlanRequest, ReplicaId, Slot, StageId, Step, SyncColumns,
    Transfer, Units, WorkerKey,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// A rule that a plan breaks.
///
/// ONLY-COPY needs no rule of its own: by COVER every unit has an owner in each replica that trains, and by `Source` the owner holds
/// it or receives it while the sender keeps its copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Groups and members are those of the job and the request; a replica trains as a whole or not at all.
    Members,
    /// COVER: each unit has exactly one owner in each training group.
    Cover,
    /// Per axis the active slots of a group differ by at most one unit, and so do sync columns.
    Balance,
    /// Every training replica takes samples, no other does, `keep_global` keeps the sum, and at most one share is no whole number of
    /// micro-batches, if there is one for each replica.
    Batch,
    /// SAME-STEP, NO-GUESS: senders hold what they send at the newest step; each missing unit arrives exactly once, and from
    /// the nearest: the own group or domain, else a leaving worker, else another replica.
    Source,
    /// Each unit has one sync column; hosts are active and host one column; nothing travels in one of the most reduced replicas.
    Sync,
    /// The byte counts are right.
    Bytes,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub rule: Rule,
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.detail)
    }
}

/// Every rule that `plan`, as an answer to `request`, breaks. Empty for a good plan.
pub fn check(request: &PlanRequest<'_>, plan: &Plan) -> Vec<Violation> {
    let asked = request.workers.iter().filter_map(|(worker, candidate)| Some((candidate.place?, worker)));
    let mut linter = Linter {
        request,
        job: request.job,
        plan,
        asked: asked.collect(),
        newest: newest(request),
        found: Vec::new(),
    };
    linter.places();
    linter.members();
    linter.groups();
    linter.batch();
    linter.sources();
    for stage in 0..request.job.parallel.pipeline {
        linter.sync(StageId(stage));
    }
    linter.found
}

struct Linter<'a> {
    request: &'a PlanRequest<'a>,
    job: &'a JobSpec,
    plan: &'a Plan,
    /// Who shall train where.
    asked: BTreeMap<Place, &'a WorkerKey>,
    /// The step at which holdings count.
    newest: Option<Step>,
    found: Vec<Violation>,
}

impl<'a> Linter<'a> {
    fn expect(&mut self, holds: bool, rule: Rule, detail: impl FnOnce() -> String) {
        if !holds {
            self.found.push(Violation { rule, detail: detail() });
        }
    }

    fn trains(&self, replica: ReplicaId) -> bool {
        let mut groups = self.plan.layout.groups.iter();
        groups.any(|group| group.replica == replica && group.slots.iter().any(Option::is_some))
    }

    fn places(&mut self) {
        let asked = self.request.workers.values().filter(|candidate| candidate.place.is_some()).count();
        self.expect(asked == self.asked.len(), Rule::Members, || {
            "two workers shall train at one place".into()
        });
    }

    fn members(&mut self) {
        let (request, plan, parallel) = (self.request, self.plan, &self.job.parallel);
        let same = plan.layout.epoch == request.epoch && plan.fresh == request.fresh;
        self.expect(same, Rule::Members, || "epoch or freshness is not the request's".into());
        let given: Vec<_> = plan.layout.groups.iter().map(|group| (group.replica.0, group.stage.0)).collect();
        let stages = 0..parallel.pipeline;
        let wanted: Vec<_> = (0..parallel.data)
            .flat_map(|replica| stages.clone().map(move |stage| (replica, stage)))
            .collect();
        self.expect(given == wanted, Rule::Members, || format!("groups are {given:?}"));
        let mut seen = BTreeSet::new();
        for group in &plan.layout.groups {
            let trains = self.trains(group.replica);
            let active = group.slots.iter().flatten().count();
            self.expect(group.slots.len() == parallel.tensor as usize, Rule::Members, || {
                format!("group {}.{} has {} slots", group.replica, group.stage, group.slots.len())
            });
            self.expect(!trains || active >= parallel.min_tensor as usize, Rule::Members, || {
                format!("group {}.{} trains with {active} slots", group.replica, group.stage)
            });
            for (slot, member) in (0..).map(Slot).zip(&group.slots) {
                let place = Place { replica: group.replica, stage: group.stage, slot };
                let worker = member.as_ref().map(|member| &member.worker);
                let asked = self.asked.get(&place).copied().filter(|_| trains);
                self.expect(worker == asked, Rule::Members, || {
                    format!("{place} is {worker:?}, asked for {asked:?}")
                });
                let new = worker.is_none_or(|worker| seen.insert(worker));
                self.expect(new, Rule::Members, || format!("{worker:?} stands at two places"));
            }
        }
    }

    fn groups(&mut self) {
        for group in &self.plan.layout.groups {
            let name = format!("group {}.{}", group.replica, group.stage);
            if group.slots.iter().all(Option::is_none) {
                let empty = group.partitions.values().flatten().all(Units::is_empty);
                self.expect(empty, Rule::Cover, || format!("{name} does not train but owns units"));
                continue;
            }
            let axes: BTreeSet<Axis> = self.job.stage_axes(group.stage).into_iter().collect();
            let given: BTreeSet<Axis> = group.partitions.keys().copied().collect();
            self.expect(axes == given, Rule::Cover, || format!("{name} has the axes {given:?}"));
            for (axis, sets) in group.partitions.iter() {
                let cover = covers(sets, self.job.model.units(axis.family));
                self.expect(cover, Rule::Cover, || format!("{name} {axis}: {sets:?}"));
                self.expect(sets.len() == group.slots.len(), Rule::Cover, || {
                    format!("{name} {axis}: {} sets", sets.len())
                });
                let slots = group.slots.iter().zip(sets);
                let idle = slots.clone().all(|(member, set)| member.is_some() || set.is_empty());
                self.expect(idle, Rule::Cover, || format!("{name} {axis}: an inactive slot owns units"));
                let sizes: Vec<u32> =
                    slots.filter(|(member, _)| member.is_some()).map(|(_, set)| set.len()).collect();
                let most = sizes.iter().max().unwrap_or(&0);
                let least = sizes.iter().min().unwrap_or(&0);
                self.expect(most - least <= 1, Rule::Balance, || format!("{name} {axis}: {sizes:?}"));
            }
        }
    }

    fn batch(&mut self) {
        let batch = &self.plan.layout.batch;
        let replicas = self.job.parallel.data as usize;
        self.expect(batch.len() == replicas, Rule::Batch, || format!("{batch:?} for {replicas} replicas"));
        for (replica, samples) in (0..).map(ReplicaId).zip(batch) {
            let right = self.trains(replica) == (*samples > 0);
            self.expect(right, Rule::Batch, || format!("replica {replica} takes {samples} samples"));
        }
        let sum: u64 = batch.iter().map(|samples| u64::from(*samples)).sum();
        let global = u64::from(self.job.batch.global);
        let right = match self.job.batch.policy {
            BatchPolicy::KeepGlobal => sum == global,
            BatchPolicy::Shrink => sum <= global,
        };
        self.expect(right, Rule::Batch, || format!("{batch:?} sums to {sum}, global is {global}"));
        let micro = self.job.batch.micro;
        let short = batch.iter().filter(|samples| *samples % micro != 0).count();
        let whole = global < u64::from(micro) * replicas as u64 || short <= 1;
        self.expect(whole, Rule::Batch, || format!("{batch:?} are no whole micro-batches of {micro}"));
    }

    /// The holding of a worker, if it is of the newest step and holds layers of `stage`.
    fn live(&self, worker: &WorkerKey, stage: StageId) -> Option<&'a Holding> {
        let holding = &self.request.workers.get(worker)?.holding;
        let mut held = holding.units.iter().filter(|(_, units)| !units.is_empty()).peekable();
        held.peek()?;
        // Vocabulary rows alone could be the first stage's or the last one's.
        let here = match held.find_map(|(axis, _)| axis.layer) {
            Some(layer) => self.job.stage_layers(stage).contains(&layer),
            None => self.job.parallel.pipeline == 1,
        };
        (Some(holding.step) == self.newest && here).then_some(holding)
    }

    fn sources(&mut self) {
        let plan = self.plan;
        if self.request.fresh {
            let none = plan.transfers.is_empty() && plan.bytes_moved == 0;
            self.expect(none, Rule::Source, || "a fresh job fetches nothing".into());
            return;
        }
        let mut arrived: BTreeMap<(&WorkerKey, Option<Axis>), Vec<&Units>> = BTreeMap::new();
        let mut moved = 0;
        for transfer in &plan.transfers {
            let name =
                format!("{:?} {} from {} to {}", transfer.axis, transfer.units, transfer.from, transfer.to);
            arrived.entry((&transfer.to, transfer.axis)).or_default().push(&transfer.units);
            moved += transfer.bytes;
            let Some(place) = plan.layout.place_of(&transfer.to) else {
                self.expect(false, Rule::Source, || format!("{name}: the receiver is no member"));
                continue;
            };
            self.nearest(transfer, place, &name);
            let (holds, bytes) = match (self.live(&transfer.from, place.stage), transfer.axis) {
                (None, _) => (false, transfer.bytes),
                (Some(_), None) => (transfer.units.is_empty(), self.job.replicated_bytes(place.stage)),
                (Some(holding), Some(axis)) => {
                    let holds = transfer.units.iter().all(|unit| holding.of(axis).contains(unit));
                    let unit = self.job.unit_bytes(place.stage, axis.family);
                    (holds && !transfer.units.is_empty(), unit * u64::from(transfer.units.len()))
                }
            };
            self.expect(holds, Rule::Source, || format!("{name}: the sender does not hold it"));
            self.expect(bytes == transfer.bytes, Rule::Bytes, || {
                format!("{name}: {} bytes, not {bytes}", transfer.bytes)
            });
        }
        let mut to_balance = 0;
        for group in &plan.layout.groups {
            to_balance += self.arrivals(group, &mut arrived);
        }
        self.expect(to_balance == plan.bytes_to_balance, Rule::Bytes, || {
            format!("{to_balance} bytes move though the group holds them; said {}", plan.bytes_to_balance)
        });
        for ((worker, axis), units) in arrived {
            self.expect(false, Rule::Source, || format!("{worker} needs no {axis:?} {units:?}"));
        }
        let total = moved == plan.bytes_moved && moved >= plan.bytes_lower_bound;
        self.expect(total, Rule::Bytes, || {
            format!("{moved} bytes move; said {}, bound {}", plan.bytes_moved, plan.bytes_lower_bound)
        });
    }

    /// Nobody who holds all of the transfer, or the replicated parameters, is nearer than its sender.
    fn nearest(&mut self, transfer: &Transfer, to: Place, name: &str) {
        let domain = |worker: &WorkerKey| self.request.topology.domain_of(&worker.gpu);
        let distance = |worker: &WorkerKey| {
            let at = self.request.workers.get(worker).and_then(|candidate| candidate.place);
            let group = at.map(|at| (at.replica, at.stage));
            let near = domain(worker).is_some() && domain(worker) == domain(&transfer.to);
            match group {
                Some(group) if group == (to.replica, to.stage) => 0,
                Some(_) | None if near => 0,
                None => 1,
                Some(_) => 2,
            }
        };
        let able = self.request.workers.keys().filter(|worker| {
            let holding = self.live(worker, to.stage);
            let all = |holding: &Holding| match transfer.axis {
                Some(axis) => transfer.units.iter().all(|unit| holding.of(axis).contains(unit)),
                None => true,
            };
            holding.is_some_and(all)
        });
        let nearest = able.map(distance).min();
        let chosen = distance(&transfer.from);
        self.expect(nearest.is_none_or(|nearest| nearest >= chosen), Rule::Source, || {
            format!("{name}: someone nearer holds it")
        });
    }

    /// What each slot of the group owns and does not hold arrives once; takes it out of `arrived`. Returns the bytes of
    /// what another slot of the group holds.
    fn arrivals(
        &mut self,
        group: &'a Group,
        arrived: &mut BTreeMap<(&'a WorkerKey, Option<Axis>), Vec<&Units>>,
    ) -> u64 {
        let mut to_balance = 0;
        let workers: Vec<_> = group.slots.iter().flatten().map(|member| &member.worker).collect();
        let inside = |axis: Axis, unit: u32| {
            workers
                .iter()
                .any(|worker| self.live(worker, group.stage).is_some_and(|held| held.of(axis).contains(unit)))
        };
        for (axis, sets) in group.partitions.iter() {
            let units = group.slots.iter().zip(sets).flat_map(|(member, owned)| {
                let held = member.as_ref().and_then(|member| self.live(&member.worker, group.stage));
                let held = held.map(|held| held.of(*axis)).unwrap_or_default();
                owned.iter().filter(move |unit| !held.contains(*unit))
            });
            let moved = units.filter(|unit| inside(*axis, *unit)).count() as u64;
            to_balance += moved * self.job.unit_bytes(group.stage, axis.family);
        }
        for (slot, member) in group.slots.iter().enumerate() {
            let Some(worker) = member.as_ref().map(|member| &member.worker) else {
                continue;
            };
            let holding = self.live(worker, group.stage).cloned();
            let replicated = arrived.remove(&(worker, None)).map_or(0, |parcels| parcels.len());
            let wanted = usize::from(holding.is_none());
            self.expect(replicated == wanted, Rule::Source, || {
                format!("{worker} gets the replicated parameters {replicated} times, needs {wanted}")
            });
            for (axis, sets) in group.partitions.iter() {
                let held = holding.as_ref().map(|holding| holding.of(*axis)).unwrap_or_default();
                let owned = sets.get(slot).cloned().unwrap_or_default();
                let missing: Vec<u32> = owned.iter().filter(|unit| !held.contains(*unit)).collect();
                let parcels = arrived.remove(&(worker, Some(*axis))).unwrap_or_default();
                let mut got: Vec<u32> = parcels.iter().flat_map(|units| units.iter()).collect();
                got.sort_unstable();
                self.expect(got == missing, Rule::Source, || {
                    format!("{worker} {axis}: misses {missing:?}, gets {got:?}")
                });
            }
        }
        to_balance
    }

    fn sync(&mut self, stage: StageId) {
        let layout = &self.plan.layout;
        let of_stage: Vec<&SyncColumns> = layout.sync.iter().filter(|sync| sync.stage == stage).collect();
        let [sync] = of_stage[..] else {
            self.expect(false, Rule::Sync, || format!("{} entries for stage {stage}", of_stage.len()));
            return;
        };
        let groups: Vec<&Group> = layout.groups.iter().filter(|group| group.stage == stage).collect();
        let degrees = groups.iter().map(|group| group.slots.iter().flatten().count());
        let least = degrees.filter(|degree| *degree > 0).min().unwrap_or(0);
        self.expect(sync.columns as usize == least, Rule::Sync, || {
            format!("stage {stage} has {} columns, its smallest degree is {least}", sync.columns)
        });
        self.expect(sync.hosts.len() == groups.len(), Rule::Sync, || {
            format!("{} lists of hosts", sync.hosts.len())
        });
        for (group, hosts) in groups.iter().zip(&sync.hosts) {
            let active = |slot: &Slot| group.slots.get(slot.0 as usize).is_some_and(Option::is_some);
            let distinct: BTreeSet<&Slot> = hosts.iter().collect();
            let wanted = if group.slots.iter().any(Option::is_some) { least } else { 0 };
            let right = hosts.len() == wanted && distinct.len() == wanted && hosts.iter().all(active);
            self.expect(right, Rule::Sync, || format!("replica {} hosts at {hosts:?}", group.replica));
        }
        let axes: Vec<Axis> = sync.axes.iter().map(|axis| axis.axis).collect();
        let wanted: BTreeSet<Axis> = self.job.stage_axes(stage).into_iter().collect();
        let all = axes.len() == wanted.len() && axes.iter().all(|axis| wanted.contains(axis));
        self.expect(all, Rule::Sync, || format!("stage {stage} has columns of {axes:?}"));
        for axis in &sync.axes {
            let units = self.job.model.units(axis.axis.family);
            let right = axis.columns.len() == least && covers(&axis.columns, units);
            self.expect(right, Rule::Sync, || format!("{}: {:?}", axis.axis, axis.columns));
            let sizes = axis.columns.iter().map(Units::len);
            let spread = sizes.clone().max().unwrap_or(0) - sizes.min().unwrap_or(0);
            self.expect(spread <= 1, Rule::Balance, || format!("{}: columns {:?}", axis.axis, axis.columns));
        }
        let at_rest = |(group, hosts): (&&Group, &Vec<Slot>)| {
            hosts.len() == group.slots.iter().flatten().count()
                && sync.axes.iter().all(|axis| {
                    let sets = group.partitions.get(&axis.axis);
                    let owned = hosts.iter().map(|host| sets.and_then(|sets| sets.get(host.0 as usize)));
                    owned.eq(axis.columns.iter().map(Some))
                })
        };
        let rest = least == 0 || groups.iter().zip(&sync.hosts).any(at_rest);
        self.expect(rest, Rule::Sync, || format!("stage {stage}: gradients travel in every replica"));
    }
}

/// The newest step at which anybody holds anything.
fn newest(request: &PlanRequest<'_>) -> Option<Step> {
    let holdings = request.workers.values().map(|candidate| &candidate.holding);
    let full = holdings.filter(|holding| holding.units.values().any(|units| !units.is_empty()));
    full.map(|holding| holding.step).max()
}

/// Whether the sets hold each of `units` units exactly once.
fn covers(sets: &[Units], units: u32) -> bool {
    let mut all: Vec<u32> = sets.iter().flat_map(|set| set.iter()).collect();
    all.sort_unstable();
    all.into_iter().eq(0..units)
}
