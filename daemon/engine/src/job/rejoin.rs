//! Planned changes of a running job: GPUs that come back, GPUs that leave.

use super::Job;
use crate::DrainedBy;
use crate::state::Ctx;
use reknit_layout::{GpuId, Place, WorkerKey};
use std::collections::BTreeMap;

impl Job {
    /// Everything a running job looks at.
    pub(crate) fn watch(&mut self, ctx: &mut Ctx<'_>) -> bool {
        self.try_complete(ctx) || self.check_progress(ctx) || self.try_change(ctx)
    }

    /// Whether it trains undisturbed. One change at a time: the next waits for the first step after the one before, so
    /// that each has its own record.
    pub(crate) fn may_change(&self) -> bool {
        let finishing = self.workers.completed() > 0;
        self.running() && !finishing && self.incidents.open.is_empty()
    }

    /// A new layout of the same members: for shares that no longer fit after many changes.
    pub(crate) fn rebalance(&mut self, ctx: &mut Ctx<'_>) {
        if self.may_change() {
            self.plan_wish(ctx, "rebalance");
            self.pause(ctx, "a rebalance");
        }
    }

    /// Pauses the members when somebody can join or must leave.
    fn try_change(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if !self.stirred || !self.may_change() {
            return false;
        }
        let mut then = self.candidates(ctx.cluster);
        if then.is_empty() && !ctx.cluster.unfit().any(|gpu| self.is_member_on(gpu)) {
            return false;
        }
        let now: BTreeMap<Place, WorkerKey> = self
            .record
            .layout
            .iter()
            .flat_map(|layout| layout.members())
            .map(|(place, member)| (place, member.worker.clone()))
            .collect();
        for (place, worker) in &now {
            if ctx.cluster.may_train(&worker.gpu) {
                then.insert(*place, worker.clone());
            }
        }
        // A drain that would stop the job waits until it would not.
        let Ok(training) = self.spec.training(then.keys().copied()) else {
            return false;
        };
        // A replica that is still too small gets no place: its workers wait until there are enough of them.
        let joining: Vec<GpuId> = then
            .iter()
            .filter(|(place, _)| !now.contains_key(place) && training.contains(&place.replica))
            .map(|(_, worker)| worker.gpu.clone())
            .collect();
        let leaving: Vec<GpuId> = now
            .iter()
            .filter(|(place, _)| !then.contains_key(place))
            .map(|(_, worker)| worker.gpu.clone())
            .collect();
        if joining.is_empty() && leaving.is_empty() {
            return false;
        }
        for gpu in &joining {
            self.plan_change(ctx, gpu, "gpu returned");
        }
        for gpu in &leaving {
            let cause = ctx.cluster.gpu(gpu).map(|(_, _, gpu)| gpu.cause.as_str());
            let signal = match (ctx.cluster.drained.get(gpu), cause) {
                (Some(DrainedBy::Policy), _) => "drain by policy: it is a straggler".to_owned(),
                (Some(DrainedBy::Operator), _) | (None, None) => "drain".to_owned(),
                (None, Some(cause)) => format!("drain: {cause}"),
            };
            self.plan_change(ctx, gpu, &signal);
        }
        let reason = if leaving.is_empty() { "a GPU returned" } else { "a GPU is drained" };
        self.pause(ctx, reason);
        true
    }
}
