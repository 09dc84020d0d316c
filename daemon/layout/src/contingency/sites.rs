//! Where the slots that train are.

use crate::{GpuId, Group, Layout, NodeName, ReplicaId, Slot, StageId, Topology};
use std::collections::HashMap;
use std::hash::Hash;

/// A GPU, node or domain, by its number in the order of the first places on each.
pub(super) type Site = u32;

/// The GPUs, nodes or domains of a layout.
pub(super) struct Sites<'a> {
    /// Of each nominal slot of each group, one group after the other; `None` where inactive.
    slots: Vec<Option<Site>>,
    /// Of each site.
    first: Vec<(&'a Group, Slot)>,
    name: fn(&Topology, &Group, Slot) -> Option<String>,
}

/// What makes two GPUs stand on one site.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Key<T> {
    Known(T),
    /// The topology does not know the GPU: its group is a node and a domain of its own.
    Group(ReplicaId, StageId),
}

/// The GPUs, the nodes and the domains.
pub(super) fn sites<'a>(layout: &'a Layout, topology: &Topology) -> [Sites<'a>; 3] {
    let slots = layout.groups.iter().map(|group| group.slots.len()).sum();
    let mut gpus: Numbering<'_, &GpuId> = Numbering::new(slots, slots, gpu_name);
    // A machine is known by its name.
    let mut nodes: Numbering<'_, Key<&NodeName>> = Numbering::new(slots, 0, node_name);
    let mut domains: Numbering<'_, Key<usize>> = Numbering::new(slots, 0, domain_name);
    for group in &layout.groups {
        let alone = (group.replica, group.stage);
        for (slot, member) in (0..).map(Slot).zip(&group.slots) {
            let at = member.as_ref().map(|member| {
                let found = topology.find(&member.worker.gpu);
                let unknown = (Key::Group(alone.0, alone.1), Key::Group(alone.0, alone.1));
                let known = found.map(|(domain, node)| (Key::Known(&node.name), Key::Known(domain)));
                (&member.worker.gpu, known.unwrap_or(unknown))
            });
            gpus.add(group, slot, at.map(|(gpu, _)| gpu));
            nodes.add(group, slot, at.map(|(_, (node, _))| node));
            domains.add(group, slot, at.map(|(_, (_, domain))| domain));
        }
    }
    [gpus.sites, nodes.sites, domains.sites]
}

/// Numbers sites as they come.
struct Numbering<'a, K> {
    sites: Sites<'a>,
    numbers: HashMap<K, Site>,
    /// Neighbours often share a node or domain.
    before: Option<(K, Site)>,
}

impl<'a, K: Copy + Eq + Hash> Numbering<'a, K> {
    fn new(slots: usize, sites: usize, name: fn(&Topology, &Group, Slot) -> Option<String>) -> Self {
        let (slots, first) = (Vec::with_capacity(slots), Vec::with_capacity(sites));
        Self { sites: Sites { slots, first, name }, numbers: HashMap::with_capacity(sites), before: None }
    }

    fn add(&mut self, group: &'a Group, slot: Slot, key: Option<K>) {
        let site = key.map(|key| match self.before {
            Some((last, site)) if last == key => site,
            Some(_) | None => {
                let site = *self.numbers.entry(key).or_insert_with(|| {
                    self.sites.first.push((group, slot));
                    self.sites.first.len() as Site - 1
                });
                self.before = Some((key, site));
                site
            }
        });
        self.sites.slots.push(site);
    }
}

impl Sites<'_> {
    pub(super) fn count(&self) -> u32 {
        self.first.len() as u32
    }

    /// The sites of the nominal slots, one group after the other.
    pub(super) fn slots(&self) -> &[Option<Site>] {
        &self.slots
    }

    pub(super) fn name(&self, topology: &Topology, site: Site) -> String {
        let (group, slot) = self.first[site as usize];
        let alone = || format!("r{}-s{}", group.replica, group.stage);
        (self.name)(topology, group, slot).unwrap_or_else(alone)
    }
}

fn gpu_name(_: &Topology, group: &Group, slot: Slot) -> Option<String> {
    Some(group.place(slot).to_string())
}

fn node_name(topology: &Topology, group: &Group, slot: Slot) -> Option<String> {
    let member = group.slots.get(slot.0 as usize)?.as_ref()?;
    topology.node_of(&member.worker.gpu).map(|node| node.name.to_string())
}

fn domain_name(topology: &Topology, group: &Group, slot: Slot) -> Option<String> {
    let member = group.slots.get(slot.0 as usize)?.as_ref()?;
    topology.domain_of(&member.worker.gpu).map(|domain| topology.domains()[domain].name.to_string())
}
