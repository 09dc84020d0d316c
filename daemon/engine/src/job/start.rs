//! From a job file to the first epoch.

use super::worker::Worker;
use super::{Job, Stage};
use crate::cluster::{Cluster, Hindrance};
use crate::state::Ctx;
use crate::{Command, Phase, Time, Timeouts};
use reknit_layout::{GpuId, NodeName, Place, WorkerKey};
use std::collections::BTreeMap;

/// Gives every nominal place a GPU: each group inside one domain, domains as described, then other nodes in name
/// order, GPUs by index.
///
/// # Errors
/// Says what is missing, for operators.
fn nominal_places(
    job: &Job,
    cluster: &Cluster,
    taken: &dyn Fn(&GpuId) -> bool,
) -> Result<BTreeMap<Place, GpuId>, String> {
    let parallel = &job.spec.parallel;
    let tensor = parallel.tensor as usize;
    let mut groups: Vec<Vec<GpuId>> = Vec::new();
    let mut free = 0;
    let mut others: BTreeMap<&str, u32> = BTreeMap::new();
    for domain in cluster.topology().domains() {
        let mut gpus: Vec<GpuId> = Vec::new();
        for gpu in domain.gpus() {
            match cluster.hindrance(gpu) {
                None if taken(gpu) => *others.entry("of other jobs").or_default() += 1,
                None => gpus.push(gpu.clone()),
                Some(Hindrance::Drained) => *others.entry("drained").or_default() += 1,
                Some(Hindrance::Unfit) => *others.entry("not healthy").or_default() += 1,
                Some(Hindrance::Away) => *others.entry("on nodes that are not heard").or_default() += 1,
            }
        }
        free += gpus.len();
        groups.extend(gpus.chunks_exact(tensor.max(1)).map(<[GpuId]>::to_vec));
    }
    let needed = (parallel.data * parallel.pipeline) as usize;
    if groups.len() < needed {
        let found = groups.len();
        let others: String = others.iter().map(|(why, count)| format!(", {count} {why}")).collect();
        return Err(format!(
            "needs {needed} groups of {tensor} healthy GPUs, each inside one domain; the connected agents offer \
             {found} ({free} free healthy GPUs{others}): start more agents, let GPUs in again, or wait for some to become free"
        ));
    }
    let names =
        (0..parallel.data).flat_map(|replica| (0..parallel.pipeline).map(move |stage| (replica, stage)));
    let mut places = BTreeMap::new();
    for ((replica, stage), group) in names.zip(groups) {
        for (slot, gpu) in (0u32..).zip(group) {
            places.insert(Place::new(replica, stage, slot), gpu);
        }
    }
    Ok(places)
}

impl Job {
    pub(crate) fn assign_places(&mut self, ctx: &mut Ctx<'_>, taken: &dyn Fn(&GpuId) -> bool) -> bool {
        match nominal_places(self, ctx.cluster, taken) {
            Ok(places) => {
                self.workers.seat(&places);
                self.record.places = places;
                self.enter_starting(ctx);
                true
            }
            Err(missing) => {
                self.set_phase(ctx, Phase::Pending, &missing);
                false
            }
        }
    }

    /// The workers are started by [`Job::start_missing`], which also stores the record.
    pub(crate) fn enter_starting(&mut self, ctx: &mut Ctx<'_>) {
        self.stage = Stage::Starting { deadline: Some(ctx.now.after(ctx.timeouts.start())) };
        self.set_phase(ctx, Phase::Starting, "");
    }

    /// Starts when everyone is there, or after the deadline with those who are. Where those are too few, it waits for those
    /// that still open their data.
    pub(crate) fn try_start(&mut self, ctx: &mut Ctx<'_>, deadline: Option<Time>) -> bool {
        let late = deadline.is_none_or(|deadline| ctx.now >= deadline);
        if !late && self.workers.preparable().len() < self.record.places.len() {
            return false;
        }
        let candidates = self.candidates(ctx.cluster);
        let all = candidates.len() == self.record.places.len();
        if all || (late && self.viable(candidates.keys())) {
            self.plan(ctx);
            return true;
        }
        if late {
            let (found, places) = (candidates.len(), self.record.places.len());
            let opening =
                self.workers.iter().filter(|(_, worker)| worker.alive() && worker.opening()).count();
            let last = self.losses.values().max_by_key(|loss| loss.at);
            let why = last
                .map(|loss| format!("; the last that ended: {}", loss.sighting.signal))
                .unwrap_or_default();
            let (deadline, explanation) = if opening == 0 {
                let text = "workers came up, too few to train: see the agents' and workers' logs";
                (None, format!("{found} of {places} {text}{why}"))
            } else {
                let text = "workers still open their data, as making tokens of text takes its time: their logs say how far they are";
                (Some(ctx.now.after(ctx.timeouts.start())), format!("{opening} of {places} {text}{why}"))
            };
            self.stage = Stage::Starting { deadline };
            self.set_phase(ctx, Phase::Starting, &explanation);
        }
        false
    }

    /// Starts a worker for every place that has none and may, once its hold is over.
    pub(crate) fn start_missing(&mut self, ctx: &mut Ctx<'_>) {
        let due: Vec<_> = self
            .startable(ctx.cluster, ctx.timeouts)
            .into_iter()
            .filter(|(_, _, at)| *at <= ctx.now)
            .map(|(gpu, node, _)| (gpu, node))
            .collect();
        if due.is_empty() {
            return;
        }
        let first = self.record.last_incarnation.0 + 1;
        self.record.last_incarnation.0 += due.len() as u64;
        self.persist(ctx);
        for (incarnation, (gpu, node)) in (first..).zip(due) {
            let key = WorkerKey { gpu, incarnation: reknit_layout::Incarnation(incarnation) };
            let mut started = Worker::new(node.clone(), ctx.now);
            started.joined_by = Some(ctx.now.after(ctx.timeouts.start()));
            let (job, worker, epoch) = (self.record.name.clone(), key.clone(), self.record.last_epoch);
            ctx.out.push(Command::Spawn { node, job, worker, epoch });
            self.workers.insert(key, started);
        }
    }

    pub(crate) fn next_start(&self, cluster: &Cluster, timeouts: &Timeouts) -> Option<Time> {
        let startable = self.startable(cluster, timeouts);
        startable.into_iter().map(|(_, _, at)| at).min()
    }

    /// GPUs of places without a worker where one may be started, and when.
    fn startable(&self, cluster: &Cluster, timeouts: &Timeouts) -> Vec<(GpuId, NodeName, Time)> {
        if !self.takes_newcomers() {
            return Vec::new();
        }
        let vacant = self.workers.vacant();
        vacant
            .filter_map(|(_, gpu)| {
                let (node, fit_since) = cluster.may_start(gpu)?;
                let at = match self.losses.get(gpu) {
                    Some(loss) => loss.at.max(fit_since).after(timeouts.rejoin_hold_after(loss.relapses)),
                    None => fit_since,
                };
                Some((gpu.clone(), node.clone(), at))
            })
            .collect()
    }
}
