//! The smallest sets of sites that hold every owner of some unit.

use super::sites::{Site, Sites};
use crate::{Axis, Layout, Partitions, StageId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Sets of one or two sites whose loss takes the last holder of a unit along, none within another.
pub(super) struct Fatal {
    singles: BTreeSet<Site>,
    /// The lower number first.
    pairs: BTreeSet<(Site, Site)>,
}

/// The distinct sites that hold something, as far as they matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holders {
    None,
    One(Site),
    /// The lower number first.
    Two(Site, Site),
    /// Too many to be lost at once.
    Many,
}

impl Holders {
    /// With `site`; more than `k` are many.
    fn with(self, site: Site, k: u32) -> Self {
        match self {
            Self::None => Self::One(site),
            Self::One(one) if one == site => self,
            Self::One(_) if k < 2 => Self::Many,
            Self::One(one) => Self::Two(one.min(site), one.max(site)),
            Self::Two(one, two) if one == site || two == site => self,
            Self::Two(..) | Self::Many => Self::Many,
        }
    }

    fn and(self, other: Self, k: u32) -> Self {
        match other {
            Self::None => self,
            Self::One(one) => self.with(one, k),
            Self::Two(one, two) => self.with(one, k).with(two, k),
            Self::Many => Self::Many,
        }
    }
}

/// A group that trains.
struct Training<'a> {
    partitions: &'a Arc<Partitions>,
    /// The sites of its nominal slots.
    on: &'a [Option<Site>],
}

/// Groups of one stage that are split alike.
struct Class<'a> {
    partitions: &'a Partitions,
    /// Per nominal slot, over all these groups.
    slots: Vec<Holders>,
}

impl Fatal {
    pub(super) fn find(layout: &Layout, sites: &Sites<'_>, k: u32) -> Self {
        let mut stages: BTreeMap<StageId, Vec<Training<'_>>> = BTreeMap::new();
        let mut slots = sites.slots();
        for group in &layout.groups {
            let (on, rest) = slots.split_at(group.slots.len());
            slots = rest;
            if on.iter().any(Option::is_some) {
                stages.entry(group.stage).or_default().push(Training { partitions: &group.partitions, on });
            }
        }
        let mut found = Self { singles: BTreeSet::new(), pairs: BTreeSet::new() };
        for groups in stages.values() {
            if let Some(classes) = classes(groups, k) {
                let axes = classes.iter().flat_map(|class| class.partitions.keys()).copied();
                for axis in axes.collect::<BTreeSet<_>>() {
                    found.judge(&classes, axis, k);
                }
            }
        }
        let singles = &found.singles;
        found.pairs.retain(|(one, two)| !singles.contains(one) && !singles.contains(two));
        found
    }

    /// Each of `sites` sites.
    pub(super) fn every(sites: u32) -> Self {
        Self { singles: (0..sites).collect(), pairs: BTreeSet::new() }
    }

    /// Adds what the units of one axis tell.
    fn judge(&mut self, classes: &[Class<'_>], axis: Axis, k: u32) {
        let mut units: Vec<Holders> = Vec::new();
        let mut many = 0;
        for class in classes {
            let sets = class.partitions.get(&axis).map_or(&[][..], Vec::as_slice);
            let end = sets.iter().filter_map(|set| set.intervals().last()).map(|(_, end)| *end).max();
            units.resize(units.len().max(end.unwrap_or(0) as usize), Holders::None);
            for (set, holders) in sets.iter().zip(&class.slots) {
                for unit in set.iter().map(|unit| unit as usize) {
                    if units[unit] != Holders::Many {
                        units[unit] = units[unit].and(*holders, k);
                        many += usize::from(units[unit] == Holders::Many);
                    }
                }
            }
            if many == units.len() {
                return;
            }
        }
        // Neighbours mostly have the same owners.
        units.dedup();
        for holders in units {
            match holders {
                Holders::None | Holders::Many => {}
                Holders::One(site) => drop(self.singles.insert(site)),
                Holders::Two(one, two) => drop(self.pairs.insert((one, two))),
            }
        }
    }

    /// How many sets of `k` out of `sites` contain one of these.
    pub(super) fn count(&self, sites: u32, k: u32) -> u64 {
        let without = choose(sites - self.singles.len() as u32, k);
        choose(sites, k) - without + if k == 1 { 0 } else { self.pairs.len() as u64 }
    }

    /// Those sets in order.
    pub(super) fn sets(&self, sites: u32, k: u32) -> Box<dyn Iterator<Item = Vec<Site>> + '_> {
        if k == 1 {
            return Box::new(self.singles.iter().map(|site| vec![*site]));
        }
        if self.singles.is_empty() {
            return Box::new(self.pairs.iter().map(|(one, two)| vec![*one, *two]));
        }
        Box::new(
            (0..sites)
                .flat_map(move |one| self.seconds(one, sites).into_iter().map(move |two| vec![one, two])),
        )
    }

    /// The sites after `one` that make a set with it.
    fn seconds(&self, one: Site, sites: u32) -> Vec<Site> {
        if self.singles.contains(&one) {
            return (one + 1..sites).take(super::EXAMPLES).collect();
        }
        let with = self.pairs.range((one, 0)..=(one, Site::MAX)).map(|(_, two)| *two);
        let seconds: BTreeSet<Site> = self.singles.range(one + 1..).copied().chain(with).collect();
        seconds.into_iter().collect()
    }
}

/// The groups of a stage by how they are split; `None` if the groups of one class alone put every unit out of danger.
fn classes<'a>(groups: &[Training<'a>], k: u32) -> Option<Vec<Class<'a>>> {
    let mut classes: Vec<Class<'a>> = Vec::new();
    let mut numbers: HashMap<*const Partitions, usize> = HashMap::new();
    for Training { partitions, on } in groups {
        let number = *numbers.entry(Arc::as_ptr(partitions)).or_insert_with(|| {
            classes.push(Class { partitions, slots: vec![Holders::None; on.len()] });
            classes.len() - 1
        });
        let slots = &mut classes[number].slots;
        for (holders, site) in slots.iter_mut().zip(*on) {
            if let Some(site) = site {
                *holders = holders.with(*site, k);
            }
        }
        // An inactive slot owns nothing.
        let safe = |(holders, site): (&Holders, &Option<Site>)| site.is_none() || *holders == Holders::Many;
        if slots.iter().zip(*on).all(safe) {
            return None;
        }
    }
    Some(classes)
}

/// How many sets of `k`, 1 or 2, there are.
pub(super) fn choose(sites: u32, k: u32) -> u64 {
    let sites = u64::from(sites);
    if k == 1 { sites } else { sites * sites.saturating_sub(1) / 2 }
}
