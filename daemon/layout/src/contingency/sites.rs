//! Where the slots that train are.

use crate::{GpuId, Group, Layout, Member, NodeName, Place, ReplicaId, Slot, StageId, Topology};
use std::collections::HashMap;

/// A GPU, node or domain, by its number in the order of the first places on each.
pub(super) type Site = u32;

/// The GPUs, nodes or domains of a layout.
pub(super) struct Sites<'a> {
    /// Per group one for each nominal slot; `None` where inactive.
    slots: Vec<Vec<Option<Site>>>,
    names: Vec<Name<'a>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Key<'a> {
    Gpu(&'a GpuId),
    /// A machine is known by its name.
    Node(&'a NodeName),
    /// Its index in the topology.
    Domain(usize),
    /// Where the topology does not know the GPU.
    Group(ReplicaId, StageId),
}

enum Name<'a> {
    Place(Place),
    Text(&'a str),
    Group(ReplicaId, StageId),
}

impl<'a> Sites<'a> {
    pub(super) fn gpus(layout: &'a Layout) -> Self {
        Self::new(layout, |_, member| Key::Gpu(&member.worker.gpu), |_, place| Name::Place(place))
    }

    pub(super) fn nodes(layout: &'a Layout, topology: &'a Topology) -> Self {
        let key = |group: &'a Group, member: &'a Member| {
            let node = topology.node_of(&member.worker.gpu);
            node.map_or(Key::Group(group.replica, group.stage), |node| Key::Node(&node.name))
        };
        Self::new(layout, key, |key, place| Name::of(key, place, topology))
    }

    pub(super) fn domains(layout: &'a Layout, topology: &'a Topology) -> Self {
        let key = |group: &'a Group, member: &'a Member| {
            let domain = topology.domain_of(&member.worker.gpu);
            domain.map_or(Key::Group(group.replica, group.stage), Key::Domain)
        };
        Self::new(layout, key, |key, place| Name::of(key, place, topology))
    }

    fn new(
        layout: &'a Layout,
        key: impl Fn(&'a Group, &'a Member) -> Key<'a>,
        name: impl Fn(Key<'a>, Place) -> Name<'a>,
    ) -> Self {
        let mut names = Vec::new();
        let mut numbers: HashMap<Key<'a>, Site> = HashMap::new();
        // Neighbours often share a node or domain.
        let mut before = None;
        let mut site = |group: &'a Group, slot: usize, member: &'a Member| {
            let key = key(group, member);
            match before {
                Some((last, site)) if last == key => site,
                Some(_) | None => {
                    let site = *numbers.entry(key).or_insert_with(|| {
                        let place =
                            Place { replica: group.replica, stage: group.stage, slot: Slot(slot as u32) };
                        names.push(name(key, place));
                        names.len() as Site - 1
                    });
                    before = Some((key, site));
                    site
                }
            }
        };
        let slots = layout.groups.iter().map(|group| {
            let slots = group.slots.iter().enumerate();
            slots.map(|(slot, member)| member.as_ref().map(|member| site(group, slot, member))).collect()
        });
        Self { slots: slots.collect(), names }
    }

    pub(super) fn count(&self) -> u32 {
        self.names.len() as u32
    }

    /// The sites of the group's slots.
    pub(super) fn of(&self, group: usize) -> &[Option<Site>] {
        &self.slots[group]
    }

    pub(super) fn name(&self, site: Site) -> String {
        match &self.names[site as usize] {
            Name::Place(place) => place.to_string(),
            Name::Text(text) => (*text).to_owned(),
            Name::Group(replica, stage) => format!("r{replica}-s{stage}"),
        }
    }
}

impl<'a> Name<'a> {
    fn of(key: Key<'a>, place: Place, topology: &'a Topology) -> Self {
        match key {
            Key::Gpu(_) => Self::Place(place),
            Key::Node(name) => Self::Text(&name.0),
            Key::Domain(domain) => Self::Text(&topology.domains()[domain].name.0),
            Key::Group(replica, stage) => Self::Group(replica, stage),
        }
    }
}
