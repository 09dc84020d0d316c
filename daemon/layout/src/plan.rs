//! What the planner is asked and what it answers.

use crate::{Axis, Epoch, Holding, JobSpec, Layout, Place, Predicted, Topology, Units, WorkerKey, memory};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything a plan depends on. The same request always gives the same plan.
#[derive(Debug, Clone)]
pub struct PlanRequest<'a> {
    pub job: &'a JobSpec,
    /// Where GPUs are. Empty when nothing is known: then only a group's own members are near.
    pub topology: &'a Topology,
    /// The epoch of the layout to make.
    pub epoch: Epoch,
    /// Everyone who can be reached, members and leaving ones alike. Places where nobody shall train are inactive.
    pub workers: &'a BTreeMap<WorkerKey, Candidate>,
    /// True only when the job has never committed a step: state is then made from the seed, nothing is fetched.
    pub fresh: bool,
}

/// A worker that can be reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Candidate {
    /// The nominal place where it shall train, no other one there; `None` for one that leaves.
    pub place: Option<Place>,
    /// Only holdings at the newest step of all count: others cannot be brought there (SAME-STEP).
    pub holding: Holding,
}

/// Everyone who shall train or holds something.
pub fn candidates(
    members: impl IntoIterator<Item = (Place, WorkerKey)>,
    holdings: impl IntoIterator<Item = (WorkerKey, Holding)>,
) -> BTreeMap<WorkerKey, Candidate> {
    let held = holdings.into_iter().map(|(worker, holding)| (worker, Candidate { place: None, holding }));
    let mut workers: BTreeMap<WorkerKey, Candidate> = held.collect();
    for (place, worker) in members {
        workers.entry(worker).or_default().place = Some(place);
    }
    workers
}

/// A new layout and the way there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    pub layout: Layout,
    /// In a fixed order. Empty when `fresh`.
    pub transfers: Vec<Transfer>,
    /// Every rank makes its state from the seed.
    pub fresh: bool,
    pub bytes_moved: u64,
    /// The least that any plan to a balanced layout of these members must move into new owners. Balanced: at most one
    /// unit between the slots of a group, and at full degree the sizes of the nominal layout. More moves only where a group
    /// becomes whole again while its slots hold other units than their nominal ones.
    pub bytes_lower_bound: u64,
    /// The part of `bytes_moved` that slots of the same group held already and give up for the balance. The rest has no holder
    /// left among the group's slots.
    pub bytes_to_balance: u64,
    /// How fast the layout will train.
    pub predicted: Predicted,
}

/// A plan that can be carried out only if nothing is missing.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// Its transfers bring all but what is missing.
    pub plan: Plan,
    /// NO-GUESS: these units have no live holder at the newest step. Empty: the plan is good.
    pub missing: BTreeMap<Axis, Units>,
}

/// Some units of one axis go from a worker that holds them to one that shall own them.
///
/// The sender keeps its copy until the commit (ONLY-COPY). A new member that holds nothing also receives the
/// replicated parameters: `axis` and `units` are `None` and empty there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    pub axis: Option<Axis>,
    pub units: Units,
    pub from: WorkerKey,
    pub to: WorkerKey,
    pub bytes: u64,
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// NO-GUESS: these units have no live holder at the newest step.
    #[error("no live GPU holds {}", describe(.0))]
    Unrecoverable(BTreeMap<Axis, Units>),
    #[error(transparent)]
    Draft(#[from] DraftError),
}

/// Why there is no layout, whatever is held.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DraftError {
    /// No replica has `min_tensor` active slots in every stage.
    #[error("no replica has {needed} active slots in every stage (most found: {found})")]
    TooFew { needed: u32, found: u32 },
    /// A slot would need more memory than a GPU has for the job. In bytes, by [`crate::memory::slot_bytes`].
    #[error(
        "the slot at {place} would need {} of GPU memory and has {}: bring more slots back, make batch.micro smaller or \
         parallel.tensor larger, or let the replica pause (mode drop_replica)",
        memory::at_least(*.needs),
        memory::at_most(*.limit)
    )]
    Memory { place: Place, needs: u64, limit: u64 },
}

fn describe(units: &BTreeMap<Axis, Units>) -> String {
    let parts: Vec<_> = units.iter().map(|(axis, units)| format!("{axis} units {units}")).collect();
    parts.join(", ")
}
