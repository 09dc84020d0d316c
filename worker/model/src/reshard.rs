//! State that moves between ranks: units out, a new shard in.

use crate::Real;
use crate::shape::Shape;
use crate::shard::{AxisShard, Shard, ShardError, Tensor};
use bytemuck::{cast_slice, cast_slice_mut};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use std::collections::BTreeMap;
use std::ops::Range;
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
    #[error("{} came, and this rank has it already or shall not own it", describe(.axis, .units))]
    Unexpected { axis: Option<Axis>, units: Units },
    #[error("replicated parameters are neither held nor received")]
    MissingReplicated,
    #[error("the replicated parameters received have {got} bytes instead of {expected}")]
    ReplicatedLength { got: usize, expected: usize },
    #[error("the layout gives this rank units {units} of {axis}, which the model does not have")]
    Unknown { axis: Axis, units: Units },
    #[error("the held shard belongs to another model")]
    OtherModel,
}

/// Fresh buffers for what a rank lacks of its new shard: it fills them part by part while its old shard trains or waits
/// untouched (ONLY-COPY), and [`Shard::adopt`] puts them in.
#[derive(Debug)]
pub struct Intake<T> {
    axes: BTreeMap<Axis, Fresh<T>>,
    replicated: Option<Fresh<T>>,
}

/// The state of units of one axis. For the replicated parameters: of one unit without output rows.
#[derive(Debug)]
struct Fresh<T> {
    units: Units,
    /// Values of one unit: of its input rows and of its output rows.
    lens: [usize; 2],
    /// In the order in which a unit's state travels: input and output rows of the weights, of the first moments and of
    /// the second.
    buffers: [Vec<T>; 6],
    /// Those whose last part is here.
    came: Units,
}

impl<T: Real> Fresh<T> {
    fn new(units: Units, lens: [usize; 2]) -> Self {
        let count = units.len() as usize;
        let buffers = std::array::from_fn(|slice| vec![T::ZERO; count * lens[slice % 2]]);
        Self { units, lens, buffers, came: Units::default() }
    }

    /// Writes the bytes from `at` on of a block of `units`; `None` when some of them are not expected here.
    fn import(&mut self, units: &Units, at: usize, bytes: &[u8]) -> Option<()> {
        let positions = positions_in(&self.units, units).ok()?;
        let Self { lens, buffers, .. } = self;
        let mut rest = bytes;
        walk(*lens, at / size_of::<T>(), bytes.len() / size_of::<T>(), |unit, slice, range| {
            let start = positions[unit] * lens[slice % 2];
            let target = &mut buffers[slice][start + range.start..start + range.end];
            let (now, later) = rest.split_at(size_of_val(target));
            cast_slice_mut(target).copy_from_slice(now);
            rest = later;
        });
        if at + bytes.len() == block_len::<T>(*lens, units) {
            self.came = self.came.union(units);
        }
        Some(())
    }
}

impl<T: Real> Intake<T> {
    /// `lacks`: units that will come; `replicated`: the replicated parameters will, too.
    ///
    /// # Errors
    /// The model does not have some of the units.
    pub fn new(
        model: &ModelSpec,
        lacks: &BTreeMap<Axis, Units>,
        replicated: bool,
    ) -> Result<Self, RebuildError> {
        let (shape, known) = (Shape::new(model), model.axes());
        let mut axes = BTreeMap::new();
        for (&axis, units) in lacks {
            let all = Units::range(0, if known.contains(&axis) { model.units(axis.family) } else { 0 });
            let unknown = units.difference(&all);
            if !unknown.is_empty() {
                return Err(RebuildError::Unknown { axis, units: unknown });
            }
            let (input, output) = shape.unit_rows(axis.family);
            axes.insert(axis, Fresh::new(units.clone(), [input * shape.hidden, output * shape.hidden]));
        }
        let replicated = replicated.then(|| Fresh::new(Units::range(0, 1), [shape.replicated_len(), 0]));
        Ok(Self { axes, replicated })
    }

    /// All of its memory is really there: the kernel gives a page only when it is written to.
    pub fn touched(mut self) -> Self {
        let fresh = self.axes.values_mut().chain(&mut self.replicated);
        for buffer in fresh.flat_map(|fresh| &mut fresh.buffers) {
            // Else the compiler knows what they hold.
            std::hint::black_box(&mut *buffer).fill(T::ZERO);
        }
        self
    }

    /// Writes the bytes from `at` on of a block as [`Shard::export_part`] reads them. The parts of a block come in order.
    ///
    /// # Errors
    /// Something of it is not expected here; nothing was written then.
    pub fn import_part(
        &mut self,
        axis: Option<Axis>,
        units: &Units,
        at: usize,
        bytes: &[u8],
    ) -> Result<(), RebuildError> {
        let (fresh, units) = match axis {
            Some(axis) => (self.axes.get_mut(&axis), units),
            None => (self.replicated.as_mut(), &Units::range(0, 1)),
        };
        let written = fresh.and_then(|fresh| fresh.import(units, at, bytes));
        written.ok_or_else(|| RebuildError::Unexpected { axis, units: units.clone() })
    }

    /// Everything that was to come is here.
    ///
    /// # Errors
    /// Names the first that is not.
    pub fn check_complete(&self) -> Result<(), RebuildError> {
        for (&axis, fresh) in &self.axes {
            if let Some(unit) = fresh.units.difference(&fresh.came).iter().next() {
                return Err(RebuildError::Missing { axis, unit });
            }
        }
        match &self.replicated {
            Some(fresh) if fresh.came.is_empty() => Err(RebuildError::MissingReplicated),
            Some(_) | None => Ok(()),
        }
    }

    /// As [`Shard::replicated_digest`]; `None` when the replicated parameters are not among what comes.
    pub fn replicated_digest(&self) -> Option<String> {
        let fresh = self.replicated.as_ref()?;
        let hash = fresh.buffers.iter().fold(FNV_OFFSET, |hash, values| fnv1a(hash, values));
        Some(format!("{hash:016x}"))
    }
}

/// Of a block's six slices for each unit (see [`Fresh::buffers`]) those that the values `at..at + len` of it lie in, in
/// order: the unit's number in the block, the slice, and where in it.
fn walk(lens: [usize; 2], at: usize, len: usize, mut visit: impl FnMut(usize, usize, Range<usize>)) {
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
fn block_len<T>(lens: [usize; 2], units: &Units) -> usize {
    units.len() as usize * 3 * (lens[0] + lens[1]) * size_of::<T>()
}

/// Where each of the units stands among `all`.
///
/// # Errors
/// The first that does not.
fn positions_in(all: &Units, units: &Units) -> Result<Vec<usize>, u32> {
    units.iter().map(|unit| all.position(unit).map(|at| at as usize).ok_or(unit)).collect()
}

impl<T: Real> Shard<T> {
    /// Owns nothing, and knows no replicated parameters.
    pub fn empty(model: &ModelSpec) -> Self {
        Self::zeros(model, &BTreeMap::new())
    }

    /// Of `owned`, what this shard does not have.
    pub fn lacks(&self, owned: &BTreeMap<Axis, Units>) -> BTreeMap<Axis, Units> {
        let nothing = Units::default();
        let lacks = owned
            .iter()
            .map(|(axis, units)| (*axis, units.difference(self.owned.get(axis).unwrap_or(&nothing))));
        lacks.filter(|(_, units)| !units.is_empty()).collect()
    }

    /// Reads the bytes from `at` on of a block: of what [`Shard::export_units`] appends for the units, or for no axis
    /// [`Shard::export_replicated`]. `at` and the length are multiples of a value's size, and the block goes so far.
    ///
    /// # Errors
    /// A unit is not on this rank.
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

    /// Becomes the shard of `owned`: units that stay are moved inside their buffers, those that came are put between them,
    /// the others go. Layer by layer, and what came is let go with its layer, so that the memory beyond old and new shard is
    /// what came and no more than a layer. Gradients are of no step any more.
    ///
    /// The caller has seen that nothing is missing ([`Shard::lacks`], [`Intake::check_complete`]); then this cannot fail.
    pub fn adopt(&mut self, owned: &BTreeMap<Axis, Units>, mut intake: Intake<T>) {
        for axis in self.model.axes() {
            let wanted = owned.get(&axis).cloned().unwrap_or_default();
            let came = intake.axes.remove(&axis);
            if let Some(shard) = self.axis_mut(axis) {
                adopt_axis(shard, wanted, came);
            }
        }
        if let Some(fresh) = intake.replicated {
            let [weights, _, first_moments, _, second_moments, _] = fresh.buffers;
            self.replicated.weights = weights;
            self.replicated.first_moments = first_moments;
            self.replicated.second_moments = second_moments;
        }
        self.owned.clone_from(owned);
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

fn describe(axis: &Option<Axis>, units: &Units) -> String {
    match axis {
        Some(axis) => format!("units {units} of {axis}"),
        None => "a copy of the replicated parameters".to_owned(),
    }
}

fn adopt_axis<T: Real>(shard: &mut AxisShard<T>, wanted: Units, came: Option<Fresh<T>>) {
    if came.is_none() && shard.units == wanted {
        return;
    }
    let (units, buffers) = match came {
        Some(Fresh { units, buffers, .. }) => (units, buffers),
        None => (Units::default(), Default::default()),
    };
    let old = std::mem::replace(&mut shard.units, wanted);
    let change = Change { old: &old, wanted: &shard.units, came: &units };
    for (slice, fresh) in buffers.into_iter().enumerate() {
        let tensor = if slice % 2 == 0 { &mut shard.input } else { &mut shard.output };
        let unit_len = tensor.unit_len;
        change.apply(unit_len, tensor.state_mut()[slice / 2], fresh);
    }
    shard.gradients = vec![T::ZERO; shard.len()];
}

/// From old units and those that came to the wanted ones.
struct Change<'a> {
    old: &'a Units,
    wanted: &'a Units,
    came: &'a Units,
}

impl Change<'_> {
    fn apply<T: Real>(&self, unit_len: usize, buffer: &mut Vec<T>, fresh: Vec<T>) {
        if self.old.is_empty() && self.came == self.wanted {
            *buffer = fresh;
            return;
        }
        let kept = self.old.intersection(self.wanted);
        let places = |all: &Units, units: &Units| positions_in(all, units).unwrap_or_default();
        let shift = |from: usize, to: usize, buffer: &mut Vec<T>| {
            if from != to {
                buffer.copy_within(from * unit_len..(from + 1) * unit_len, to * unit_len);
            }
        };
        // Closes up from the front, then opens the gaps from the back: no unit is overwritten before it has moved.
        for (to, from) in places(self.old, &kept).into_iter().enumerate() {
            shift(from, to, buffer);
        }
        buffer.truncate(kept.len() as usize * unit_len);
        let length = self.wanted.len() as usize * unit_len;
        if length > buffer.len() {
            buffer.reserve_exact(length - buffer.len());
        }
        buffer.resize(length, T::ZERO);
        buffer.shrink_to_fit();
        for (from, to) in places(self.wanted, &kept).into_iter().enumerate().rev() {
            shift(from, to, buffer);
        }
        for (from, to) in places(self.wanted, self.came).into_iter().enumerate() {
            let source = &fresh[from * unit_len..(from + 1) * unit_len];
            buffer[to * unit_len..(to + 1) * unit_len].copy_from_slice(source);
        }
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
