//! A script from its first fault until the job trains again, or has a good reason not to.

use crate::cluster::{NODES, job_name};
use crate::memory::REPLICATED;
use crate::net::MS;
use crate::world::World;
use crate::{Sabotage, Script};
use reknit_engine::{JobView, Phase, Time};
use std::collections::BTreeMap;

/// After the last fault, in virtual milliseconds.
const PATIENCE: u64 = 60_000;

/// What happened in one run, or in many.
#[derive(Debug, Clone, Default)]
pub struct Statistics {
    pub faults: BTreeMap<&'static str, u64>,
    pub takeovers: u64,
    pub refused_writes: u64,
    pub old_leaders_left: u64,
    pub rolled_forward: u64,
    pub epochs: u64,
    pub incidents: u64,
    pub events: u64,
    pub virtual_ms: u64,
}

impl Statistics {
    pub(crate) fn happened(&mut self, fault: &'static str) {
        *self.faults.entry(fault).or_default() += 1;
    }

    pub fn add(&mut self, other: &Self) {
        for (fault, count) in &other.faults {
            *self.faults.entry(fault).or_default() += count;
        }
        self.takeovers += other.takeovers;
        self.refused_writes += other.refused_writes;
        self.old_leaders_left += other.old_leaders_left;
        self.rolled_forward += other.rolled_forward;
        self.epochs += other.epochs;
        self.incidents += other.incidents;
        self.events += other.events;
        self.virtual_ms += other.virtual_ms;
    }
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ending {
    /// At full strength.
    Training,
    /// Some unit is held by nobody any more.
    Waiting,
    /// As an operator wished.
    Stopped,
}

#[derive(Debug)]
pub struct Outcome {
    pub ending: Ending,
    pub statistics: Statistics,
}

/// Runs a script.
///
/// # Errors
/// Names the first broken invariant, or says that the job did not come back.
pub fn replay(script: &Script, sabotage: Sabotage, trace: bool) -> Result<Outcome, String> {
    let mut world = World::new(script, sabotage, trace);
    let start = world.now;
    let last = script.faults.iter().map(|(ms, _)| *ms).max().unwrap_or(0);
    let healed = Time(start.0 + (1_000 + last) * MS);
    world.run_until(Time(healed.0 + 200 * MS));
    let end = Time(healed.0 + PATIENCE * MS);
    let mut ending = None;
    let mut trained_from = None;
    while world.violation.is_none() && world.now < end && ending.is_none() {
        world.run_until(Time(world.now.0 + 300 * MS));
        ending = settled(&world, &mut trained_from);
    }
    if let Some(violation) = world.violation {
        return Err(violation);
    }
    let Some(ending) = ending else {
        let view = leader_view(&world);
        let stands = view.map(|view| {
            let degrees = view.layout.map(|layout| layout.degrees());
            let open = world.store.incidents.values().filter(|incident| incident.recovered.is_none());
            let open: Vec<_> =
                open.map(|found| (found.id, found.kind, &found.signal, found.epoch_after)).collect();
            (view.phase, view.explanation, view.epoch, view.committed_step, degrees, open)
        });
        let alive = world.workers.len();
        return Err(format!(
            "liveness: {PATIENCE} ms after the last fault it is not training again: {stands:?}, {alive} workers"
        ));
    };
    let mut statistics = world.statistics;
    statistics.virtual_ms = (world.now.0 - start.0) / MS;
    statistics.incidents = world.store.incidents.len() as u64;
    statistics.epochs = world.store.jobs.get(&job_name()).map_or(0, |record| record.last_epoch.0);
    Ok(Outcome { ending, statistics })
}

fn leader_view(world: &World) -> Option<JobView> {
    let lease = world.store.leader?;
    world.daemons[lease.daemon].leading.as_ref()?.state.job(&job_name())
}

/// `trained_from`: the step when all was well for the first time.
fn settled(world: &World, trained_from: &mut Option<u64>) -> Option<Ending> {
    let lease = world.store.leader?;
    let state = &world.daemons[lease.daemon].leading.as_ref()?.state;
    let view = state.job(&job_name())?;
    let full = world.tensor as usize * NODES;
    match view.phase {
        Phase::Running => {
            let whole = view.layout.as_ref().is_some_and(|layout| layout.members().count() == full);
            let over = state.incidents(&job_name()).iter().all(|incident| incident.recovered.is_some());
            if !whole || !over || world.workers.len() != full {
                *trained_from = None;
                return None;
            }
            let from = *trained_from.get_or_insert(view.committed_step.0);
            (view.committed_step.0 >= from + 3).then_some(Ending::Training)
        }
        Phase::Waiting => lost_for_good(world, &view).then_some(Ending::Waiting),
        Phase::Stopped => world.workers.is_empty().then_some(Ending::Stopped),
        Phase::Pending
        | Phase::Starting
        | Phase::Quiescing
        | Phase::Resharding
        | Phase::Draining
        | Phase::Completed
        | Phase::Failed
        | Phase::Rebuilding => None,
    }
}

/// Some value is truly held by no live member of the committed layout at the newest step that anyone reached.
fn lost_for_good(world: &World, view: &JobView) -> bool {
    let Some(layout) = &view.layout else { return false };
    let members = layout.members().filter_map(|(_, member)| world.workers.get(&member.worker));
    let memories: Vec<_> = members.map(|worker| &worker.memory).collect();
    let newest = memories.iter().map(|memory| memory.step).max().unwrap_or(0).max(view.committed_step.0);
    let held =
        |place: usize| memories.iter().any(|memory| memory.step == newest && memory.values[place].is_some());
    !(0..REPLICATED).all(held)
}
