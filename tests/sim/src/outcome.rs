//! A script from its first fault until every job trains again, or has a good reason not to.

use crate::cluster::{Who, size};
use crate::memory::REPLICATED;
use crate::net::MS;
use crate::world::World;
use crate::{Sabotage, Script};
use reknit_engine::{JobName, JobView, Phase, State, Time};
use std::collections::BTreeMap;

/// After the last fault, in virtual milliseconds.
const PATIENCE: u64 = 60_000;

/// What happened in one run, or in many.
#[derive(Debug, Clone, Default)]
pub struct Statistics {
    pub faults: BTreeMap<&'static str, u64>,
    /// What the control plane and the workers did about them.
    pub deeds: BTreeMap<&'static str, u64>,
    pub epochs: u64,
    pub events: u64,
    pub virtual_ms: u64,
}

impl Statistics {
    pub(crate) fn happened(&mut self, fault: &'static str) {
        *self.faults.entry(fault).or_default() += 1;
    }

    pub(crate) fn did(&mut self, deed: &'static str) {
        *self.deeds.entry(deed).or_default() += 1;
    }

    pub fn add(&mut self, other: &Self) {
        for (fault, count) in &other.faults {
            *self.faults.entry(fault).or_default() += count;
        }
        for (deed, count) in &other.deeds {
            *self.deeds.entry(deed).or_default() += count;
        }
        self.epochs += other.epochs;
        self.events += other.events;
        self.virtual_ms += other.virtual_ms;
    }
}

/// How a run ended for a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ending {
    /// With every place filled.
    Training,
    /// With the places that are left: some node is gone for good.
    TrainingReduced,
    /// Some unit is held by nobody any more.
    Waiting,
    /// Another job has the GPUs that it needs, or they are gone for good.
    Pending,
    /// As an operator wished.
    Stopped,
    Completed,
}

#[derive(Debug)]
pub struct Outcome {
    /// Of each job.
    pub endings: Vec<Ending>,
    pub statistics: Statistics,
}

/// Runs a script.
///
/// # Errors
/// Names the first broken invariant, or says that a job did not come back.
pub fn replay(script: &Script, sabotage: Sabotage, trace: bool) -> Result<Outcome, String> {
    let mut world = World::new(script, sabotage, trace);
    let start = world.now;
    let healed = Time(start.0 + (1_000 + script.end()) * MS);
    world.run_until_time(Time(healed.0 + 200 * MS));
    let end = Time(healed.0 + PATIENCE * MS);
    let mut trained_from = BTreeMap::new();
    let mut endings = None;
    while world.violation.is_none() && world.now < end && endings.is_none() {
        world.run_until_time(Time(world.now.0 + 300 * MS));
        endings = settled(&world, &mut trained_from);
    }
    if let Some(violation) = world.violation {
        return Err(violation);
    }
    let Some(endings) = endings else {
        let stands = stands(&world);
        return Err(format!("liveness: {PATIENCE} ms after the last fault some job is not back: {stands}"));
    };
    let mut statistics = world.statistics;
    statistics.virtual_ms = (world.now.0 - start.0) / MS;
    statistics.epochs = world.store.jobs.values().map(|record| record.last_epoch.0).sum();
    Ok(Outcome { endings, statistics })
}

fn leader(world: &World) -> Option<&State> {
    let lease = world.store.leader?;
    world.daemons[lease.daemon].leading.as_ref().map(|leading| &leading.state)
}

fn stands(world: &World) -> String {
    let views = world.cluster.jobs.iter().map(|spec| {
        let job = JobName(spec.name.clone());
        let view = leader(world)?.job(&job)?;
        let degrees = view.layout.map(|layout| layout.degrees());
        let open =
            world.store.incidents.values().filter(|found| found.job == job && found.recovered.is_none());
        let open: Vec<_> =
            open.map(|found| (found.id, found.kind, &found.signal, found.epoch_after)).collect();
        let text = (view.phase, view.explanation, view.epoch, view.committed_step, degrees, open);
        Some(format!("{text:?}"))
    });
    let views: Vec<_> = views.collect();
    format!("{views:?}; gone: {:?}; alive: {:?}", world.gone, world.workers.keys().collect::<Vec<_>>())
}

/// `trained_from`: the step of each job when all was well for the first time.
fn settled(world: &World, trained_from: &mut BTreeMap<JobName, u64>) -> Option<Vec<Ending>> {
    let state = leader(world)?;
    let ending = |spec: &reknit_layout::JobSpec| {
        let job = JobName(spec.name.clone());
        let view = state.job(&job)?;
        let alive =
            world.workers.iter().filter(|(who, worker)| who.job == job && !world.gone.contains(&worker.node));
        let alive = alive.count();
        match view.phase {
            Phase::Running => {
                // What an earlier run left open stays so.
                let earlier = world.earlier.get(&job).copied().unwrap_or_default();
                let mut incidents = state.incidents(&job).into_iter().filter(|found| found.id > earlier);
                let over = incidents.all(|incident| incident.recovered.is_some());
                let Some(members) = whole(world, &view).filter(|members| over && alive <= *members) else {
                    trained_from.remove(&job);
                    return None;
                };
                let from = *trained_from.entry(job).or_insert(view.committed_step.0);
                let ending = if members == size(spec) { Ending::Training } else { Ending::TrainingReduced };
                (view.committed_step.0 >= from + 3).then_some(ending)
            }
            Phase::Waiting => {
                (lost_for_good(world, &view) || all_gone(world, &job)).then_some(Ending::Waiting)
            }
            Phase::Pending => (free(world, state, &job) < size(spec)).then_some(Ending::Pending),
            Phase::Stopped => (alive == 0).then_some(Ending::Stopped),
            Phase::Completed => (alive == 0).then_some(Ending::Completed),
            Phase::Starting => all_gone(world, &job).then_some(Ending::Pending),
            Phase::Quiescing | Phase::Resharding | Phase::Draining | Phase::Failed | Phase::Rebuilding => {
                None
            }
        }
    };
    world.cluster.jobs.iter().map(ending).collect()
}

/// How many train, if these are all that can: every place whose GPU is on a node that is there.
fn whole(world: &World, view: &JobView) -> Option<usize> {
    let layout = view.layout.as_ref()?;
    let record = world.store.jobs.get(&view.name)?;
    let filled = record.places.values().all(|gpu| {
        let gone = world.gone.contains(&world.node_of(world.gpu_number(gpu)));
        gone || layout.members().any(|(_, member)| member.worker.gpu == *gpu)
    });
    filled.then(|| layout.members().count())
}

/// GPUs that no other job has, on nodes that are there.
fn free(world: &World, state: &State, job: &JobName) -> usize {
    let others = world.store.jobs.values().filter(|record| record.name != *job);
    let others = others.filter(|record| state.job(&record.name).is_some_and(|view| !view.phase.ended()));
    let taken: Vec<_> = others.flat_map(|record| record.places.values()).collect();
    let here = |gpu: usize| !world.gone.contains(&world.node_of(gpu));
    (0..world.gpus.len()).filter(|gpu| here(*gpu) && !taken.contains(&&world.gpus[*gpu])).count()
}

/// No GPU of the job is on a node that is there.
fn all_gone(world: &World, job: &JobName) -> bool {
    let gone = |gpu| world.gone.contains(&world.node_of(world.gpu_number(gpu)));
    world.store.jobs.get(job).is_some_and(|record| record.places.values().all(gone))
}

/// Some value is truly held by no live member that answers of the committed layout at the newest step that anyone reached.
fn lost_for_good(world: &World, view: &JobView) -> bool {
    let Some(layout) = &view.layout else { return false };
    let of_job = world.workers.iter().filter(|(who, _)| who.job == view.name);
    // Who alone holds something is waited for, and may be frozen for ever.
    let of_job = of_job.filter(|(_, worker)| worker.frozen_until <= world.now);
    // A process behind an agent that is gone may have been given up.
    let known = |who: &Who| view.workers.iter().any(|worker| worker.worker == who.key);
    let members = of_job.filter(|(who, _)| layout.place_of(&who.key).is_some() && known(who));
    let memories: Vec<_> = members.map(|(_, worker)| &worker.memory).collect();
    let newest = memories.iter().map(|memory| memory.step).max().unwrap_or(0).max(view.committed_step.0);
    let held =
        |place: usize| memories.iter().any(|memory| memory.step == newest && memory.values[place].is_some());
    !(0..REPLICATED).all(held)
}
