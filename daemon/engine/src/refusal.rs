//! What an operator may not do now, asked before the event is sent.

use crate::{JobName, Phase, State};
use reknit_layout::{GpuId, JobSpec, NodeName, Step};

/// Why a wish is refused, in words for the operator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("{0}")]
    AlreadyExists(String),
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    FailedPrecondition(String),
}

impl Refusal {
    pub fn no_job(job: &JobName) -> Self {
        Self::NotFound(format!("there is no job `{job}`: `reknit job list` names them all"))
    }

    pub fn no_gpu(gpu: &GpuId) -> Self {
        Self::NotFound(format!("no connected agent has a GPU `{gpu}`: `reknit node list` names them all"))
    }

    pub fn no_node(node: &NodeName) -> Self {
        Self::NotFound(format!("no agent was heard of a node `{node}`: `reknit node list` names them all"))
    }
}

impl State {
    pub fn refuse_submit(&self, spec: &JobSpec) -> Option<Refusal> {
        let job = self.jobs.get(&JobName(spec.name.clone()))?;
        let phase = job.record.phase;
        let name = &spec.name;
        (!phase.ended()).then(|| {
            Refusal::AlreadyExists(format!(
                "job `{name}` is there already ({phase:?}): stop it first, or choose another name"
            ))
        })
    }

    pub fn refuse_stop(&self, name: &JobName) -> Option<Refusal> {
        let Some(job) = self.jobs.get(name) else {
            return Some(Refusal::no_job(name));
        };
        let phase = job.record.phase;
        if phase.ended() {
            return Some(Refusal::FailedPrecondition(format!("job `{name}` has ended already")));
        }
        (phase == Phase::Draining)
            .then(|| Refusal::FailedPrecondition(format!("job `{name}` is being stopped already")))
    }

    pub fn refuse_rebalance(&self, name: &JobName) -> Option<Refusal> {
        let Some(job) = self.jobs.get(name) else {
            return Some(Refusal::no_job(name));
        };
        let phase = job.record.phase;
        (!job.may_change()).then(|| {
            Refusal::FailedPrecondition(format!(
                "job `{name}` is in a change or does not train ({phase:?}): try again when it is running"
            ))
        })
    }

    pub fn refuse_restore_job(&self, name: &JobName, step: Option<Step>) -> Option<Refusal> {
        match self.jobs.get(name) {
            Some(job) => job.why_not_restore(step),
            None => Some(Refusal::no_job(name)),
        }
    }

    pub fn refuse_drain(&self, gpu: &GpuId) -> Option<Refusal> {
        if self.cluster.gpu(gpu).is_none() {
            return Some(Refusal::no_gpu(gpu));
        }
        if self.cluster.drained.contains_key(gpu) {
            return Some(Refusal::FailedPrecondition(format!("GPU {gpu} is drained already")));
        }
        let job =
            self.jobs.values().find(|job| !job.record.phase.ended() && job.place_of_gpu(gpu).is_some())?;
        let layout = job.record.layout.as_ref()?;
        let others = layout
            .members()
            .filter(|(_, m)| m.worker.gpu != *gpu && self.cluster.may_train(&m.worker.gpu))
            .map(|(place, _)| place)
            .collect::<Vec<_>>();
        let name = &job.record.name;
        (!job.viable(others.iter())).then(|| {
            Refusal::FailedPrecondition(format!(
                "without GPU {gpu} no replica of job `{name}` has min_tensor active slots: stop the job, or \
                 bring other GPUs back first"
            ))
        })
    }

    pub fn refuse_restore(&self, gpu: &GpuId) -> Option<Refusal> {
        if self.cluster.drained.contains_key(gpu) {
            None
        } else if self.cluster.gpu(gpu).is_none() {
            Some(Refusal::no_gpu(gpu))
        } else {
            Some(Refusal::FailedPrecondition(format!("GPU {gpu} is not drained")))
        }
    }
}
