//! State that leaves for other ranks, as bytes. How it comes in is told in [`crate::arrivals`].

use crate::Real;
use crate::shard::{AxisShard, Shard, ShardError};
use bytemuck::cast_slice;
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use std::ops::Range;

/// Where the values of a block from `at` on lie, as far as they do so side by side: in which of the block's six slices (input
/// and output rows of the weights of all its units, of the first moments and of the second), and where in that tensor.
/// `lens` are the values of one unit's rows in each, and `stored` the units there. Nothing beyond the block's end.
///
/// # Errors
/// The unit is not among those stored.
pub(crate) fn run_at(
    lens: [usize; 2],
    block: &Units,
    stored: &Units,
    at: usize,
) -> Result<(usize, Range<usize>), u32> {
    let count = block.len() as usize;
    let (mut slice, mut at) = (0, at);
    while slice < 6 && at >= count * lens[slice % 2] {
        at -= count * lens[slice % 2];
        slice += 1;
    }
    if slice == 6 {
        return Ok((5, 0..0));
    }
    let unit_len = lens[slice % 2];
    let mut before = 0;
    for &(start, end) in block.intervals() {
        let (unit, rest) = (start + (at / unit_len - before) as u32, at % unit_len);
        if unit < end {
            let place = stored.position(unit).ok_or(unit)? as usize;
            let together =
                stored.intervals().iter().find(|(_, stop)| unit < *stop).map_or(unit, |(_, stop)| *stop);
            let units = (end.min(together) - unit) as usize;
            return Ok((slice, place * unit_len + rest..(place + units) * unit_len));
        }
        before += (end - start) as usize;
    }
    Ok((5, 0..0))
}

/// Where each of the units stands among `all`.
///
/// # Errors
/// The first that does not.
pub(crate) fn positions_in(all: &Units, units: &Units) -> Result<Vec<usize>, u32> {
    units.iter().map(|unit| all.position(unit).map(|at| at as usize).ok_or(unit)).collect()
}

impl<T: Real> Shard<T> {
    /// Bytes of a block: the units' weights and both Adam moments. No axis stands for the replicated parameters.
    pub fn block_len(model: &ModelSpec, axis: Option<Axis>, units: &Units) -> usize {
        let values = match axis {
            Some(axis) => units.len() as usize * Self::unit_len(model, axis.family),
            None => model.replicated_params() as usize,
        };
        values * 3 * size_of::<T>()
    }

    /// The bytes from `at` on of a block, as far as they lie side by side: of the weights, the first and the second moments of
    /// all its units, each as the input rows of all units and then the output rows of all. No axis stands for the replicated
    /// parameters, which are one such unit.
    ///
    /// # Errors
    /// A unit is not on this rank, or the replicated parameters have not come.
    pub fn part(&self, axis: Option<Axis>, units: &Units, at: usize) -> Result<&[u8], ShardError> {
        let (at, into) = (at / size_of::<T>(), at % size_of::<T>());
        let Some(axis) = axis else {
            if !self.knows_replicated() {
                return Err(ShardError::NotCome);
            }
            let (state, len) = (self.replicated.state(), self.replicated.unit_len);
            return Ok(state.get(at / len).map_or(&[], |values| &cast_slice(&values[at % len..])[into..]));
        };
        let none = Units::default();
        let (shard, stored) = self.axis(axis).map_or((None, &none), |shard| (Some(shard), &shard.units));
        let lens = Self::unit_parts(&self.model, axis.family);
        let (slice, range) = run_at(lens, units, stored, at).map_err(|unit| ShardError::NotOwned {
            axis,
            unit,
            owned: stored.clone(),
        })?;
        let tensor = shard.map(|shard| shard.tensors()[slice % 2]);
        Ok(tensor.map_or(&[], |tensor| &cast_slice(&tensor.state()[slice / 2][range])[into..]))
    }

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
}

/// A unit's state in the order in which it travels.
fn state_slices<T: Real>(shard: &AxisShard<T>, position: usize) -> impl Iterator<Item = &[T]> {
    let [input, output] = shard.tensors();
    let pairs = input.state().into_iter().zip(output.state());
    pairs.flat_map(move |(of_input, of_output)| {
        [&of_input[input.place(position)], &of_output[output.place(position)]]
    })
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
