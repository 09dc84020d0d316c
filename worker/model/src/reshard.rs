//! State that leaves for other ranks, as bytes. How it comes in is told in [`crate::arrivals`].

use crate::Real;
use crate::shard::{AxisShard, Shard, ShardError};
use bytemuck::cast_slice;
use reknit_layout::{Axis, Units};
use std::ops::Range;

/// Of a block's six slices for each unit (input and output rows of the weights, of the first moments and of the second) those that the values `at..at + len` of it lie in, in
/// order: the unit's number in the block, the slice, and where in it.
pub(crate) fn walk(
    lens: [usize; 2],
    at: usize,
    len: usize,
    mut visit: impl FnMut(usize, usize, Range<usize>),
) {
    let unit_len = 3 * (lens[0] + lens[1]);
    let (mut at, end) = (at, at + len);
    while at < end {
        let (unit, mut start) = (at / unit_len, at % unit_len);
        let mut slice = 0;
        while start >= lens[slice % 2] {
            start -= lens[slice % 2];
            slice += 1;
        }
        let count = (lens[slice % 2] - start).min(end - at);
        visit(unit, slice, start..start + count);
        at += count;
    }
}

/// In bytes.
pub(crate) fn block_len<T>(lens: [usize; 2], units: &Units) -> usize {
    units.len() as usize * 3 * (lens[0] + lens[1]) * size_of::<T>()
}

/// Where each of the units stands among `all`.
///
/// # Errors
/// The first that does not.
pub(crate) fn positions_in(all: &Units, units: &Units) -> Result<Vec<usize>, u32> {
    units.iter().map(|unit| all.position(unit).map(|at| at as usize).ok_or(unit)).collect()
}

impl<T: Real> Shard<T> {
    /// Reads the bytes from `at` on of a block: of what [`Shard::export_units`] appends for the units, or for no axis
    /// [`Shard::export_replicated`]. `at` and the length are multiples of a value's size, and the block goes so far.
    ///
    /// # Errors
    /// A unit is not on this rank, or the replicated parameters have not come.
    pub fn export_part(
        &self,
        axis: Option<Axis>,
        units: &Units,
        at: usize,
        out: &mut [u8],
    ) -> Result<(), ShardError> {
        let (at, len) = (at / size_of::<T>(), out.len() / size_of::<T>());
        let mut rest = out;
        let mut copy = |values: &[T]| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(size_of_val(values));
            now.copy_from_slice(cast_slice(values));
            rest = later;
        };
        let Some(axis) = axis else {
            if !self.knows_replicated() {
                return Err(ShardError::NotCome);
            }
            let state = self.replicated.state();
            walk([self.replicated.unit_len, 0], at, len, |_, slice, range| copy(&state[slice / 2][range]));
            return Ok(());
        };
        let positions = self.positions(axis, units)?;
        if let Some(shard) = self.axis(axis) {
            let tensors = shard.tensors();
            walk(tensors.map(|tensor| tensor.unit_len), at, len, |unit, slice, range| {
                let tensor = tensors[slice % 2];
                let start = positions[unit] * tensor.unit_len;
                copy(&tensor.state()[slice / 2][start + range.start..start + range.end]);
            });
        }
        Ok(())
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
