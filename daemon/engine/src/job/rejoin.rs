//! Planned changes of a running job: GPUs that come back, GPUs that leave.

use super::Job;
use crate::DrainedBy;
use crate::state::Ctx;
use reknit_layout::{GpuId, Place, WorkerKey};
use std::collections::BTreeMap;

impl Job {
    /// Everything a running job looks at.
    pub(crate) fn watch(&mut self, ctx: &mut Ctx<'_>) -> bool {
        self.try_complete(ctx) || self.check_progress(ctx) || self.follow_up(ctx) || self.try_change(ctx)
    }

    /// Whether it trains, and no change of its layout is under way. The first step after a change need not be over: the next
    /// one gets ready during it, and a pause ends no step.
    pub(crate) fn may_change(&self) -> bool {
        let finishing = self.workers.completed() > 0;
        self.running() && !finishing && !self.gets_ahead()
    }

    /// A new layout of the same members: for shares that no longer fit after many changes.
    pub(crate) fn rebalance(&mut self, ctx: &mut Ctx<'_>) {
        if self.may_change() {
            let members = self.members_that_stay(ctx);
            self.get_ahead(ctx, members, true);
        }
    }

    /// The members whose GPUs may train.
    fn members_that_stay(&self, ctx: &Ctx<'_>) -> BTreeMap<Place, WorkerKey> {
        let layout = self.record.layout.iter();
        let members = layout.flat_map(|layout| layout.members());
        members
            .filter(|(_, member)| ctx.cluster.may_train(&member.worker.gpu))
            .map(|(place, member)| (place, member.worker.clone()))
            .collect()
    }

    /// Gets a change ready when somebody can join or must leave.
    fn try_change(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if !self.stirred || !self.may_change() {
            return false;
        }
        let mut then = self.candidates(ctx.cluster);
        if then.is_empty() && !ctx.cluster.unfit().any(|gpu| self.is_member_on(gpu)) {
            return false;
        }
        then.extend(self.members_that_stay(ctx));
        // A drain that would stop the job waits until it would not.
        let Ok(training) = self.spec.training(then.keys().copied()) else {
            return false;
        };
        // A replica that is still too small gets no place: its workers wait until there are enough of them.
        let now = self.members();
        let joins = |(place, worker): (&Place, &WorkerKey)| {
            !now.contains(worker) && training.contains(&place.replica)
        };
        let stay = then.values().filter(|worker| now.contains(*worker)).count();
        let same = !then.iter().any(joins) && stay == now.len();
        // Nobody is told to join before everyone can be.
        let heard = |worker: &WorkerKey| self.workers.get(worker).is_some_and(|worker| worker.session);
        if same || self.is_refused(&then) || !now.iter().all(heard) {
            return false;
        }
        self.get_ahead(ctx, then, false);
        true
    }

    /// Why a member must leave its GPU.
    pub(crate) fn why_drained(&self, ctx: &Ctx<'_>, gpu: &GpuId) -> String {
        let cause = ctx.cluster.gpu(gpu).map(|(_, _, gpu)| gpu.cause.as_str());
        match (ctx.cluster.drained.get(gpu), cause) {
            (Some(DrainedBy::Policy), _) => "drain by policy: it is a straggler".to_owned(),
            (Some(DrainedBy::Operator), _) | (None, None) => "drain".to_owned(),
            (None, Some(cause)) => format!("drain: {cause}"),
        }
    }
}
