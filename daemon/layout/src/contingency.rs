//! Which losses the job would survive without a checkpoint: all sets of one or two GPUs, nodes or domains.
//!
//! A set is unrecoverable exactly if it holds every owner of some unit, since an owner is all that is left of a
//! unit once the new layout is committed. So only units with at most `k` distinct holders matter, and what they
//! tell is found from the layout's structure, not by trying sets: per stage and partition the holders of each slot
//! over all replicas that are split alike, counted no further than `k + 1`; then the slots that own a unit.

mod fatal;
mod sites;

use crate::{Layout, Topology};
use fatal::Fatal;
use serde::Serialize;
use sites::{Site, Sites};

/// What the loss of `k` more GPUs, nodes or domains would mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contingency {
    pub k: u32,
    pub gpu: Exposure,
    pub node: Exposure,
    pub domain: Exposure,
}

/// The sets of exactly `k` of a kind that have a slot which trains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exposure {
    pub sets: u64,
    /// How many of them take the last holder of some unit along.
    pub unrecoverable: u64,
    /// The first few of these: a GPU by its place, such as `0.0.1`, nodes and domains by their names. In the order
    /// of the places that they hold, within a set and of the sets.
    pub examples: Vec<Vec<String>>,
}

/// Sets that are named of each kind.
const EXAMPLES: usize = 8;

/// Judges the loss of any `k` GPUs, nodes and domains. `k` is 1 or 2; another number counts as the nearer of them.
///
/// Where the topology does not know a GPU, its group is a node and a domain of its own, named `rR-sS`.
pub fn contingency(layout: &Layout, topology: &Topology, k: u32) -> Contingency {
    let k = k.clamp(1, 2);
    judge(layout, topology, k, |sites| Fatal::find(layout, sites, k))
}

/// The same where units are lost already: no set is survived.
pub fn contingency_of_lost(layout: &Layout, topology: &Topology, k: u32) -> Contingency {
    judge(layout, topology, k.clamp(1, 2), |sites| Fatal::every(sites.count()))
}

fn judge(layout: &Layout, topology: &Topology, k: u32, fatal: impl Fn(&Sites<'_>) -> Fatal) -> Contingency {
    let [gpu, node, domain] = sites::sites(layout, topology).map(|sites| {
        let fatal = fatal(&sites);
        let name = |set: Vec<Site>| set.into_iter().map(|site| sites.name(topology, site)).collect();
        Exposure {
            sets: fatal::choose(sites.count(), k),
            unrecoverable: fatal.count(sites.count(), k),
            examples: fatal.sets(sites.count(), k).take(EXAMPLES).map(name).collect(),
        }
    });
    Contingency { k, gpu, node, domain }
}
