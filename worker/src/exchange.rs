//! The sum of gradients over replicas, through sync columns.

use crate::groups::{CommError, Communicator, Team};
use crate::sync::{Pieces, SyncPlan};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use reknit_model::{Real, Shard, ShardError};
use reknit_plane::{Element, Op, Reduce};
use std::collections::HashMap;

#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    #[error(transparent)]
    Plane(#[from] CommError),
    #[error("the sum of gradients: {0}")]
    Shard(#[from] ShardError),
}

/// Replaces the shard's gradients by their sum over all replicas; every replica gets the same bits.
///
/// Units outside a rank's own column go to the column's host first and come back after. The replicated gradients
/// travel with column 0 and are passed on inside each group, so that they are bit-equal everywhere (REPLICATED).
pub fn sum_over_replicas<T: Real + Element>(
    model: &ModelSpec,
    shard: &mut Shard<T>,
    team: &mut Team,
) -> Result<(), ExchangeError> {
    let Team { sync, tensor, column, .. } = team;
    let handed = if sync.handover { hand_over(model, shard, sync, tensor)? } else { Vec::new() };
    let mut summed = Vec::new();
    if let (Some(column), Some(hosts)) = (&sync.column, column) {
        let with_replicated = column.index == 0;
        let mut values = gather(model, shard, &column.pieces, &sync.take, &handed)?;
        if with_replicated {
            values.extend_from_slice(shard.replicated_gradients());
        }
        hosts.all_reduce(Reduce::Sum, &mut values)?;
        if with_replicated {
            let units = values.len() - shard.replicated_gradients().len();
            shard.set_replicated_gradients(&values.split_off(units))?;
        }
        keep_own(model, shard, &column.pieces, &values)?;
        summed = values;
    }
    if sync.handover {
        give_back(model, shard, sync, tensor, &summed)?;
    }
    if tensor.size() > 1 {
        let replicated = shard.replicated_gradients().to_vec();
        let root = sync.replicated_root;
        let replicated = tensor.run_on(replicated, |buffer| Op::Broadcast { root, buffer })?;
        shard.set_replicated_gradients(&replicated)?;
    }
    Ok(())
}

/// Sends what others host and returns what this rank hosts for others: by rank, then axis, then unit.
fn hand_over<T: Real + Element>(
    model: &ModelSpec,
    shard: &Shard<T>,
    sync: &SyncPlan,
    tensor: &mut Communicator,
) -> Result<Vec<T>, ExchangeError> {
    let mut out = Vec::new();
    for (axis, units) in sync.give.iter().flatten() {
        shard.copy_gradients(*axis, units, &mut out)?;
    }
    let (send, receive) = (lengths::<T>(model, &sync.give), lengths::<T>(model, &sync.take));
    Ok(tensor.run_on(out, |buffer| Op::AllToAllV { buffer, send, receive })?)
}

/// The way back of [`hand_over`].
fn give_back<T: Real + Element>(
    model: &ModelSpec,
    shard: &mut Shard<T>,
    sync: &SyncPlan,
    tensor: &mut Communicator,
    summed: &[T],
) -> Result<(), ExchangeError> {
    let mut out = Vec::new();
    if let Some(column) = &sync.column {
        let places = places::<T>(model, std::iter::once(&column.pieces));
        for (axis, unit) in units_of(sync.take.iter()) {
            let at = places[&(axis, unit)];
            out.extend_from_slice(&summed[at..at + Shard::<T>::unit_len(model, axis.family)]);
        }
    }
    let (send, receive) = (lengths::<T>(model, &sync.take), lengths::<T>(model, &sync.give));
    let values = tensor.run_on(out, |buffer| Op::AllToAllV { buffer, send, receive })?;
    let mut at = 0;
    for (axis, units) in sync.give.iter().flatten() {
        let length = units.len() as usize * Shard::<T>::unit_len(model, axis.family);
        shard.set_gradients(*axis, units, &values[at..at + length])?;
        at += length;
    }
    Ok(())
}

/// The column's values: this rank's own gradients, and those that others handed over.
fn gather<T: Real>(
    model: &ModelSpec,
    shard: &Shard<T>,
    column: &Pieces,
    take: &[Pieces],
    handed: &[T],
) -> Result<Vec<T>, ShardError> {
    let places = places::<T>(model, take.iter());
    let mut values = Vec::new();
    for (axis, unit) in units_of(std::iter::once(column)) {
        match places.get(&(axis, unit)) {
            Some(&at) => values.extend_from_slice(&handed[at..at + Shard::<T>::unit_len(model, axis.family)]),
            None => shard.copy_gradients(axis, &Units::range(unit, unit + 1), &mut values)?,
        }
    }
    Ok(values)
}

/// Takes the summed gradients of the units that are both this rank's and in its column.
fn keep_own<T: Real>(
    model: &ModelSpec,
    shard: &mut Shard<T>,
    column: &Pieces,
    values: &[T],
) -> Result<(), ShardError> {
    let mut at = 0;
    for (axis, unit) in units_of(std::iter::once(column)) {
        let next = at + Shard::<T>::unit_len(model, axis.family);
        if shard.owned().get(&axis).is_some_and(|owned| owned.contains(unit)) {
            shard.set_gradients(axis, &Units::range(unit, unit + 1), &values[at..next])?;
        }
        at = next;
    }
    Ok(())
}

fn units_of<'a>(pieces: impl Iterator<Item = &'a Pieces>) -> impl Iterator<Item = (Axis, u32)> {
    pieces.flatten().flat_map(|(axis, units)| units.iter().map(|unit| (*axis, unit)))
}

/// Where each unit's values start when these pieces follow each other.
fn places<'a, T: Real>(
    model: &ModelSpec,
    pieces: impl Iterator<Item = &'a Pieces>,
) -> HashMap<(Axis, u32), usize> {
    let mut at = 0;
    let mut places = HashMap::new();
    for (axis, unit) in units_of(pieces) {
        places.insert((axis, unit), at);
        at += Shard::<T>::unit_len(model, axis.family);
    }
    places
}

/// How many values each rank's pieces have.
fn lengths<T: Real>(model: &ModelSpec, pieces: &[Pieces]) -> Vec<usize> {
    let length =
        |(axis, units): &(Axis, Units)| units.len() as usize * Shard::<T>::unit_len(model, axis.family);
    pieces.iter().map(|pieces| pieces.iter().map(length).sum()).collect()
}
