//! Where GPUs are: nodes, and the domains whose GPUs share NVLink.

use crate::{DomainName, GpuId, NodeName};
use std::collections::HashMap;

/// The domains of a cluster, their nodes and GPUs. Empty when nothing is known of where GPUs are.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Topology {
    domains: Vec<Domain>,
    seats: HashMap<GpuId, Location>,
    /// Bytes of memory that each GPU has for the job; `None` when not known.
    pub gpu_memory: Option<u64>,
}

/// GPUs that share NVLink.
#[derive(Debug, Clone, PartialEq)]
pub struct Domain {
    pub name: DomainName,
    pub nodes: Vec<Node>,
}

/// A machine and its GPUs in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub name: NodeName,
    pub gpus: Vec<GpuId>,
}

/// Indices of a GPU's domain and of its node within the domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Location {
    domain: usize,
    node: usize,
}

impl Topology {
    /// Of a GPU that is named twice the last place counts.
    pub fn new(domains: Vec<Domain>, gpu_memory: Option<u64>) -> Self {
        let mut seats = HashMap::new();
        for (domain, entry) in domains.iter().enumerate() {
            for (node, machine) in entry.nodes.iter().enumerate() {
                let at = Location { domain, node };
                seats.extend(machine.gpus.iter().map(|gpu| (gpu.clone(), at)));
            }
        }
        Self { domains, seats, gpu_memory }
    }

    pub fn domains(&self) -> &[Domain] {
        &self.domains
    }

    /// Index of the GPU's domain in [`Topology::domains`], if it is known.
    pub fn domain_of(&self, gpu: &GpuId) -> Option<usize> {
        self.seats.get(gpu).map(|at| at.domain)
    }

    pub fn node_of(&self, gpu: &GpuId) -> Option<&Node> {
        self.seats.get(gpu).map(|at| &self.domains[at.domain].nodes[at.node])
    }
}
