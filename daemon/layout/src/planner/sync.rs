//! Where the gradients of a stage meet over the replicas.
//!
//! The columns are what the active slots of the first most reduced replica own, so nothing travels in it. In every
//! other replica the columns are given to slots so that together they own as many bytes of their columns as possible:
//! an assignment problem, solved exactly.

use crate::{Group, JobSpec, StageId, SyncAxis, SyncColumns, Units};

pub(super) fn columns(job: &JobSpec, stage: StageId, groups: &[Group]) -> SyncColumns {
    let of_stage: Vec<&Group> = groups.iter().filter(|group| group.stage == stage).collect();
    let training = of_stage.iter().filter(|group| group.degree() > 0);
    // `min_by_key` gives the first of equals.
    let Some(reference) = training.min_by_key(|group| group.degree()) else {
        return SyncColumns { stage, columns: 0, hosts: vec![Vec::new(); of_stage.len()], axes: Vec::new() };
    };
    let active = reference.active();
    let axes: Vec<SyncAxis> = reference
        .partitions
        .iter()
        .map(|(axis, sets)| SyncAxis {
            axis: *axis,
            columns: active.iter().map(|slot| sets[slot.0 as usize].clone()).collect(),
        })
        .collect();
    let hosts = of_stage.iter().map(|group| {
        let slots = group.active();
        if slots.is_empty() {
            return Vec::new();
        }
        let column = |column| slots.iter().map(|slot| overlap(job, group, *slot, &axes, column)).collect();
        let overlaps: Vec<Vec<i64>> = (0..active.len()).map(column).collect();
        assign(&overlaps).into_iter().map(|index| slots[index]).collect()
    });
    SyncColumns { stage, columns: active.len() as u32, hosts: hosts.collect(), axes }
}

/// Parameters of column `column` that `slot` owns.
fn overlap(job: &JobSpec, group: &Group, slot: crate::Slot, axes: &[SyncAxis], column: usize) -> i64 {
    let own = axes.iter().map(|axis| {
        let sets = group.partitions.get(&axis.axis);
        let owned = sets.and_then(|sets| sets.get(slot.0 as usize));
        let both = owned.map_or(0, |owned: &Units| owned.intersection(&axis.columns[column]).len());
        u64::from(both) * job.unit_params(group.stage, axis.axis.family)
    });
    own.sum::<u64>() as i64
}

/// Gives each row a column of its own so that the sum of `gain[row][column]` is the largest. Needs rows <= columns.
///
/// The Hungarian method by shortest augmenting paths, with potentials; O(rows^2 * columns).
fn assign(gain: &[Vec<i64>]) -> Vec<usize> {
    let (rows, columns) = (gain.len(), gain.first().map_or(0, Vec::len));
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
                let cost = -gain[row][column] - row_price[row] - column_price[column];
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

    fn best(gain: &[Vec<i64>], used: &mut Vec<usize>) -> i64 {
        let Some((row, rest)) = gain.split_first() else {
            return 0;
        };
        let mut most = i64::MIN;
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
                prop::collection::vec(prop::collection::vec(0..50_i64, rows + more), rows)
            })
        ) {
            let columns = assign(&gain);
            let mut distinct = columns.clone();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), gain.len());
            let sum: i64 = gain.iter().zip(&columns).map(|(row, column)| row[*column]).sum();
            prop_assert_eq!(sum, best(&gain, &mut Vec::new()));
        }
    }
}
