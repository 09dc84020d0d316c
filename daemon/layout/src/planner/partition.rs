//! Which units each slot of a group owns.
//!
//! **Nominal partition.** With all `t` slots active, `U` units are cut into contiguous ranges in slot order. Every slot gets
//! `U / t` units and `U mod t` slots one more. The slots with one more follow on each other from a first one that the caller
//! rotates over the layers, so that no slot carries every extra unit.
//!
//! **Full degree.** The partition is the nominal one, so growth ends where it began, whatever came between. Where survivors hold
//! other units than their own by then, that moves more than balance alone would.
//!
//! **Balanced sizes.** At a reduced degree `d` every slot owns `U / d` units and any `U mod d` slots one more. Which ones is
//! free: first those that can keep a unit by it, then in the order that the caller prefers.
//!
//! **Least movement.** Under those sizes as many units as possible stay with a slot that holds them (a maximum flow
//! from units to slots, by augmenting paths), so what moves is the lower bound. Among the ways to do so a slot keeps
//! first what is nominally its own, then what belongs nominally to an inactive slot, last what another active slot
//! owns nominally: a returning slot is given its own units back.
//!
//! **Dealing.** What is left of each inactive slot's nominal units is dealt evenly to the slots with room, each one's share in one
//! piece: so what a leaving holder sends, and later what an extra slot hands over, goes to many and not to one.

use crate::Units;
use std::collections::VecDeque;

/// A partition at the nominal degree: the set of each slot. `first_extra` is the first slot with an extra unit.
pub(super) fn nominal(units: u32, slots: u32, first_extra: u32) -> Vec<Units> {
    let (size, extras) = (units / slots, units % slots);
    let mut start = 0;
    (0..slots)
        .map(|slot| {
            let extra = u32::from((slot + slots - first_extra) % slots < extras);
            let end = start + size + extra;
            let set = Units::range(start, end);
            start = end;
            set
        })
        .collect()
}

/// A balanced partition and how many of its units stay where they are held.
pub(super) struct Partition {
    /// One set per nominal slot, empty where inactive.
    pub(super) owned: Vec<Units>,
    pub(super) kept: u32,
    /// How many could stay in some partition with these sizes.
    pub(super) could_stay: u32,
}

/// Partitions `units` over the active slots. `held` has one entry per nominal slot: `None` where inactive, otherwise
/// what the slot's worker holds; held sets may overlap. At least one slot must be active. `order` has the active slots, those
/// first that shall rather have an extra unit.
pub(super) fn partition(
    units: u32,
    nominal: Vec<Units>,
    held: &[Option<Units>],
    order: &[usize],
) -> Partition {
    let slots = held.len();
    let active: Vec<usize> = (0..slots).filter(|&slot| held[slot].is_some()).collect();
    let degree = active.len() as u32;
    let all_active = active.len() == slots;
    let (size, extras) = (units / degree, units % degree);

    let mut filling = Filling::new(units, slots);
    for &slot in &active {
        filling.room[slot] = if all_active { nominal[slot].len() } else { size };
    }
    filling.extras = if all_active { 0 } else { extras };

    let mut owner_of = vec![None; units as usize];
    for (slot, set) in nominal.iter().enumerate() {
        for unit in set.iter() {
            owner_of[unit as usize] = held[slot].is_some().then_some(slot);
        }
    }
    for pass in [Keep::Own, Keep::Orphan, Keep::Other] {
        for &slot in order {
            for unit in held[slot].iter().flat_map(Units::iter).filter(|&unit| unit < units) {
                let wanted = match owner_of[unit as usize] {
                    Some(owner) if owner == slot => Keep::Own,
                    Some(_) => Keep::Other,
                    None => Keep::Orphan,
                };
                if wanted == pass && filling.owner[unit as usize].is_none() && filling.has_room(slot) {
                    filling.seat(unit, slot);
                }
            }
        }
    }
    filling.keep_more(order, held);
    let could_stay = filling.load.iter().sum();
    if all_active {
        let own = nominal.iter().zip(held);
        let own = own.map(|(own, held)| held.as_ref().map_or(0, |held| own.intersection(held).len()));
        return Partition { kept: own.sum(), owned: nominal, could_stay };
    }

    for &slot in order {
        filling.take_extra(slot);
    }
    for unit in 0..units {
        if let (None, Some(slot)) = (filling.owner[unit as usize], owner_of[unit as usize])
            && filling.load[slot] < filling.room[slot]
        {
            filling.seat(unit, slot);
        }
    }
    let mut next = 0;
    for set in &nominal {
        let left: Vec<u32> = set.iter().filter(|unit| filling.owner[*unit as usize].is_none()).collect();
        filling.deal(&left, &active, &mut next);
    }
    Partition { owned: filling.sets(slots), kept: could_stay, could_stay }
}

/// Why a slot that holds a unit would keep it, best reason first.
#[derive(Clone, Copy, PartialEq)]
enum Keep {
    /// Nominally its own.
    Own,
    /// Nominally an inactive slot's.
    Orphan,
    /// Nominally another active slot's.
    Other,
}

/// Units seated at slots with limited room. An extra is one more place, at most one to a slot.
struct Filling {
    owner: Vec<Option<usize>>,
    load: Vec<u32>,
    room: Vec<u32>,
    has_extra: Vec<bool>,
    /// Extras not yet taken.
    extras: u32,
}

/// What is passed on along an augmenting path.
#[derive(Clone, Copy)]
enum Passed {
    Unit(u32),
    /// The slot that was reached gives its extra place to the slot before it.
    Extra,
}

impl Filling {
    fn new(units: u32, slots: usize) -> Self {
        Self {
            owner: vec![None; units as usize],
            load: vec![0; slots],
            room: vec![0; slots],
            has_extra: vec![false; slots],
            extras: 0,
        }
    }

    fn has_room(&self, slot: usize) -> bool {
        self.load[slot] < self.room[slot] || (self.extras > 0 && !self.has_extra[slot])
    }

    /// Needs room, or a place that the caller frees.
    fn seat(&mut self, unit: u32, slot: usize) {
        if self.load[slot] == self.room[slot] {
            self.take_extra(slot);
        }
        self.load[slot] += 1;
        self.owner[unit as usize] = Some(slot);
    }

    /// Gives the units to the slots with room, one each in turn, from the one at `next` on; each slot's in one piece. There must be
    /// room for all.
    fn deal(&mut self, units: &[u32], active: &[usize], next: &mut usize) {
        let mut shares = vec![0; active.len()];
        for _ in units {
            while self.load[active[*next]] + shares[*next] == self.room[active[*next]] {
                *next = (*next + 1) % active.len();
            }
            shares[*next] += 1;
            *next = (*next + 1) % active.len();
        }
        let mut units = units.iter();
        for (&slot, share) in active.iter().zip(shares) {
            units.by_ref().take(share as usize).for_each(|&unit| self.seat(unit, slot));
        }
    }

    fn take_extra(&mut self, slot: usize) {
        if self.extras > 0 && !self.has_extra[slot] {
            self.extras -= 1;
            self.has_extra[slot] = true;
            self.room[slot] += 1;
        }
    }

    /// Seats every unit that can still be kept by a holder when others change their seats among their holders.
    fn keep_more(&mut self, order: &[usize], held: &[Option<Units>]) {
        // From a slot where a search failed, none will ever succeed: later searches leave it out.
        let mut hopeless = vec![false; self.load.len()];
        for &first in order {
            for unit in held[first].iter().flat_map(Units::iter) {
                let waiting = self.owner.get(unit as usize).is_some_and(Option::is_none);
                if waiting && !hopeless[first] {
                    match self.search(first, order, held, &hopeless) {
                        Ok(path) => self.shift(unit, first, &path),
                        Err(visited) => visited.into_iter().for_each(|slot| hopeless[slot] = true),
                    }
                }
            }
        }
    }

    /// A shortest way to make room at `first`: what each slot passes on and to whom. `Err`: the slots tried in vain.
    fn search(
        &self,
        first: usize,
        order: &[usize],
        held: &[Option<Units>],
        hopeless: &[bool],
    ) -> Result<Vec<(Passed, usize)>, Vec<usize>> {
        let mut came: Vec<Option<(usize, Passed)>> = vec![None; self.load.len()];
        let mut visited = vec![first];
        let mut queue = VecDeque::from([first]);
        while let Some(slot) = queue.pop_front() {
            if self.has_room(slot) {
                let mut path = Vec::new();
                let mut at = slot;
                while let Some((before, passed)) = came[at] {
                    path.push((passed, at));
                    at = before;
                }
                path.reverse();
                return Ok(path);
            }
            for &next in order {
                if hopeless[next] || visited.contains(&next) {
                    continue;
                }
                if let Some(passed) = self.passes(slot, next, held) {
                    came[next] = Some((slot, passed));
                    visited.push(next);
                    queue.push_back(next);
                }
            }
        }
        Err(visited)
    }

    /// What the full slot `from` can pass to `to`.
    fn passes(&self, from: usize, to: usize, held: &[Option<Units>]) -> Option<Passed> {
        if self.has_extra[to] && !self.has_extra[from] {
            return Some(Passed::Extra);
        }
        let both = held[to].as_ref()?.iter();
        let mut seated = both.filter(|&unit| self.owner.get(unit as usize) == Some(&Some(from)));
        seated.next().map(Passed::Unit)
    }

    fn shift(&mut self, unit: u32, first: usize, path: &[(Passed, usize)]) {
        let mut enters = Some((unit, first));
        let mut at = first;
        for &(passed, next) in path {
            match passed {
                Passed::Unit(moved) => {
                    // The place of the unit that leaves is taken by the one that enters.
                    if let Some((unit, slot)) = enters.replace((moved, next)) {
                        self.owner[unit as usize] = Some(slot);
                    } else {
                        self.load[at] -= 1;
                    }
                }
                Passed::Extra => {
                    self.has_extra[at] = true;
                    self.room[at] += 1;
                    self.has_extra[next] = false;
                    self.room[next] -= 1;
                    if let Some((unit, slot)) = enters.take() {
                        self.load[slot] += 1;
                        self.owner[unit as usize] = Some(slot);
                    }
                }
            }
            at = next;
        }
        if let Some((unit, slot)) = enters {
            self.seat(unit, slot);
        }
    }

    fn sets(&self, slots: usize) -> Vec<Units> {
        let mut lists = vec![Vec::new(); slots];
        for (unit, owner) in (0u32..).zip(&self.owner) {
            if let Some(slot) = owner {
                lists[*slot].push(unit);
            }
        }
        lists.into_iter().map(|list| list.into_iter().collect()).collect()
    }
}
