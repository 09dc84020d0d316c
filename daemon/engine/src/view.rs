//! What operators see.

use crate::job::Job;
use crate::{DrainedBy, HealthClass, Incident, JobName, JobRecord, Phase, State, Time};
use reknit_layout::{CheckpointId, Epoch, GpuId, Layout, NodeName, Place, Step, WorkerKey};
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq)]
pub struct JobView {
    pub name: JobName,
    pub phase: Phase,
    pub explanation: String,
    /// What is told of workers and steps is so now. False in stand-by and before everyone was heard: only what was stored is
    /// known, of a job that has ended where it stood then.
    pub live: bool,
    /// Incidents up to this one are of earlier runs under the same name.
    pub earlier_incidents: u64,
    /// Of the committed layout; 0 before the first.
    pub epoch: Epoch,
    pub committed_step: Step,
    pub layout: Option<Arc<Layout>>,
    pub last_loss: Option<f64>,
    pub workers: Vec<WorkerView>,
    /// Complete ones, the last written first, as its workers found them.
    pub checkpoints: Vec<CheckpointId>,
}

impl JobView {
    /// What the store tells of a job. Only the daemon that leads knows its workers and the steps since the layout.
    pub fn stored(record: JobRecord) -> Self {
        Self {
            phase: record.phase,
            explanation: record.explanation,
            live: false,
            earlier_incidents: record.earlier_incidents,
            epoch: record.layout.as_ref().map_or(Epoch(0), |layout| layout.epoch),
            committed_step: record.committed_step,
            layout: record.layout,
            last_loss: record.last_loss,
            workers: Vec::new(),
            checkpoints: Vec::new(),
            name: record.name,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerView {
    pub worker: WorkerKey,
    pub place: Option<Place>,
    pub node: NodeName,
    /// 0 until its agent said.
    pub pid: u32,
    pub state: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeView {
    pub name: NodeName,
    pub link: NodeLink,
    pub gpus: Vec<GpuView>,
}

/// Whether a node's agent is heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeLink {
    Connected {
        since: Time,
    },
    /// Not heard, and its lease still runs: nothing is lost for that alone.
    Silent {
        since: Time,
        lease: Time,
    },
    /// Not heard for its whole lease: its workers without a session are lost. It is forgotten then, if no job needs it.
    Gone {
        since: Time,
        forget: Time,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuView {
    pub gpu: GpuId,
    pub index: u32,
    pub name: String,
    pub health: HealthClass,
    pub cause: String,
    /// When health or cause changed.
    pub changed: Time,
    pub drained: Option<DrainedBy>,
}

impl State {
    pub fn jobs(&self) -> Vec<JobView> {
        self.jobs.values().map(job_view).collect()
    }

    pub fn job(&self, name: &JobName) -> Option<JobView> {
        self.jobs.get(name).map(job_view)
    }

    /// Whether the worker is one of the job's that may be alive.
    pub fn has_worker(&self, job: &JobName, worker: &WorkerKey) -> bool {
        self.jobs.get(job).is_some_and(|job| job.workers.get(worker).is_some())
    }

    /// In name order, GPUs by index.
    pub fn nodes(&self) -> Vec<NodeView> {
        let nodes = self.cluster.nodes();
        nodes
            .map(|(name, node)| {
                let gpus = node.gpus.iter().map(|(gpu, found)| GpuView {
                    gpu: gpu.clone(),
                    index: found.index,
                    name: found.name.clone(),
                    health: found.health,
                    cause: found.cause.clone(),
                    changed: found.changed,
                    drained: self.cluster.drained.get(gpu).copied(),
                });
                let mut gpus: Vec<_> = gpus.collect();
                gpus.sort_by_key(|gpu| gpu.index);
                NodeView { name: name.clone(), link: node.link, gpus }
            })
            .collect()
    }

    /// The node of a GPU that some agent has named.
    pub fn node_of(&self, gpu: &GpuId) -> Option<NodeName> {
        self.cluster.gpu(gpu).map(|(node, _, _)| node.clone())
    }

    /// The GPU's number on its node.
    pub fn index_of(&self, node: &NodeName, gpu: &GpuId) -> Option<u32> {
        Some(self.cluster.node(node)?.gpus.get(gpu)?.index)
    }

    /// A worker may be started on the GPU: nothing is wrong with it, and no operator has taken it out.
    pub fn may_start(&self, gpu: &GpuId) -> bool {
        self.cluster.may_start(gpu).is_some()
    }

    /// Workers that may be alive on the node: "worker 0.1.2 of job demo".
    pub fn workers_on(&self, node: &NodeName) -> Vec<String> {
        let jobs = self.jobs.iter();
        let here =
            jobs.flat_map(|(name, job)| job.workers.on_node(node).map(move |(key, _)| (name, job, key)));
        let named = here.map(|(name, job, key)| format!("{} of job {name}", job.name_of(key)));
        let mut named: Vec<_> = named.collect();
        named.sort();
        named
    }

    /// Oldest first; those of a recovery under way come last.
    pub fn incidents(&self, name: &JobName) -> Vec<Incident> {
        self.jobs.get(name).map(|job| job.incidents.all()).unwrap_or_default()
    }
}

fn job_view(job: &Job) -> JobView {
    let workers = job.workers.iter().map(|(key, worker)| WorkerView {
        worker: key.clone(),
        place: job.place_of_gpu(&key.gpu),
        node: worker.node.clone(),
        pid: worker.pid,
        state: worker.describe().to_owned(),
    });
    let mut workers: Vec<_> = workers.collect();
    workers.sort_by(|a, b| (a.place, &a.worker).cmp(&(b.place, &b.worker)));
    JobView {
        name: job.record.name.clone(),
        phase: job.record.phase,
        explanation: job.record.explanation.clone(),
        live: job.record.phase != Phase::Rebuilding,
        earlier_incidents: job.record.earlier_incidents,
        epoch: job.epoch(),
        committed_step: job.committed.max(job.record.committed_step),
        layout: job.record.layout.clone(),
        last_loss: job.vote.map(|vote| vote.loss).or(job.record.last_loss),
        workers,
        checkpoints: job.checkpoints.known.clone(),
    }
}
