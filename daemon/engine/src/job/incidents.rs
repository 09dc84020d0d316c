//! Who is to blame: one incident per fault, refined as more is learned (ATTRIBUTED).

use super::Job;
use crate::incident::KEPT;
use crate::state::Ctx;
use crate::{Command, DrainedBy, Incident, IncidentKind, Notice, Time};
use reknit_layout::{Epoch, GpuId, NodeName, WorkerKey};

#[derive(Debug, Clone, Default)]
pub(crate) struct Incidents {
    pub(crate) open: Vec<Open>,
    pub(crate) ended: Vec<Incident>,
}

#[derive(Debug, Clone)]
pub(crate) struct Open {
    pub(crate) incident: Incident,
    /// `None` while it is a suspicion that condemns nobody.
    pub(crate) worker: Option<WorkerKey>,
}

/// One report of a fault.
#[derive(Debug, Clone)]
pub(crate) struct Sighting {
    pub(crate) kind: IncidentKind,
    pub(crate) signal: String,
    pub(crate) reporter: String,
}

/// What says more about the cause. The kill that a fence is does not hide why it was fenced.
fn weight(kind: IncidentKind) -> u32 {
    match kind {
        IncidentKind::Planned | IncidentKind::PlaneFailed | IncidentKind::Slow => 0,
        IncidentKind::WorkerExited => 1,
        IncidentKind::WorkerKilled => 2,
        IncidentKind::Frozen => 3,
        IncidentKind::NodeLost => 4,
        IncidentKind::GpuLost => 5,
    }
}

/// Where the fault is a GPU's health its agent, which knows the sign, knows best.
fn advice(ctx: &Ctx<'_>, kind: IncidentKind, gpu: Option<&GpuId>) -> String {
    let suggested = gpu.and_then(|gpu| ctx.cluster.suggestion(gpu)).filter(|_| match kind {
        IncidentKind::GpuLost | IncidentKind::Planned => true,
        IncidentKind::WorkerKilled
        | IncidentKind::WorkerExited
        | IncidentKind::PlaneFailed
        | IncidentKind::Frozen
        | IncidentKind::Slow
        | IncidentKind::NodeLost => false,
    });
    let straggler = gpu.is_some_and(|gpu| ctx.cluster.drained.get(gpu) == Some(&DrainedBy::Policy));
    let kind = if straggler && kind == IncidentKind::Planned { IncidentKind::Slow } else { kind };
    suggested.unwrap_or_else(|| general_advice(kind)).to_owned()
}

fn general_advice(kind: IncidentKind) -> &'static str {
    match kind {
        IncidentKind::WorkerKilled => {
            "Nothing to do: the worker is started again. If it was the kernel's out-of-memory killer, give the node more memory."
        }
        IncidentKind::WorkerExited => "Read the worker's log on its node; it is started again by itself.",
        IncidentKind::GpuLost => {
            "Reset or replace the GPU; it rejoins by itself once its driver reports it healthy."
        }
        IncidentKind::PlaneFailed => "Check the links between the nodes named here if it happens again.",
        IncidentKind::Frozen => "Look for a stuck process or driver on the node.",
        IncidentKind::Slow => {
            "Look for what slows the GPU: its clocks, its temperature, another process on the node. `reknit gpu drain` takes it out where policy has not, `reknit gpu restore` back."
        }
        IncidentKind::NodeLost => "Check the node and its network; its GPUs rejoin by themselves.",
        IncidentKind::Planned => "Nothing to do.",
    }
}

impl Incidents {
    pub(crate) fn all(&self) -> Vec<Incident> {
        let open = self.open.iter().map(|open| &open.incident);
        self.ended.iter().chain(open).cloned().collect()
    }

    /// Those that the recovery under way shall end.
    pub(crate) fn current(&mut self) -> impl Iterator<Item = &mut Incident> {
        let open = self.open.iter_mut().map(|open| &mut open.incident);
        open.filter(|incident| incident.epoch_after.is_none())
    }

    /// Those whose recovery ends with the layout of `epoch`.
    pub(crate) fn recovering(&mut self, epoch: Epoch) -> impl Iterator<Item = &mut Incident> {
        let open = self.open.iter_mut().map(|open| &mut open.incident);
        open.filter(move |incident| incident.epoch_after == Some(epoch))
    }

    /// The incident that this sighting of `worker` belongs to.
    fn matching(&mut self, worker: &WorkerKey, kind: IncidentKind) -> Option<&mut Open> {
        let same_worker = |open: &Open| open.worker.as_ref() == Some(worker);
        // A driver may report its GPU after the process is gone and even after the recovery.
        let same_gpu = |open: &Open| {
            open.incident.gpu.as_ref() == Some(&worker.gpu)
                && (open.worker.is_none() || kind == IncidentKind::GpuLost)
        };
        let suspicion = |open: &Open| {
            open.worker.is_none() && open.incident.gpu.is_none() && open.incident.epoch_after.is_none()
        };
        let fault = |open: &Open| open.incident.kind != IncidentKind::Planned;
        let find = |test: &dyn Fn(&Open) -> bool| self.open.iter().position(|open| fault(open) && test(open));
        let index = find(&same_worker).or_else(|| find(&same_gpu)).or_else(|| find(&suspicion))?;
        self.open.get_mut(index)
    }

    pub(crate) fn end(&mut self, incident: Incident) {
        self.ended.push(incident);
        if self.ended.len() > KEPT {
            self.ended.remove(0);
        }
    }
}

impl Job {
    /// Something is wrong and nobody is condemned: opens an incident unless one is open for this recovery.
    pub(crate) fn suspect(&mut self, ctx: &mut Ctx<'_>, sighting: Sighting) {
        let known = self.incidents.current().any(|incident| incident.kind != IncidentKind::Planned);
        if !known {
            self.open_incident(ctx, None, None, sighting);
        }
    }

    /// `worker` is lost or condemned. The record of its fault gets the strongest reason known.
    pub(crate) fn accuse(&mut self, ctx: &mut Ctx<'_>, worker: &WorkerKey, sighting: Sighting) {
        let node = self.node_of(ctx, worker);
        let place = self.place_of_gpu(&worker.gpu);
        match self.incidents.matching(worker, sighting.kind) {
            Some(open) => {
                let heavier = weight(sighting.kind) > weight(open.incident.kind);
                // Agents tell of the same loss again only when they know more.
                let same = sighting.kind == open.incident.kind;
                let suspicion = open.worker.is_none() && open.incident.gpu.is_none();
                if suspicion || heavier || same {
                    open.incident.kind = sighting.kind;
                    open.incident.signal = sighting.signal;
                    open.incident.advice = advice(ctx, sighting.kind, Some(&worker.gpu));
                }
                open.worker = Some(worker.clone());
                open.incident.place = place;
                open.incident.gpu = Some(worker.gpu.clone());
                open.incident.index = ctx.cluster.gpu(&worker.gpu).map(|(_, _, gpu)| gpu.index);
                open.incident.node = node.or(open.incident.node.take());
            }
            None => self.open_incident(ctx, Some(worker), node, sighting),
        }
    }

    /// A change that is no fault.
    pub(crate) fn plan_change(&mut self, ctx: &mut Ctx<'_>, gpu: &GpuId, signal: &str) {
        let worker = self.worker_on(gpu).map(|(key, _)| key.clone());
        let node = ctx.cluster.gpu(gpu).map(|(node, _, _)| node.clone());
        let sighting = Sighting {
            kind: IncidentKind::Planned,
            signal: signal.to_owned(),
            reporter: "reknitd".to_owned(),
        };
        self.open_incident(ctx, worker.as_ref(), node, sighting);
    }

    /// A change that an operator wished and that is about no single GPU.
    pub(crate) fn plan_wish(&mut self, ctx: &mut Ctx<'_>, signal: &str) {
        let sighting = Sighting {
            kind: IncidentKind::Planned,
            signal: signal.to_owned(),
            reporter: "operator".to_owned(),
        };
        self.open_incident(ctx, None, None, sighting);
    }

    fn node_of(&self, ctx: &Ctx<'_>, worker: &WorkerKey) -> Option<NodeName> {
        let own = self.workers.get(worker).map(|worker| worker.node.clone());
        own.or_else(|| ctx.cluster.gpu(&worker.gpu).map(|(node, _, _)| node.clone()))
    }

    fn open_incident(
        &mut self,
        ctx: &mut Ctx<'_>,
        worker: Option<&WorkerKey>,
        node: Option<NodeName>,
        sighting: Sighting,
    ) {
        let incident = self.new_incident(ctx, worker, node, sighting);
        ctx.later.push(Command::PersistIncident(Box::new(incident.clone())));
        self.incidents.open.push(Open { incident, worker: worker.cloned() });
    }

    /// What is told of a worker and needs no recovery: the incident's number.
    pub(crate) fn tell(&mut self, ctx: &mut Ctx<'_>, worker: &WorkerKey, sighting: Sighting) -> u64 {
        let node = self.node_of(ctx, worker);
        let incident = self.new_incident(ctx, Some(worker), node, sighting);
        let id = incident.id;
        self.end_incident(ctx, Incident { told: true, ..incident });
        id
    }

    /// What was told is no longer so.
    pub(crate) fn tell_over(&mut self, ctx: &mut Ctx<'_>, id: u64) {
        let told = self.incidents.ended.iter_mut().rev().find(|incident| incident.id == id);
        if let Some(incident) = told {
            incident.recovered = Some(incident.not_before(ctx.now));
            let incident = Box::new(incident.clone());
            ctx.later.push(Command::PersistIncident(incident.clone()));
            ctx.notify(&self.record.name, Notice::Incident(incident));
        }
    }

    fn new_incident(
        &mut self,
        ctx: &Ctx<'_>,
        worker: Option<&WorkerKey>,
        node: Option<NodeName>,
        sighting: Sighting,
    ) -> Incident {
        self.record.last_incident += 1;
        let layout = self.record.layout.as_ref();
        Incident {
            id: self.record.last_incident,
            job: self.record.name.clone(),
            kind: sighting.kind,
            place: worker.and_then(|worker| self.place_of_gpu(&worker.gpu)),
            gpu: worker.map(|worker| worker.gpu.clone()),
            index: worker.and_then(|worker| ctx.cluster.gpu(&worker.gpu)).map(|(_, _, gpu)| gpu.index),
            node,
            signal: sighting.signal,
            first_reporter: sighting.reporter,
            epoch_before: self.epoch(),
            epoch_after: None,
            detected: ctx.now,
            quiesced: None,
            fenced: None,
            planned: None,
            ready: None,
            committed: None,
            recovered: None,
            steps_lost: 0,
            bytes_moved: 0,
            bytes_lower_bound: 0,
            degrees_before: layout.map(|layout| layout.degrees()).unwrap_or_default(),
            degrees_after: Vec::new(),
            advice: advice(ctx, sighting.kind, worker.map(|worker| &worker.gpu)),
            told: false,
        }
    }

    /// Stores the open incidents as they are.
    pub(crate) fn persist_incidents(&self, ctx: &mut Ctx<'_>) {
        for open in &self.incidents.open {
            ctx.later.push(Command::PersistIncident(Box::new(open.incident.clone())));
        }
    }

    /// The first step after a recovery is committed: its incidents are complete.
    pub(crate) fn recovered(&mut self, ctx: &mut Ctx<'_>) {
        let ready = |open: &Open| open.incident.epoch_after.is_some();
        let (done, open): (Vec<_>, Vec<_>) = self.incidents.open.drain(..).partition(ready);
        self.incidents.open = open;
        for Open { mut incident, .. } in done {
            incident.recovered = Some(incident.not_before(ctx.now));
            self.end_incident(ctx, incident);
        }
    }

    /// The job ends: what is open stays without a recovery.
    pub(crate) fn close_incidents(&mut self, ctx: &mut Ctx<'_>) {
        for Open { incident, .. } in std::mem::take(&mut self.incidents.open) {
            self.end_incident(ctx, incident);
        }
    }

    fn end_incident(&mut self, ctx: &mut Ctx<'_>, incident: Incident) {
        let incident = Box::new(incident);
        ctx.later.push(Command::PersistIncident(incident.clone()));
        ctx.notify(&self.record.name, Notice::Incident(incident.clone()));
        self.incidents.end(*incident);
    }

    /// Marks a phase's end on every incident of this recovery; a later attempt overwrites an earlier one.
    pub(crate) fn stamp(&mut self, now: Time, phase: fn(&mut Incident) -> &mut Option<Time>) {
        for incident in self.incidents.current() {
            let now = incident.not_before(now);
            *phase(incident) = Some(now);
            incident.forget_earlier_attempt();
        }
    }
}
