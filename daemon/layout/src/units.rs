//! Sets of unit numbers, kept as sorted, disjoint, non-touching half-open intervals.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A set of units. As JSON: a list of `[start, end)` pairs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "Vec<(u32, u32)>", into = "Vec<(u32, u32)>")]
pub struct Units(Vec<(u32, u32)>);

impl Units {
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// The units `start..end`; empty when `start >= end`.
    pub fn range(start: u32, end: u32) -> Self {
        if start < end { Self(vec![(start, end)]) } else { Self::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many units.
    pub fn len(&self) -> u32 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    pub fn contains(&self, unit: u32) -> bool {
        self.0.iter().any(|&(start, end)| (start..end).contains(&unit))
    }

    pub fn intervals(&self) -> &[(u32, u32)] {
        &self.0
    }

    /// The units in ascending order: the order in which a shard stores them.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().flat_map(|&(start, end)| start..end)
    }

    /// The place of `unit` in [`Units::iter`], if it is in the set.
    pub fn position(&self, unit: u32) -> Option<u32> {
        let mut before = 0;
        for &(start, end) in &self.0 {
            if (start..end).contains(&unit) {
                return Some(before + unit - start);
            }
            before += end - start;
        }
        None
    }

    pub fn insert(&mut self, unit: u32) {
        *self = self.union(&Self::range(unit, unit + 1));
    }

    pub fn union(&self, other: &Self) -> Self {
        self.0.iter().chain(&other.0).copied().collect()
    }

    pub fn intersection(&self, other: &Self) -> Self {
        let mut both = Vec::new();
        let (mut i, mut j) = (0, 0);
        while i < self.0.len() && j < other.0.len() {
            let (a, b) = (self.0[i], other.0[j]);
            let (start, end) = (a.0.max(b.0), a.1.min(b.1));
            if start < end {
                both.push((start, end));
            }
            if a.1 < b.1 { i += 1 } else { j += 1 }
        }
        both.into_iter().collect()
    }

    pub fn difference(&self, other: &Self) -> Self {
        let mut left = Vec::new();
        for &(mut start, end) in &self.0 {
            for &(from, to) in &other.0 {
                if to <= start || from >= end {
                    continue;
                }
                if start < from {
                    left.push((start, from));
                }
                start = start.max(to);
            }
            if start < end {
                left.push((start, end));
            }
        }
        Self(left)
    }
}

impl FromIterator<(u32, u32)> for Units {
    /// Accepts intervals in any order, overlapping or empty.
    fn from_iter<I: IntoIterator<Item = (u32, u32)>>(intervals: I) -> Self {
        let mut sorted: Vec<_> = intervals.into_iter().filter(|(start, end)| start < end).collect();
        sorted.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::with_capacity(sorted.len());
        for (start, end) in sorted {
            match merged.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                Some(_) | None => merged.push((start, end)),
            }
        }
        Self(merged)
    }
}

impl FromIterator<u32> for Units {
    fn from_iter<I: IntoIterator<Item = u32>>(units: I) -> Self {
        units.into_iter().map(|unit| (unit, unit + 1)).collect()
    }
}

impl From<Vec<(u32, u32)>> for Units {
    fn from(intervals: Vec<(u32, u32)>) -> Self {
        intervals.into_iter().collect()
    }
}

impl From<Units> for Vec<(u32, u32)> {
    fn from(units: Units) -> Self {
        units.0
    }
}

impl fmt::Display for Units {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, &(start, end)) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            if end == start + 1 {
                write!(f, "{comma}{start}")?;
            } else {
                write!(f, "{comma}{start}-{}", end - 1)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_operations() {
        let a: Units = [(0, 3), (6, 9)].into_iter().collect();
        let b = Units::range(2, 7);
        assert_eq!(a.intersection(&b), [(2, 3), (6, 7)].into_iter().collect());
        assert_eq!(a.difference(&b), [(0, 2), (7, 9)].into_iter().collect());
        assert_eq!(a.union(&b), Units::range(0, 9));
        assert_eq!(a.len(), 6);
        assert_eq!(a.position(7), Some(4));
        assert_eq!(a.position(4), None);
        assert_eq!(a.to_string(), "0-2,6-8");
    }
}
