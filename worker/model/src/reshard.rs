//! State that moves between ranks: units out, a new shard in.

use crate::Real;
use crate::shard::{AxisShard, Shard, ShardError, Tensor};
use bytemuck::{cast_slice, cast_slice_mut};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a rank got from others for its new shard.
#[derive(Debug, Default)]
pub struct Received {
    blocks: BTreeMap<Axis, Vec<(Units, Vec<u8>)>>,
    replicated: Option<Vec<u8>>,
}

impl Received {
    pub fn new() -> Self {
        Self::default()
    }

    /// Units as [`Shard::export_units`] wrote them.
    pub fn add_units(&mut self, axis: Axis, units: Units, bytes: Vec<u8>) {
        self.blocks.entry(axis).or_default().push((units, bytes));
    }

    /// Replicated parameters as [`Shard::export_replicated`] wrote them.
    pub fn set_replicated(&mut self, bytes: Vec<u8>) {
        self.replicated = Some(bytes);
    }

    /// The bytes of one unit, `unit_bytes` long.
    fn unit(&self, axis: Axis, unit: u32, unit_bytes: usize) -> Result<&[u8], RebuildError> {
        let blocks = self.blocks.get(&axis).map_or(&[][..], Vec::as_slice);
        let found = blocks.iter().find_map(|(units, bytes)| {
            let position = units.position(unit)? as usize;
            Some((units, bytes, position * unit_bytes))
        });
        let (units, bytes, start) = found.ok_or(RebuildError::Missing { axis, unit })?;
        let expected = units.len() as usize * unit_bytes;
        if bytes.len() != expected {
            return Err(RebuildError::Length { axis, units: units.clone(), got: bytes.len(), expected });
        }
        Ok(&bytes[start..start + unit_bytes])
    }
}

/// Why no new shard was made. The old one is as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RebuildError {
    #[error("unit {unit} of {axis} is neither held nor received")]
    Missing { axis: Axis, unit: u32 },
    #[error("the block received for units {units} of {axis} has {got} bytes instead of {expected}")]
    Length { axis: Axis, units: Units, got: usize, expected: usize },
    #[error("replicated parameters are neither held nor received")]
    MissingReplicated,
    #[error("the replicated parameters received have {got} bytes instead of {expected}")]
    ReplicatedLength { got: usize, expected: usize },
    #[error("the layout gives this rank units {units} of {axis}, which the model does not have")]
    Unknown { axis: Axis, units: Units },
    #[error("the held shard belongs to another model")]
    OtherModel,
}

impl<T: Real> Shard<T> {
    /// Appends the units' state, ascending, little-endian: for each unit its weights, first moments and second moments,
    /// each in the order of the crate's table. `units.len() * unit_len * 3 * size_of::<T>()` bytes.
    ///
    /// # Errors
    /// A unit is not on this rank; `out` is then as it was.
    pub fn export_units(&self, axis: Axis, units: &Units, out: &mut Vec<u8>) -> Result<(), ShardError> {
        let positions = self.positions(axis, units)?;
        let Some(shard) = self.axis(axis) else {
            return Ok(());
        };
        out.reserve(positions.len() * shard.unit_len() * 3 * size_of::<T>());
        for position in positions {
            for values in state_slices(shard, position) {
                out.extend_from_slice(cast_slice(values));
            }
        }
        Ok(())
    }

    /// Appends the replicated parameters' weights, first moments and second moments, little-endian.
    pub fn export_replicated(&self, out: &mut Vec<u8>) {
        for values in self.replicated.state() {
            out.extend_from_slice(cast_slice(values));
        }
    }

    /// FNV-1a (64 bits) over the bytes of [`Shard::export_replicated`], as 16 hexadecimal digits.
    pub fn replicated_digest(&self) -> String {
        let state = self.replicated.state();
        let hash = state.into_iter().fold(FNV_OFFSET, |hash, values| fnv1a(hash, values));
        format!("{hash:016x}")
    }

    /// FNV-1a (64 bits) over the bytes [`Shard::export_units`] gives for the unit.
    ///
    /// # Errors
    /// The unit is not on this rank.
    pub fn digest(&self, axis: Axis, unit: u32) -> Result<u64, ShardError> {
        let positions = self.positions(axis, &Units::range(unit, unit + 1))?;
        let state = self
            .axis(axis)
            .into_iter()
            .flat_map(|shard| positions.iter().flat_map(move |&position| state_slices(shard, position)));
        Ok(state.fold(FNV_OFFSET, |hash, values| fnv1a(hash, values)))
    }

    /// A new shard for `owned`, in fresh buffers: units that `old` has are copied from it, the others come from
    /// `received`; so do the replicated parameters if there is no `old`. Gradients are zero. `old` is only read (ONLY-COPY).
    ///
    /// # Errors
    /// Something needed is missing or has the wrong size, or `owned` names what the model does not have.
    pub fn rebuild(
        model: &ModelSpec,
        owned: &BTreeMap<Axis, Units>,
        old: Option<&Self>,
        received: &Received,
    ) -> Result<Self, RebuildError> {
        if old.is_some_and(|old| old.model != *model) {
            return Err(RebuildError::OtherModel);
        }
        let mut shard = Self::zeros(model, owned);
        if let Some(old) = old {
            shard.team = Arc::clone(&old.team);
        }
        for (&axis, units) in owned {
            let known = shard.owned.get(&axis).cloned().unwrap_or_default();
            let units = units.difference(&known);
            if !units.is_empty() {
                return Err(RebuildError::Unknown { axis, units });
            }
        }
        for axis in model.axes() {
            let held = old.and_then(|old| old.axis(axis));
            if let Some(target) = shard.axis_mut(axis) {
                fill_axis(axis, target, held, received)?;
            }
        }
        match (old, &received.replicated) {
            (Some(old), _) => {
                let states = shard.replicated.state_mut().into_iter().zip(old.replicated.state());
                states.for_each(|(target, source)| target.copy_from_slice(source));
            }
            (None, Some(bytes)) => fill_replicated(&mut shard.replicated, bytes)?,
            (None, None) => return Err(RebuildError::MissingReplicated),
        }
        Ok(shard)
    }
}

/// A unit's state in the order in which it travels.
fn state_slices<T: Real>(shard: &AxisShard<T>, position: usize) -> impl Iterator<Item = &[T]> {
    let [input, output] = shard.tensors();
    let pairs = input.state().into_iter().zip(output.state());
    pairs.flat_map(move |(of_input, of_output)| {
        [&of_input[input.place(position)], &of_output[output.place(position)]]
    })
}

fn fill_axis<T: Real>(
    axis: Axis,
    target: &mut AxisShard<T>,
    held: Option<&AxisShard<T>>,
    received: &Received,
) -> Result<(), RebuildError> {
    let unit_bytes = target.unit_len() * 3 * size_of::<T>();
    let AxisShard { units, input, output, .. } = target;
    for (position, unit) in units.iter().enumerate() {
        let (of_input, of_output) = (input.place(position), output.place(position));
        let pairs = input.state_mut().into_iter().zip(output.state_mut());
        let targets = pairs.flat_map(|(to_input, to_output)| {
            [&mut to_input[of_input.clone()], &mut to_output[of_output.clone()]]
        });
        let source = held.and_then(|held| Some((held, held.units.position(unit)?)));
        if let Some((held, position)) = source {
            for (target, source) in targets.zip(state_slices(held, position as usize)) {
                target.copy_from_slice(source);
            }
        } else {
            let mut bytes = received.unit(axis, unit, unit_bytes)?;
            for target in targets {
                let (now, rest) = bytes.split_at(size_of_val(target));
                cast_slice_mut(target).copy_from_slice(now);
                bytes = rest;
            }
        }
    }
    Ok(())
}

fn fill_replicated<T: Real>(target: &mut Tensor<T>, bytes: &[u8]) -> Result<(), RebuildError> {
    let part = target.unit_len * size_of::<T>();
    if bytes.len() != 3 * part {
        return Err(RebuildError::ReplicatedLength { got: bytes.len(), expected: 3 * part });
    }
    for (target, source) in target.state_mut().into_iter().zip(bytes.chunks_exact(part)) {
        cast_slice_mut(target).copy_from_slice(source);
    }
    Ok(())
}

/// Offset basis and prime of the Fowler-Noll-Vo hash, variant 1a, 64 bits.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

fn fnv1a<T: Real>(hash: u64, values: &[T]) -> u64 {
    let bytes: &[u8] = cast_slice(values);
    bytes.iter().fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_fnv1a() {
        // Two of the published test vectors, padded to whole numbers by their choice: "" and "foobar" plus "ab".
        assert_eq!(fnv1a::<f32>(FNV_OFFSET, &[]), 0xcbf2_9ce4_8422_2325);
        let word = f64::from_le_bytes(*b"foobarab");
        let foobar = 0x8594_4171_f739_67e8_u64;
        let expected =
            b"ab".iter().fold(foobar, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME));
        assert_eq!(fnv1a(FNV_OFFSET, &[word]), expected);
    }
}
