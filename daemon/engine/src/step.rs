//! The one transition function.

use crate::cluster::Cluster;
use crate::job::Job;
use crate::job::commit::CommittedStep;
use crate::job::workers::Workers;
use crate::state::{Ctx, State};
use crate::{
    Command, DrainedBy, Event, GpuReport, Incident, JobName, JobRecord, NodeLink, Phase, Time, Timeouts,
};
use reknit_layout::{Epoch, GpuId, JobSpec, NodeName, WorkerKey};
use std::collections::{BTreeMap, BTreeSet};

/// Takes in one event, seen at `now`, and returns what is to be done, in order.
///
/// Events of one session must come in the order they were sent, and all of an ended session before the
/// `Disconnected` that ends it. Events about unknown jobs and workers are answered by ending those workers.
pub fn step(state: &mut State, now: Time, event: Event) -> Vec<Command> {
    let mut engine = Engine {
        now,
        timeouts: &state.timeouts,
        cluster: &mut state.cluster,
        jobs: &mut state.jobs,
        out: Vec::new(),
        later: Vec::new(),
    };
    engine.stir(Stir::by(&event));
    engine.take_in(event);
    engine.announce_silence();
    engine.expire_leases();
    engine.forget_nodes();
    engine.advance();
    let mut commands = engine.out;
    commands.extend(engine.later);
    commands
}

/// What an event may change besides the worker that it is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stir {
    /// Only that somebody makes progress.
    Nothing,
    /// Who can take part in a layout.
    Workers,
    /// What may be started where.
    Cluster,
}

impl Stir {
    fn by(event: &Event) -> Self {
        match event {
            Event::Committed { .. }
            | Event::Progress { .. }
            | Event::Alive { .. }
            | Event::Checkpoints { .. } => Self::Nothing,
            Event::WorkerSpawned { .. }
            | Event::WorkerExited { .. }
            | Event::WorkerConnected { .. }
            | Event::WorkerDisconnected { .. }
            | Event::PlaneFailed { .. }
            | Event::Quiesced { .. }
            | Event::Joined { .. }
            | Event::Ready { .. }
            | Event::PrepareFailed { .. }
            | Event::NoCheckpoint { .. }
            | Event::Completed { .. } => Self::Workers,
            Event::Started { .. }
            | Event::AgentConnected { .. }
            | Event::AgentDisconnected { .. }
            | Event::GpusListed { .. }
            | Event::HealthChanged { .. }
            | Event::Planned { .. }
            | Event::Submit { .. }
            | Event::StopJob { .. }
            | Event::Rebalance { .. }
            | Event::RestoreJob { .. }
            | Event::DrainGpu { .. }
            | Event::RestoreGpu { .. }
            | Event::Tick => Self::Cluster,
        }
    }
}

struct Engine<'a> {
    now: Time,
    timeouts: &'a Timeouts,
    cluster: &'a mut Cluster,
    jobs: &'a mut BTreeMap<JobName, Job>,
    out: Vec<Command>,
    later: Vec<Command>,
}

impl Engine<'_> {
    /// Runs `act` on the job, if there is one of that name.
    fn on<R>(&mut self, name: &JobName, act: impl FnOnce(&mut Job, &mut Ctx<'_>) -> R) -> Option<R> {
        let (mut ctx, jobs) = self.split();
        let result = jobs.get_mut(name).map(|job| act(job, &mut ctx));
        (self.out, self.later) = (ctx.out, ctx.later);
        result
    }

    /// What a job acts with, and the jobs. What it orders goes back to [`Engine::out`] and [`Engine::later`].
    fn split(&mut self) -> (Ctx<'_>, &mut BTreeMap<JobName, Job>) {
        let ctx = Ctx {
            now: self.now,
            timeouts: self.timeouts,
            cluster: self.cluster,
            out: std::mem::take(&mut self.out),
            later: std::mem::take(&mut self.later),
        };
        (ctx, self.jobs)
    }

    fn on_each(&mut self, mut act: impl FnMut(&mut Job, &mut Ctx<'_>)) {
        let (mut ctx, jobs) = self.split();
        jobs.values_mut().for_each(|job| act(job, &mut ctx));
        (self.out, self.later) = (ctx.out, ctx.later);
    }

    fn stir(&mut self, stir: Stir) {
        for job in self.jobs.values_mut() {
            job.stirred |= stir >= Stir::Workers;
            job.spares_due |= stir >= Stir::Cluster;
        }
    }

    fn take_in(&mut self, event: Event) {
        match event {
            Event::Started { jobs, incidents } => self.started(jobs, incidents),
            Event::AgentConnected { node, gpus, workers } => self.agent_connected(&node, &gpus, workers),
            Event::AgentDisconnected { node } => {
                self.cluster.agent_disconnected(self.now, &node, self.timeouts);
            }
            Event::GpusListed { node, gpus } => {
                self.cluster.gpus_listed(self.now, &node, &gpus);
                self.drop_lost(&node, &gpus);
            }
            Event::HealthChanged { node, gpu, health, cause, action, shards_readable } => {
                let known = self.cluster.health_changed(self.now, &node, &gpu, health, &cause, &action);
                // Any other class is acted on by looking at the cluster: a drain or a return is a planned change.
                if known && health.is_loss(shards_readable) {
                    self.on_each(|job, ctx| job.gpu_lost(ctx, &node, &gpu, &cause));
                }
            }
            Event::WorkerSpawned { node: _, job, worker, pid } => {
                self.on(&job, |job, ctx| job.worker_spawned(ctx, &worker, pid));
            }
            Event::WorkerExited { node, job, worker, exit } => {
                self.on(&job, |job, ctx| job.exited(ctx, &node, &worker, exit));
            }
            Event::WorkerConnected { job, worker, node, endpoint, pid, state } => {
                let known =
                    self.on(&job, |job, ctx| job.connected(ctx, &worker, &node, endpoint, pid, state));
                if known != Some(true) {
                    self.end_zombie(node, job, worker);
                }
            }
            Event::WorkerDisconnected { job, worker } => {
                self.on(&job, |job, ctx| job.disconnected(ctx, &worker));
            }
            Event::PlaneFailed { job, worker, epoch, peer, reason } => {
                self.on(&job, |job, ctx| {
                    job.plane_failed(ctx, &worker, epoch, peer.as_ref(), &reason);
                });
            }
            Event::Quiesced { job, worker, state } => {
                self.on(&job, |job, ctx| job.quiesced(ctx, &worker, state));
            }
            Event::Joined { job, worker, epoch } => {
                self.on(&job, |job, _| job.joined(&worker, epoch));
            }
            Event::Ready { job, worker, epoch, step, replicated_digest } => {
                self.on(&job, |job, _| {
                    job.ready(&worker, epoch, step, replicated_digest);
                });
            }
            Event::PrepareFailed { job, worker, epoch, peer, reason } => {
                self.on(&job, |job, ctx| {
                    job.prepare_failed(ctx, &worker, epoch, peer.as_ref(), &reason);
                });
            }
            Event::Committed {
                job,
                worker,
                epoch,
                step,
                vote,
                first_sample,
                samples,
                step_ms,
                tokens,
                rolled_forward,
            } => {
                let report = CommittedStep {
                    epoch,
                    step,
                    vote,
                    first_sample,
                    samples,
                    step_ms,
                    tokens,
                    rolled_forward,
                };
                self.on(&job, |job, ctx| job.step_committed(ctx, &worker, report));
            }
            Event::Progress { job, worker, epoch, step, ticks, activity } => {
                let drain =
                    self.on(&job, |job, ctx| job.progress(ctx, &worker, (epoch, step), ticks, activity));
                // By the path of an operator's wish, and an operator undoes it.
                if let Some(gpu) = drain.flatten() {
                    self.stir(Stir::Cluster);
                    self.cluster.drained.insert(gpu, DrainedBy::Policy);
                    self.store_drained();
                }
            }
            Event::Alive { job, worker } => {
                self.on(&job, |job, ctx| job.said_something(ctx, &worker));
            }
            Event::Completed { job, worker, epoch, step, replicated_digest } => {
                self.on(&job, |job, _| {
                    job.completed(&worker, epoch, step, replicated_digest);
                });
            }
            Event::Checkpoints { job, worker, ids, written } => {
                self.on(&job, |job, ctx| job.checkpoints_found(ctx, &worker, ids, written));
            }
            Event::NoCheckpoint { job, worker, step, reason } => {
                self.on(&job, |job, ctx| job.no_checkpoint(ctx, &worker, step, &reason));
            }
            Event::Planned { job, epoch, result } => {
                self.on(&job, |job, ctx| job.on_planned(ctx, epoch, result));
            }
            Event::Submit { spec } => self.submit(*spec),
            Event::StopJob { job } => {
                self.on(&job, |job, ctx| job.stop(ctx));
            }
            Event::Rebalance { job } => {
                self.on(&job, |job, ctx| job.rebalance(ctx));
            }
            Event::RestoreJob { job, step } => {
                self.on(&job, |job, ctx| job.restore(ctx, step));
            }
            Event::DrainGpu { gpu } => {
                self.cluster.drained.insert(gpu, DrainedBy::Operator);
                self.store_drained();
            }
            Event::RestoreGpu { gpu } => {
                self.cluster.drained.remove(&gpu);
                self.store_drained();
            }
            Event::Tick => {}
        }
    }

    fn started(&mut self, jobs: Vec<JobRecord>, incidents: Vec<Incident>) {
        for record in jobs {
            self.cluster.drained.extend(record.drained.clone());
            let name = record.name.clone();
            let own = incidents.iter().filter(|incident| incident.job == name);
            let job = Job::restored(record, own.cloned().collect(), self.now, self.timeouts);
            self.jobs.insert(name, job);
        }
    }

    fn agent_connected(
        &mut self,
        node: &NodeName,
        gpus: &[GpuReport],
        workers: Vec<(JobName, WorkerKey, u32)>,
    ) {
        let now = self.now;
        self.announce_return(node);
        self.cluster.agent_connected(now, node, gpus);
        self.cluster.strangers.remove(node);
        self.on_each(|job, ctx| job.agent_listed(ctx, node, &workers));
        for (name, key, pid) in workers {
            let known = self.on(&name, |job, _| {
                let plausible = job.plausible(&key);
                if let Some(mut worker) = job.workers.get_mut(&key) {
                    worker.pid = pid;
                    return true;
                }
                if plausible {
                    job.adopt(now, node, &key, pid);
                }
                plausible
            });
            if self.jobs.is_empty() {
                self.cluster.strangers.entry(node.clone()).or_default().insert((name, key));
            } else if known != Some(true) {
                let (node, epoch) = (node.clone(), self.last_epoch(&name));
                self.out.push(Command::Fence { node, job: name, worker: key, epoch });
            }
        }
        self.announce_strangers(node);
        // Last, when every worker on them is known.
        self.drop_lost(node, gpus);
    }

    fn drop_lost(&mut self, node: &NodeName, gpus: &[GpuReport]) {
        for report in gpus.iter().filter(|report| report.health.is_loss(report.shards_readable)) {
            self.on_each(|job, ctx| job.gpu_lost(ctx, node, &report.gpu, &report.cause));
        }
    }

    fn announce(&mut self, text: String) {
        self.later.push(Command::Announce(text));
    }

    /// Of an agent that was missed.
    fn announce_return(&mut self, node: &NodeName) {
        let missed = self.cluster.node(node).filter(|node| node.missed);
        let away = match missed.map(|node| node.link) {
            Some(NodeLink::Silent { since, .. } | NodeLink::Gone { since, .. }) => since,
            Some(NodeLink::Connected { .. }) | None => return,
        };
        let ms = self.now.0.saturating_sub(away.0) / 1_000;
        self.announce(format!("node {node} is back after {ms} ms"));
    }

    /// A store that knows no job at all is more likely the wrong one than its cluster's workers are superfluous.
    fn announce_strangers(&mut self, node: &NodeName) {
        let Some(here) = self.cluster.strangers.get(node) else {
            return;
        };
        let jobs: BTreeSet<_> = here.iter().map(|(job, _)| job.to_string()).collect();
        let (count, jobs) = (here.len(), Vec::from_iter(jobs).join(", "));
        self.announce(format!(
            "node {node} runs {count} workers of {jobs}, and this daemon's store knows no job: they are left alone. Start \
             reknitd with the store that knows them; the first job that is submitted here ends them"
        ));
    }

    /// A worker that belongs to nothing: told to leave, and killed.
    fn end_zombie(&mut self, node: NodeName, job: JobName, worker: WorkerKey) {
        let epoch = self.last_epoch(&job);
        self.out.push(Command::Stop {
            job: job.clone(),
            worker: worker.clone(),
            epoch,
            reason: "the daemon does not know this worker".to_owned(),
        });
        self.out.push(Command::Fence { node, job, worker, epoch });
    }

    /// 0 when there is no such job.
    fn last_epoch(&self, job: &JobName) -> Epoch {
        self.jobs.get(job).map_or(Epoch(0), |job| job.record.last_epoch)
    }

    fn submit(&mut self, spec: JobSpec) {
        let mut record = JobRecord::new(spec);
        record.drained = self.cluster.drained.clone();
        let name = record.name.clone();
        let mut workers = Workers::default();
        let mut ended = Vec::new();
        if let Some(old) = self.jobs.get(&name) {
            if !old.record.phase.ended() {
                return;
            }
            // Nothing of the old run can be mistaken for the new one's.
            record.last_epoch = old.record.last_epoch;
            record.last_incarnation = old.record.last_incarnation;
            record.earlier_incarnations = old.record.last_incarnation;
            record.last_incident = old.record.last_incident;
            record.earlier_incidents = old.record.last_incident;
            workers.clone_from(&old.workers);
            ended.clone_from(&old.incidents.ended);
        }
        let mut job = Job::new(record);
        job.workers = workers;
        job.workers.seat(&job.record.places);
        job.incidents.ended = ended;
        job.record.phase = Phase::Pending;
        self.out.push(Command::Persist(Box::new(job.record.clone())));
        self.jobs.insert(name, job);
        for (node, workers) in std::mem::take(&mut self.cluster.strangers) {
            let fence = |(job, worker)| Command::Fence { node: node.clone(), job, worker, epoch: Epoch(0) };
            self.out.extend(workers.into_iter().map(fence));
        }
    }

    fn store_drained(&mut self) {
        let drained = self.cluster.drained.clone();
        self.on_each(|job, ctx| {
            if job.record.drained != drained {
                job.record.drained.clone_from(&drained);
                job.persist(ctx);
            }
        });
    }

    /// Of agents that have been away for long enough.
    fn announce_silence(&mut self) {
        for (node, lease) in self.cluster.take_silent(self.now, self.timeouts) {
            let left = lease.0.saturating_sub(self.now.0) / 1_000;
            self.announce(format!(
                "node {node} is silent; its workers go on, and those that do not speak for themselves are lost in \
                 {left} ms"
            ));
        }
    }

    fn expire_leases(&mut self) {
        for node in self.cluster.take_expired(self.now, self.timeouts) {
            self.stir(Stir::Cluster);
            self.announce(format!("node {node} is gone: nothing was heard of it for its lease"));
            self.on_each(|job, ctx| job.node_lost(ctx, &node));
        }
    }

    /// Those that have been gone for long and that no job has a worker or a place on: names that come and go must not fill
    /// the memory.
    fn forget_nodes(&mut self) {
        for name in self.cluster.take_forgettable(self.now) {
            let Some(node) = self.cluster.node(&name) else { continue };
            let needs = |job: &Job| {
                job.workers.on_node(&name).next().is_some() || node.gpus.keys().any(|gpu| job.has_gpu(gpu))
            };
            if self.jobs.values().any(needs) {
                self.cluster.set_gone(self.now, &name, self.timeouts);
            } else {
                self.cluster.forget(self.now, &name);
                self.later.push(Command::Forget { node: name });
            }
        }
    }

    fn advance(&mut self) {
        let (mut ctx, jobs) = self.split();
        let mut jobs: Vec<&mut Job> = jobs.values_mut().collect();
        for index in 0..jobs.len() {
            // Each asks the others which GPUs they have.
            let (before, rest) = jobs.split_at_mut(index);
            let Some((job, after)) = rest.split_first_mut() else { break };
            let taken = |gpu: &GpuId| before.iter().chain(&*after).any(|other| other.has_gpu(gpu));
            job.advance(&mut ctx, &taken);
        }
        (self.out, self.later) = (ctx.out, ctx.later);
    }
}
