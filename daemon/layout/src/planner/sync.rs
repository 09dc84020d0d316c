//! Where the gradients of a stage meet over the replicas.
//!
//! The columns are what the active slots of a most reduced replica own, so nothing travels in it. In every
//! other replica the columns are given to slots so that together they own as many bytes of their columns as possible:
//! an assignment problem, solved exactly. Of several most reduced replicas the one is taken with which least travels in all.

use crate::{Group, JobSpec, Partitions, Slot, StageId, SyncAxis, SyncColumns, Units};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

/// Of so many different ways to be split each is tried as the columns.
const TRIED: usize = 16;

pub(super) fn columns(job: &JobSpec, stage: StageId, groups: &[Group]) -> SyncColumns {
    let stages = job.parallel.pipeline as usize;
    let of_stage: Vec<&Group> = groups.iter().skip(stage.0 as usize).step_by(stages).collect();
    let ways = Way::of(&of_stage);
    let least = ways.iter().map(|way| way.slots.len()).min().unwrap_or(0);
    let reduced = ways.iter().filter(|way| way.slots.len() == least).take(TRIED);
    let tried = reduced.map(|reference| Choice::new(job, stage, reference, &ways));
    // `min_by_key` gives the first of equals.
    let Some(choice) = tried.min_by_key(|choice| Reverse(choice.kept)) else {
        return SyncColumns { stage, columns: 0, hosts: vec![Vec::new(); of_stage.len()], axes: Vec::new() };
    };
    let hosts = of_stage.iter().map(|group| choice.hosts.get(&key(group)).cloned().unwrap_or_default());
    SyncColumns { stage, columns: least as u32, hosts: hosts.collect(), axes: choice.axes }
}

/// Groups with the same key are split alike.
fn key(group: &Group) -> *const Partitions {
    Arc::as_ptr(&group.partitions)
}

/// One way in which groups of the stage are split.
struct Way<'a> {
    group: &'a Group,
    slots: Vec<Slot>,
    /// How many groups.
    count: u64,
}

impl<'a> Way<'a> {
    /// The ways of all groups that train, in the order of their first groups.
    fn of(groups: &[&'a Group]) -> Vec<Self> {
        let mut ways: Vec<Self> = Vec::new();
        let mut known = HashMap::new();
        for &group in groups.iter().filter(|group| !group.partitions.is_empty()) {
            let way = *known.entry(key(group)).or_insert_with(|| {
                ways.push(Self { group, slots: group.active(), count: 0 });
                ways.len() - 1
            });
            ways[way].count += 1;
        }
        ways
    }
}

/// Columns and their hosts.
struct Choice {
    axes: Vec<SyncAxis>,
    hosts: HashMap<*const Partitions, Vec<Slot>>,
    /// Parameters that do not travel.
    kept: u64,
}

impl Choice {
    fn new(job: &JobSpec, stage: StageId, reference: &Way<'_>, ways: &[Way<'_>]) -> Self {
        let columns =
            |sets: &[Units]| reference.slots.iter().map(|slot| sets[slot.0 as usize].clone()).collect();
        let partitions = reference.group.partitions.iter();
        let axes: Vec<_> =
            partitions.map(|(axis, sets)| SyncAxis { axis: *axis, columns: columns(sets) }).collect();
        let column_of: Vec<Vec<usize>> = axes.iter().map(column_of).collect();
        let mut choice = Self { axes, hosts: HashMap::new(), kept: 0 };
        for way in ways {
            // Of each column, the parameters that each slot owns.
            let mut overlaps = vec![vec![0; way.slots.len()]; reference.slots.len()];
            for ((axis, sets), column_of) in way.group.partitions.iter().zip(&column_of) {
                let params = job.unit_params(stage, axis.family);
                for (index, slot) in way.slots.iter().enumerate() {
                    for unit in sets[slot.0 as usize].iter() {
                        overlaps[column_of[unit as usize]][index] += params;
                    }
                }
            }
            let hosts = assign(&overlaps);
            let kept: u64 = overlaps.iter().zip(&hosts).map(|(overlaps, host)| overlaps[*host]).sum();
            choice.kept += way.count * kept;
            choice.hosts.insert(key(way.group), hosts.into_iter().map(|host| way.slots[host]).collect());
        }
        choice
    }
}

/// The column of each unit.
fn column_of(axis: &SyncAxis) -> Vec<usize> {
    let mut column_of = vec![0; axis.columns.iter().map(|units| units.len() as usize).sum()];
    for (column, units) in axis.columns.iter().enumerate() {
        units.iter().for_each(|unit| column_of[unit as usize] = column);
    }
    column_of
}

/// Gives each row a column of its own so that the sum of `gain[row][column]` is the largest. Needs rows <= columns.
///
/// The Hungarian method by shortest augmenting paths, with potentials; O(rows^2 * columns).
fn assign(gain: &[Vec<u64>]) -> Vec<usize> {
    let (rows, columns) = (gain.len(), gain.first().map_or(0, Vec::len));
    let gain = |row: usize, column: usize| gain[row][column] as i64;
    let mut row_price = vec![0; rows];
    let mut column_price = vec![0; columns];
    let mut row_of: Vec<Option<usize>> = vec![None; columns];
    for start in 0..rows {
        let mut distance = vec![i64::MAX; columns];
        let mut before: Vec<Option<usize>> = vec![None; columns];
        let mut done = vec![false; columns];
        let (mut row, mut reached) = (start, None);
        loop {
            let (mut least, mut nearest) = (i64::MAX, 0);
            for column in (0..columns).filter(|&column| !done[column]) {
                let cost = -gain(row, column) - row_price[row] - column_price[column];
                if cost < distance[column] {
                    distance[column] = cost;
                    before[column] = reached;
                }
                if distance[column] < least {
                    (least, nearest) = (distance[column], column);
                }
            }
            row_price[start] += least;
            for column in 0..columns {
                if let (true, Some(row)) = (done[column], row_of[column]) {
                    row_price[row] += least;
                    column_price[column] -= least;
                } else if !done[column] {
                    distance[column] = distance[column].saturating_sub(least);
                }
            }
            done[nearest] = true;
            reached = Some(nearest);
            match row_of[nearest] {
                Some(next) => row = next,
                None => break,
            }
        }
        while let Some(column) = reached {
            row_of[column] = Some(before[column].and_then(|previous| row_of[previous]).unwrap_or(start));
            reached = before[column];
        }
    }
    let mut column_of = vec![0; rows];
    for (column, row) in row_of.iter().enumerate() {
        if let Some(row) = row {
            column_of[*row] = column;
        }
    }
    column_of
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn best(gain: &[Vec<u64>], used: &mut Vec<usize>) -> u64 {
        let Some((row, rest)) = gain.split_first() else {
            return 0;
        };
        let mut most = 0;
        for (column, gain) in row.iter().enumerate() {
            if !used.contains(&column) {
                used.push(column);
                most = most.max(gain + best(rest, used));
                used.pop();
            }
        }
        most
    }

    proptest! {
        #[test]
        fn assignment_is_optimal(
            gain in (1..=5_usize, 0..=2_usize).prop_flat_map(|(rows, more)| {
                prop::collection::vec(prop::collection::vec(0..50_u64, rows + more), rows)
            })
        ) {
            let columns = assign(&gain);
            let mut distinct = columns.clone();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), gain.len());
            let sum: u64 = gain.iter().zip(&columns).map(|(row, column)| row[*column]).sum();
            prop_assert_eq!(sum, best(&gain, &mut Vec::new()));
        }
    }
}
