//! Where GPUs are: nodes, and the domains whose GPUs share NVLink.

mod parse;

use crate::{DomainName, GpuId, JobSpec, NodeName};
use std::collections::HashMap;

/// A complete, documented topology file.
pub const EXAMPLE: &str = include_str!("topology/example.toml");

/// The most that a GPU may draw, in nominal GPU powers, where nothing else is said.
pub const POWER_LIMIT: f64 = 1.3;

/// The domains of a cluster, their nodes and GPUs. Empty when nothing is known of where GPUs are.
#[derive(Debug, Clone, PartialEq)]
pub struct Topology {
    domains: Vec<Domain>,
    locations: HashMap<GpuId, Location>,
    /// Nominally a domain seats one group, whatever room it has.
    pub(crate) one_group_each: bool,
    /// Bytes of memory that each GPU has for the job; `None` when not known.
    pub gpu_memory: Option<u64>,
    /// The most that a GPU may draw, in nominal GPU powers: 1.0 to [`POWER_LIMIT`].
    pub power_limit: f64,
}

/// GPUs that share NVLink.
#[derive(Debug, Clone, PartialEq)]
pub struct Domain {
    pub name: DomainName,
    pub nodes: Vec<Node>,
    /// What the domain's GPUs may draw together, in nominal GPU powers; `None`: as many as it has GPUs.
    pub power_budget: Option<f64>,
}

impl Domain {
    /// In the order of nodes.
    pub fn gpus(&self) -> impl Iterator<Item = &GpuId> {
        self.nodes.iter().flat_map(|node| &node.gpus)
    }
}

/// A machine and its GPUs in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub name: NodeName,
    pub gpus: Vec<GpuId>,
}

impl Node {
    /// A machine with `gpus` GPUs that are named `NAME/INDEX`.
    fn numbered(name: String, gpus: u32) -> Self {
        let gpus = (0..gpus).map(|index| GpuId(format!("{name}/{index}"))).collect();
        Self { name: NodeName(name), gpus }
    }
}

/// Indices of a GPU's domain and of its node within the domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Location {
    domain: u32,
    node: u32,
}

impl Default for Topology {
    fn default() -> Self {
        Self::new(Vec::new(), None)
    }
}

impl Topology {
    /// Every GPU is named once; of one that is named twice the last place counts.
    pub fn new(domains: Vec<Domain>, gpu_memory: Option<u64>) -> Self {
        let gpus = domains.iter().flat_map(|domain| &domain.nodes).map(|node| node.gpus.len()).sum();
        let mut locations = HashMap::with_capacity(gpus);
        for (domain, entry) in (0..).zip(&domains) {
            for (node, machine) in (0..).zip(&entry.nodes) {
                locations.extend(machine.gpus.iter().map(|gpu| (gpu.clone(), Location { domain, node })));
            }
        }
        Self { domains, locations, one_group_each: false, gpu_memory, power_limit: POWER_LIMIT }
    }

    /// What is assumed without a topology file: group (r, s) in a domain and on a node of its own, both named `rR-sS`, with
    /// as many further GPUs as the job has spares.
    pub fn nominal(job: &JobSpec) -> Self {
        let gpus = job.parallel.tensor.saturating_add(job.recovery.spares);
        let replicas = 0..job.parallel.data;
        let groups =
            replicas.flat_map(|replica| job.stages().map(move |stage| format!("r{replica}-s{stage}")));
        let domains = groups.map(|name| Domain {
            name: DomainName(name.clone()),
            nodes: vec![Node::numbered(name, gpus)],
            power_budget: None,
        });
        Self { one_group_each: true, ..Self::new(domains.collect(), None) }
    }

    /// In the order in which groups take them.
    pub fn domains(&self) -> &[Domain] {
        &self.domains
    }

    /// Index of the GPU's domain in [`Topology::domains`], if it is known.
    pub fn domain_of(&self, gpu: &GpuId) -> Option<usize> {
        self.locations.get(gpu).map(|at| at.domain as usize)
    }

    pub fn node_of(&self, gpu: &GpuId) -> Option<&Node> {
        self.find(gpu).map(|(_, node)| node)
    }

    /// The domain and the node of [`Topology::domain_of`] and [`Topology::node_of`], looked up once.
    pub fn find(&self, gpu: &GpuId) -> Option<(usize, &Node)> {
        let at = self.locations.get(gpu)?;
        Some((at.domain as usize, &self.domains[at.domain as usize].nodes[at.node as usize]))
    }
}
