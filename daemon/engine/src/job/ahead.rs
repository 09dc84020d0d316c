//! A planned change gets ready while the members train: its layout is planned and its groups are joined in the background.
//! Only when everyone has joined are the members paused, for the transfers and the commit alone.
//!
//! Until then a failure costs the members nothing: the epoch got ready is given up, and the next try has another. They are
//! not told so, since what they joined of it ends with the next order to join or to prepare, and with their own epoch.

use super::{Job, Planning};
use crate::state::Ctx;
use crate::{Command, Time};
use reknit_layout::{Axis, Epoch, Holding, Place, Plan, PlanError, Units, WorkerKey, candidates};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Joins that may fail with nobody to blame before these members are left as they are.
const TRIES: u32 = 3;

/// The change that gets ready.
#[derive(Debug, Clone)]
pub(crate) struct Ahead {
    pub(crate) epoch: Epoch,
    /// Who shall train under it.
    pub(crate) members: BTreeMap<Place, WorkerKey>,
    /// What the present members hold, as their layout says.
    held: BTreeMap<WorkerKey, BTreeMap<Axis, Units>>,
    /// An operator's wish, and not members that come or go.
    wish: bool,
    pub(crate) progress: Progress,
}

#[derive(Debug, Clone)]
pub(crate) enum Progress {
    Planning,
    Joining {
        plan: Arc<Plan>,
        /// Those that have not joined all their groups.
        missing: BTreeSet<WorkerKey>,
        deadline: Time,
    },
    /// There is no such layout, or its members do not find each other: not tried again with the same ones.
    Refused,
}

impl Ahead {
    /// Of the joining of its groups, once that has begun.
    pub(crate) fn deadline(&self) -> Option<Time> {
        match self.progress {
            Progress::Joining { deadline, .. } => Some(deadline),
            Progress::Planning | Progress::Refused => None,
        }
    }

    fn refused(&self) -> bool {
        match self.progress {
            Progress::Refused => true,
            Progress::Planning | Progress::Joining { .. } => false,
        }
    }

    fn involves(&self, worker: &WorkerKey) -> bool {
        self.members.values().any(|member| member == worker) || self.held.contains_key(worker)
    }
}

impl Job {
    /// A change is under way in the background.
    pub(crate) fn gets_ahead(&self) -> bool {
        self.ahead.as_ref().is_some_and(|ahead| !ahead.refused())
    }

    /// The same was tried already, in vain.
    pub(crate) fn is_refused(&self, members: &BTreeMap<Place, WorkerKey>) -> bool {
        self.ahead.as_ref().is_some_and(|ahead| ahead.refused() && ahead.members == *members)
    }

    /// Asks for the layout of these members, who train on meanwhile.
    pub(crate) fn get_ahead(&mut self, ctx: &mut Ctx<'_>, members: BTreeMap<Place, WorkerKey>, wish: bool) {
        let Some(layout) = self.record.layout.clone() else {
            return;
        };
        let held: BTreeMap<_, _> = layout
            .members()
            .filter_map(|(place, member)| {
                let group = layout.group(place.replica, place.stage)?;
                Some((member.worker.clone(), group.owned(place.slot)))
            })
            .collect();
        // The step that they will stop at is not known, and no plan depends on it.
        let step = self.committed;
        let holdings = held
            .iter()
            .map(|(worker, units)| (worker.clone(), Holding { step, units: units.clone().into() }));
        let workers = candidates(members.clone(), holdings);
        let epoch = self.reserve_epoch(ctx);
        self.ahead = Some(Ahead { epoch, members, held, wish, progress: Progress::Planning });
        ctx.out.push(Command::Plan {
            job: self.record.name.clone(),
            epoch,
            spec: self.spec.clone(),
            workers,
            topology: Arc::new(ctx.cluster.topology()),
            fresh: false,
        });
    }

    /// True when the answer was for the change in the background.
    pub(crate) fn planned_ahead(
        &mut self,
        ctx: &mut Ctx<'_>,
        epoch: Epoch,
        result: &Result<Plan, PlanError>,
    ) -> bool {
        let running = self.running();
        let Some(ahead) = self.ahead.as_mut().filter(|ahead| running && ahead.epoch == epoch) else {
            return false;
        };
        match (&ahead.progress, result) {
            (Progress::Planning, Ok(plan)) => {
                let plan = Arc::new(plan.clone());
                let participants = self.participants(&plan);
                let missing = participants.iter().map(|found| found.worker.clone()).collect();
                let deadline = ctx.now.after(ctx.timeouts.ready());
                let job = self.record.name.clone();
                ctx.out.extend(participants.iter().map(|to| Command::Join {
                    job: job.clone(),
                    worker: to.worker.clone(),
                    epoch,
                    plan: plan.clone(),
                    participants: participants.clone(),
                }));
                if let Some(ahead) = &mut self.ahead {
                    ahead.progress = Progress::Joining { plan, missing, deadline };
                }
            }
            (Progress::Planning, Err(_)) => ahead.progress = Progress::Refused,
            (Progress::Joining { .. } | Progress::Refused, Ok(_) | Err(_)) => {}
        }
        true
    }

    /// A worker has joined all its groups of the epoch to come.
    pub(crate) fn joined(&mut self, key: &WorkerKey, epoch: Epoch) {
        if let Some(Ahead { epoch: of, progress: Progress::Joining { missing, .. }, .. }) = &mut self.ahead
            && *of == epoch
        {
            missing.remove(key);
        }
    }

    /// Pauses the members once all have joined; gives up when some do not in time.
    pub(crate) fn follow_up(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let Some(Ahead { progress: Progress::Joining { missing, deadline, .. }, .. }) = &self.ahead else {
            return false;
        };
        if missing.is_empty() {
            let reason = self.tell_change(ctx);
            self.pause(ctx, reason);
            return true;
        }
        if ctx.now < *deadline {
            return false;
        }
        let late = missing.iter().find(|worker| !self.is_member(worker)).cloned();
        self.give_up_ahead(ctx, late);
        true
    }

    /// True when the report was about the change in the background.
    pub(crate) fn join_failed(
        &mut self,
        ctx: &mut Ctx<'_>,
        key: &WorkerKey,
        epoch: Epoch,
        peer: Option<&WorkerKey>,
    ) -> bool {
        let joining = self.running() && self.ahead.as_ref().and_then(Ahead::deadline).is_some();
        if !joining || self.ahead.as_ref().is_none_or(|ahead| ahead.epoch != epoch) {
            return false;
        }
        // Whoever is none of the members is easily replaced.
        let blamed = peer.unwrap_or(key);
        let blamed = (!self.is_member(blamed)).then(|| blamed.clone());
        self.give_up_ahead(ctx, blamed);
        true
    }

    /// Nobody waits for what gets ready any more. `blamed`, who is no member, is started again.
    fn give_up_ahead(&mut self, ctx: &mut Ctx<'_>, blamed: Option<WorkerKey>) {
        self.stirred = true;
        match blamed {
            Some(blamed) => {
                self.ahead = None;
                self.notify_worker(ctx, &blamed, "did not join");
                self.fence(ctx, &blamed);
            }
            None => {
                self.vain_joins += 1;
                if self.vain_joins < TRIES {
                    self.ahead = None;
                } else if let Some(ahead) = &mut self.ahead {
                    ahead.progress = Progress::Refused;
                }
            }
        }
    }

    /// Its reports may be lost: what gets ready with it starts anew.
    pub(crate) fn forget_ahead_with(&mut self, worker: &WorkerKey) {
        if self.running() && self.ahead.as_ref().is_some_and(|ahead| ahead.involves(worker)) {
            self.ahead = None;
        }
    }

    /// Opens the records of what changes. Returns the reason in words.
    fn tell_change(&mut self, ctx: &mut Ctx<'_>) -> &'static str {
        let Some(Ahead { members, wish, .. }) = self.ahead.clone() else {
            return "";
        };
        if wish {
            self.plan_wish(ctx, "rebalance");
            return "a rebalance";
        }
        let now = self.members();
        let joining = members.values().filter(|worker| !now.contains(*worker));
        for worker in joining {
            self.plan_change(ctx, &worker.gpu, "gpu returned");
        }
        let then: BTreeSet<_> = members.into_values().collect();
        let mut leaves = false;
        for worker in now.difference(&then) {
            leaves = true;
            let signal = self.why_drained(ctx, &worker.gpu);
            self.plan_change(ctx, &worker.gpu, &signal);
        }
        if leaves { "a GPU is drained" } else { "a GPU returned" }
    }

    /// What was got ready, if everybody stopped as it was planned.
    pub(crate) fn take_ahead(&mut self, ctx: &Ctx<'_>) -> Option<(Planning, Arc<Plan>)> {
        let Ahead { epoch, members, held, progress, .. } = self.ahead.take()?;
        let Progress::Joining { plan, .. } = progress else {
            return None;
        };
        let found = self.held();
        let as_planned = |(worker, units): (&WorkerKey, &BTreeMap<Axis, Units>)| {
            found.holdings.get(worker).is_some_and(|holding| *holding.units == *units)
        };
        let fits = epoch == self.record.last_epoch
            && members == self.candidates(ctx.cluster)
            && held.iter().all(as_planned);
        let planning = Planning {
            epoch,
            members,
            holders: found.holdings.into_keys().collect(),
            resume_step: found.step,
            vote: found.vote,
            origin: None,
        };
        fits.then_some((planning, plan))
    }
}
