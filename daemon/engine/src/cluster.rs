//! The nodes and their GPUs, as agents and operators speak of them.

use crate::{DrainedBy, GpuReport, HealthClass, JobName, NodeLink, Time, Timeouts};
use reknit_layout::topology::{Domain, Node as Machine};
use reknit_layout::{DomainName, GpuId, NodeName, Topology, WorkerKey};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[derive(Debug, Clone, Default)]
pub(crate) struct Cluster {
    nodes: BTreeMap<NodeName, Node>,
    /// Taken out until an operator takes them back.
    pub(crate) drained: BTreeMap<GpuId, DrainedBy>,
    /// Workers that agents run while no job is known at all: they are left alone until there is one.
    pub(crate) strangers: BTreeMap<NodeName, BTreeSet<(JobName, WorkerKey)>>,
    /// As an operator describes it, with the GPUs' nominal names.
    pub(crate) described: Topology,
    /// Who lists each GPU: one node, but for one that moved while its old node was away.
    listed_by: BTreeMap<GpuId, BTreeSet<NodeName>>,
    /// Those that may not train for their health.
    sick: BTreeSet<GpuId>,
    /// Silent nodes by the end of their lease.
    leases: BTreeSet<(Time, NodeName)>,
    /// Silent nodes that people were not told of, by when they fell silent.
    untold: BTreeSet<(Time, NodeName)>,
    /// Gone nodes by when they may be forgotten.
    gone: BTreeSet<(Time, NodeName)>,
}

#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) link: NodeLink,
    /// People know that it is away.
    pub(crate) missed: bool,
    pub(crate) gpus: BTreeMap<GpuId, Gpu>,
}

impl Node {
    pub(crate) fn connected(&self) -> bool {
        match self.link {
            NodeLink::Connected { .. } => true,
            NodeLink::Silent { .. } | NodeLink::Gone { .. } => false,
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) health: HealthClass,
    pub(crate) cause: String,
    /// What its agent suggests to do.
    pub(crate) action: String,
    /// When its health or cause changed.
    pub(crate) changed: Time,
    /// Since when workers may be started on it; only meaningful while they may.
    pub(crate) fit_since: Time,
}

impl Gpu {
    fn new(report: &GpuReport, now: Time) -> Self {
        Self {
            index: report.index,
            name: report.name.clone(),
            health: report.health,
            cause: report.cause.clone(),
            action: report.action.clone(),
            changed: now,
            fit_since: now,
        }
    }

    fn set_health(&mut self, health: HealthClass, cause: &str, action: &str, now: Time) {
        if !fit(self.health) && fit(health) {
            self.fit_since = now;
        }
        if (self.health, self.cause.as_str()) != (health, cause) {
            self.changed = now;
        }
        self.health = health;
        self.cause = cause.to_owned();
        self.action = action.to_owned();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hindrance {
    Drained,
    /// Fatal, to be reset, or nothing is known of it.
    Unfit,
    /// Its agent is not heard.
    Away,
}

/// A worker may be started on a GPU of this class.
fn fit(health: HealthClass) -> bool {
    match health {
        HealthClass::Healthy | HealthClass::RankDied | HealthClass::Predict => true,
        HealthClass::Fatal | HealthClass::Drain | HealthClass::Unknown => false,
    }
}

impl Cluster {
    /// The domains as described, with the GPUs that agents report on their nodes. A node that is in none is a domain of its
    /// own.
    pub(crate) fn topology(&self) -> Topology {
        let machine = |name: &NodeName| {
            let node = self.nodes.get(name)?;
            let mut gpus: Vec<_> = node.gpus.iter().map(|(gpu, found)| (found.index, gpu.clone())).collect();
            gpus.sort();
            Some(Machine { name: name.clone(), gpus: gpus.into_iter().map(|(_, gpu)| gpu).collect() })
        };
        let described = self.described.domains().iter();
        let mut domains: Vec<Domain> = described
            .map(|domain| Domain {
                name: domain.name.clone(),
                nodes: domain.nodes.iter().filter_map(|node| machine(&node.name)).collect(),
                power_budget: domain.power_budget,
            })
            .collect();
        let known: BTreeSet<&NodeName> =
            self.described.domains().iter().flat_map(|domain| &domain.nodes).map(|node| &node.name).collect();
        domains.extend(self.nodes.keys().filter(|name| !known.contains(name)).map(|name| Domain {
            name: DomainName(name.0.clone()),
            nodes: machine(name).into_iter().collect(),
            power_budget: None,
        }));
        let mut topology = Topology::new(domains, self.described.gpu_memory);
        topology.power_limit = self.described.power_limit;
        topology
    }

    pub(crate) fn gpu(&self, gpu: &GpuId) -> Option<(&NodeName, &Node, &Gpu)> {
        let (name, node) = self.nodes.get_key_value(self.listed_by.get(gpu)?.first()?)?;
        Some((name, node, node.gpus.get(gpu)?))
    }

    /// A worker that is there may stay a member. A GPU nothing is known of keeps its worker: unknown is not lost.
    pub(crate) fn may_train(&self, gpu: &GpuId) -> bool {
        !self.sick.contains(gpu) && !self.drained.contains_key(gpu)
    }

    /// The GPUs that may not train; some twice.
    pub(crate) fn unfit(&self) -> impl Iterator<Item = &GpuId> {
        self.sick.iter().chain(self.drained.keys())
    }

    /// Keeps what is looked up by GPU in step with what `node` lists of it.
    fn note(&mut self, node: &NodeName, gpu: &GpuId) {
        let listed = self.nodes.get(node).is_some_and(|node| node.gpus.contains_key(gpu));
        let by = self.listed_by.entry(gpu.clone()).or_default();
        if listed {
            by.insert(node.clone());
        } else {
            by.remove(node);
        }
        if by.is_empty() {
            self.listed_by.remove(gpu);
        }
        let sick = match self.gpu(gpu).map(|(_, _, gpu)| gpu.health) {
            Some(HealthClass::Fatal | HealthClass::Drain) => true,
            Some(
                HealthClass::Healthy | HealthClass::RankDied | HealthClass::Predict | HealthClass::Unknown,
            )
            | None => false,
        };
        if sick {
            self.sick.insert(gpu.clone());
        } else {
            self.sick.remove(gpu);
        }
    }

    /// Where a worker for the GPU may be started and since when, if it may.
    pub(crate) fn may_start(&self, gpu: &GpuId) -> Option<(&NodeName, Time)> {
        let (name, _, found) = self.gpu(gpu)?;
        self.hindrance(gpu).is_none().then_some((name, found.fit_since))
    }

    /// Why no worker may be started on a GPU that some agent has named.
    pub(crate) fn hindrance(&self, gpu: &GpuId) -> Option<Hindrance> {
        let (_, node, found) = self.gpu(gpu)?;
        if !node.connected() {
            Some(Hindrance::Away)
        } else if self.drained.contains_key(gpu) {
            Some(Hindrance::Drained)
        } else {
            (!fit(found.health)).then_some(Hindrance::Unfit)
        }
    }

    /// What to do about a GPU that its agent takes out.
    pub(crate) fn suggestion(&self, gpu: &GpuId) -> Option<&str> {
        let (_, _, found) = self.gpu(gpu)?;
        let taken_out = match found.health {
            HealthClass::Fatal | HealthClass::Drain => true,
            HealthClass::Healthy | HealthClass::RankDied | HealthClass::Predict | HealthClass::Unknown => {
                false
            }
        };
        (taken_out && !found.action.is_empty()).then_some(found.action.as_str())
    }

    pub(crate) fn connected(&self, node: &NodeName) -> bool {
        self.nodes.get(node).is_some_and(Node::connected)
    }

    pub(crate) fn agent_connected(&mut self, now: Time, name: &NodeName, reports: &[GpuReport]) {
        let link = NodeLink::Connected { since: now };
        let unknown = || Node { link, missed: false, gpus: BTreeMap::new() };
        self.nodes.entry(name.clone()).or_insert_with(unknown).missed = false;
        self.set_link(name, link);
        self.gpus_listed(now, name, reports);
    }

    pub(crate) fn agent_disconnected(&mut self, now: Time, name: &NodeName, timeouts: &Timeouts) {
        self.set_link(name, NodeLink::Silent { since: now, lease: now.after(timeouts.lease()) });
        if let Some(Node { missed: false, .. }) = self.nodes.get(name) {
            self.untold.insert((now, name.clone()));
        }
    }

    /// A node that is silent no more is awaited no more.
    fn set_link(&mut self, name: &NodeName, link: NodeLink) {
        let Some(node) = self.nodes.get_mut(name) else {
            return;
        };
        match std::mem::replace(&mut node.link, link) {
            NodeLink::Silent { since, lease } => {
                self.leases.remove(&(lease, name.clone()));
                self.untold.remove(&(since, name.clone()));
            }
            NodeLink::Gone { forget, .. } => {
                self.gone.remove(&(forget, name.clone()));
            }
            NodeLink::Connected { .. } => {}
        }
        match link {
            NodeLink::Silent { lease, .. } => {
                self.leases.insert((lease, name.clone()));
            }
            NodeLink::Gone { forget, .. } => {
                self.gone.insert((forget, name.clone()));
            }
            NodeLink::Connected { .. } => {}
        }
    }

    /// Nodes that have been silent for long enough for people to be told, each once, with the end of its lease. One that
    /// is soon back is not worth a word.
    pub(crate) fn take_silent(&mut self, now: Time, timeouts: &Timeouts) -> Vec<(NodeName, Time)> {
        let mut silent = Vec::new();
        for name in take_due(&mut self.untold, now, timeouts.silence()) {
            let Some(node) = self.nodes.get_mut(&name) else { continue };
            node.missed = true;
            match node.link {
                NodeLink::Silent { lease, .. } => silent.push((name, lease)),
                NodeLink::Connected { .. } | NodeLink::Gone { .. } => {}
            }
        }
        silent
    }

    /// Nodes whose lease has ended: they are gone.
    pub(crate) fn take_expired(&mut self, now: Time, timeouts: &Timeouts) -> Vec<NodeName> {
        let gone = take_due(&mut self.leases, now, Duration::ZERO);
        for name in &gone {
            self.set_gone(now, name, timeouts);
        }
        gone
    }

    /// Is gone, and may be forgotten when it has been for another while.
    pub(crate) fn set_gone(&mut self, now: Time, name: &NodeName, timeouts: &Timeouts) {
        match self.nodes.get(name).map(|node| node.link) {
            Some(NodeLink::Silent { since, .. } | NodeLink::Gone { since, .. }) => {
                self.set_link(name, NodeLink::Gone { since, forget: now.after(timeouts.forget()) });
            }
            Some(NodeLink::Connected { .. }) | None => {}
        }
    }

    /// Nodes that have been gone for so long that each is to be forgotten now, or [set gone](Self::set_gone) again.
    pub(crate) fn take_forgettable(&mut self, now: Time) -> Vec<NodeName> {
        take_due(&mut self.gone, now, Duration::ZERO)
    }

    /// As if it had never been heard. What operators have taken out stays so.
    pub(crate) fn forget(&mut self, now: Time, name: &NodeName) {
        self.gpus_listed(now, name, &[]);
        self.nodes.remove(name);
    }

    pub(crate) fn next_deadline(&self, timeouts: &Timeouts) -> Option<Time> {
        let lease = self.leases.first().map(|(lease, _)| *lease);
        let telling = self.untold.first().map(|(since, _)| since.after(timeouts.silence()));
        let forgetting = self.gone.first().map(|(forget, _)| *forget);
        lease.into_iter().chain(telling).chain(forgetting).min()
    }

    pub(crate) fn node(&self, name: &NodeName) -> Option<&Node> {
        self.nodes.get(name)
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = (&NodeName, &Node)> {
        self.nodes.iter()
    }

    pub(crate) fn gpus_listed(&mut self, now: Time, name: &NodeName, reports: &[GpuReport]) {
        let Some(node) = self.nodes.get_mut(name) else {
            return;
        };
        let mut before = std::mem::take(&mut node.gpus);
        for report in reports {
            let mut gpu = match before.remove(&report.gpu) {
                Some(known) => known,
                None => Gpu::new(report, now),
            };
            gpu.index = report.index;
            gpu.set_health(report.health, &report.cause, &report.action, now);
            node.gpus.insert(report.gpu.clone(), gpu);
        }
        let unlisted = before.into_keys();
        for gpu in unlisted.chain(reports.iter().map(|report| report.gpu.clone())) {
            self.note(name, &gpu);
        }
    }

    /// False when the GPU is not known.
    pub(crate) fn health_changed(
        &mut self,
        now: Time,
        node: &NodeName,
        gpu: &GpuId,
        health: HealthClass,
        cause: &str,
        action: &str,
    ) -> bool {
        let known = self.nodes.get_mut(node).and_then(|n| n.gpus.get_mut(gpu));
        match known {
            Some(found) => {
                found.set_health(health, cause, action, now);
                self.note(node, gpu);
                true
            }
            None => false,
        }
    }
}

/// Takes out those whose time was at least `ago`; in order of names.
fn take_due(waiting: &mut BTreeSet<(Time, NodeName)>, now: Time, ago: Duration) -> Vec<NodeName> {
    let mut due = Vec::new();
    while waiting.first().is_some_and(|(time, _)| time.after(ago) <= now) {
        due.extend(waiting.pop_first().map(|(_, name)| name));
    }
    due.sort();
    due
}
