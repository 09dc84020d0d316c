//! State that comes from other ranks: it is put behind what the shard holds, in the shard's own buffers, and takes its place
//! among it at the commit.
//!
//! Until then nothing that is held is touched (ONLY-COPY), and [`Shard::give_up_room`] undoes everything. So a change needs no
//! memory beyond the old and the new shard, and each value of it is written to a fresh page once: a first touch costs more than
//! the copy itself.

use crate::Real;
use crate::pages::lengthen;
use crate::reshard::{positions_in, run_at};
use crate::shard::{AxisShard, Shard};
use bytemuck::cast_slice_mut;
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use std::collections::BTreeMap;

/// Why a shard cannot become the one that is asked for. What it holds is as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArrivalError {
    #[error("unit {unit} of {axis} is neither held nor received")]
    Missing { axis: Axis, unit: u32 },
    #[error("replicated parameters are neither held nor received")]
    MissingReplicated,
    #[error("{} came, and this rank has it already or shall not own it", describe(.axis, .units))]
    Unexpected { axis: Option<Axis>, units: Units },
    #[error("a block of {} has {expected} bytes, and {came} came", describe(.axis, .units))]
    Length { axis: Option<Axis>, units: Units, came: usize, expected: usize },
    #[error("the layout gives this rank units {units} of {axis}, which the model does not have")]
    Unknown { axis: Axis, units: Units },
}

/// What a shard waits for.
#[derive(Debug)]
pub(crate) struct Arrivals {
    /// What it will own.
    wanted: BTreeMap<Axis, Units>,
    axes: BTreeMap<Axis, Missing>,
    replicated: Option<Missing>,
}

/// Units that lie, or will lie, behind the held ones. For the replicated parameters: the one unit.
#[derive(Debug)]
struct Missing {
    units: Units,
    /// Those whose last part is here.
    came: Units,
}

impl Missing {
    fn all(units: Units) -> Self {
        Self { units, came: Units::default() }
    }

    fn first(&self) -> Option<u32> {
        self.units.difference(&self.came).iter().next()
    }
}

impl<T: Real> Shard<T> {
    /// A shard that holds nothing, with room for all of `owned` and the replicated parameters. All of its memory is really
    /// there, where the kernel would give it page by page.
    ///
    /// # Errors
    /// The model does not have some of the units.
    pub fn awaiting(model: &ModelSpec, owned: &BTreeMap<Axis, Units>) -> Result<Self, ArrivalError> {
        let mut shard = Self::zeros(model, &BTreeMap::new());
        shard.make_room(owned)?;
        if let Some(arrivals) = &mut shard.arrivals {
            arrivals.replicated = Some(Missing::all(Units::range(0, 1)));
        }
        Ok(shard)
    }

    /// Makes room for what it lacks of `owned`. Gradients keep their values. Room that it has made already is used, and what
    /// came into it is given up.
    ///
    /// # Errors
    /// The model does not have some of the units.
    pub fn make_room(&mut self, owned: &BTreeMap<Axis, Units>) -> Result<(), ArrivalError> {
        let (model, known) = (&self.model, self.model.axes());
        for (&axis, units) in owned {
            let all = Units::range(0, if known.contains(&axis) { model.units(axis.family) } else { 0 });
            let unknown = units.difference(&all);
            if !unknown.is_empty() {
                return Err(ArrivalError::Unknown { axis, units: unknown });
            }
        }
        let mut axes = BTreeMap::new();
        let mut rooms = Vec::new();
        for (axis, shard) in known.into_iter().zip(self.axes_mut()) {
            let units = owned.get(&axis).map(|wanted| wanted.difference(&shard.units)).unwrap_or_default();
            rooms.push((shard, units.len()));
            if !units.is_empty() {
                axes.insert(axis, Missing::all(units));
            }
        }
        at_once(&mut rooms, |(shard, more)| shard.resize(shard.units.len() + *more));
        self.arrivals = Some(Arrivals { wanted: owned.clone(), axes, replicated: None });
        Ok(())
    }

    /// It waits to become the shard of exactly this.
    pub fn awaits(&self, owned: &BTreeMap<Axis, Units>) -> bool {
        self.arrivals.as_ref().is_some_and(|arrivals| arrivals.wanted == *owned)
    }

    /// It has replicated parameters that others may have of it.
    pub(crate) fn knows_replicated(&self) -> bool {
        self.arrivals.as_ref().is_none_or(|arrivals| arrivals.replicated.is_none())
    }

    /// Room for the bytes from `at` on of a block as [`Shard::part`] tells of it, as far as they lie side by side; nothing
    /// at its end.
    ///
    /// # Errors
    /// The block is not expected here.
    pub fn room(&mut self, axis: Option<Axis>, units: &Units, at: usize) -> Result<&mut [u8], ArrivalError> {
        let unexpected = || ArrivalError::Unexpected { axis, units: units.clone() };
        let missing = self.missing(axis).ok_or_else(unexpected)?;
        let (at, into) = (at / size_of::<T>(), at % size_of::<T>());
        let Some(axis) = axis else {
            let len = self.replicated.unit_len;
            let values = self.replicated.state_mut().into_iter().nth(at / len);
            return Ok(values.map_or(&mut [], |values| &mut cast_slice_mut(&mut values[at % len..])[into..]));
        };
        let lens = Self::unit_parts(&self.model, axis.family);
        let (slice, range) = run_at(lens, units, &missing.units, at).map_err(|_unit| unexpected())?;
        let Some(shard) = self.axis_mut(axis) else { return Err(unexpected()) };
        let held = shard.units.len() as usize * lens[slice % 2];
        let tensor = [&mut shard.input, &mut shard.output].into_iter().nth(slice % 2);
        let values = tensor.and_then(|tensor| tensor.state_mut().into_iter().nth(slice / 2));
        Ok(values.map_or(&mut [], |values| &mut cast_slice_mut(&mut values[held..][range])[into..]))
    }

    /// All of the block is in its room.
    pub fn arrived(&mut self, axis: Option<Axis>, units: &Units) {
        let the_one = Units::range(0, 1);
        let block = if axis.is_some() { units } else { &the_one };
        if let Some(missing) = self.missing_mut(axis) {
            missing.came = missing.came.union(&block.intersection(&missing.units));
        }
    }

    /// Writes a whole block as [`Shard::part`] tells of it.
    ///
    /// # Errors
    /// It is not expected here, or is too long or too short; it has not arrived then.
    pub fn receive(&mut self, axis: Option<Axis>, units: &Units, bytes: &[u8]) -> Result<(), ArrivalError> {
        let mut at = 0;
        loop {
            let room = self.room(axis, units, at)?;
            let len = room.len().min(bytes.len() - at);
            if len == 0 {
                break;
            }
            room[..len].copy_from_slice(&bytes[at..at + len]);
            at += len;
        }
        let expected = Self::block_len(&self.model, axis, units);
        if bytes.len() != expected {
            let came = bytes.len();
            return Err(ArrivalError::Length { axis, units: units.clone(), came, expected });
        }
        self.arrived(axis, units);
        Ok(())
    }

    /// Everything that was to come is here.
    ///
    /// # Errors
    /// Names the first that is not.
    pub fn check_arrived(&self) -> Result<(), ArrivalError> {
        let Some(arrivals) = &self.arrivals else { return Ok(()) };
        for (&axis, missing) in &arrivals.axes {
            if let Some(unit) = missing.first() {
                return Err(ArrivalError::Missing { axis, unit });
            }
        }
        match arrivals.replicated.as_ref().and_then(Missing::first) {
            Some(_) => Err(ArrivalError::MissingReplicated),
            None => Ok(()),
        }
    }

    /// Becomes the shard that it made room for: what came takes its place among what stays, and the rest goes. Gradients are
    /// of no step any more.
    ///
    /// The caller has seen that nothing is missing ([`Shard::check_arrived`]); then this cannot fail.
    pub fn adopt(&mut self) {
        self.just_adopted = true;
        let Some(Arrivals { wanted, axes, .. }) = self.arrivals.take() else {
            return;
        };
        let known = self.model.axes();
        let mut shards: Vec<_> = known.iter().zip(self.axes_mut()).collect();
        let none = Units::default();
        at_once(&mut shards, |(axis, shard)| {
            let came = axes.get(axis).map_or(&none, |missing| &missing.units);
            shard.rearrange(wanted.get(axis).cloned().unwrap_or_default(), came);
        });
        self.owned = wanted;
    }

    /// Gives up what it waits for, also what came of it.
    pub fn give_up_room(&mut self) {
        let axes = self.arrivals.take().map(|arrivals| arrivals.axes).unwrap_or_default();
        for axis in axes.into_keys() {
            if let Some(shard) = self.axis_mut(axis) {
                shard.resize(shard.units.len());
            }
        }
    }

    fn missing(&self, axis: Option<Axis>) -> Option<&Missing> {
        let arrivals = self.arrivals.as_ref()?;
        match axis {
            Some(axis) => arrivals.axes.get(&axis),
            None => arrivals.replicated.as_ref(),
        }
    }

    fn missing_mut(&mut self, axis: Option<Axis>) -> Option<&mut Missing> {
        let arrivals = self.arrivals.as_mut()?;
        match axis {
            Some(axis) => arrivals.axes.get_mut(&axis),
            None => arrivals.replicated.as_mut(),
        }
    }
}

impl<T: Real> AxisShard<T> {
    /// Room for so many units; what is there of them stays.
    fn resize(&mut self, units: u32) {
        let units = units as usize;
        let gradients = units * self.unit_len();
        for tensor in [&mut self.input, &mut self.output] {
            let len = units * tensor.unit_len;
            tensor.state_mut().into_iter().for_each(|buffer| resize(buffer, len));
        }
        resize(&mut self.gradients, gradients);
    }

    /// `came` lies behind all that is held.
    fn rearrange(&mut self, wanted: Units, came: &Units) {
        if came.is_empty() && self.units == wanted {
            return;
        }
        let old = std::mem::replace(&mut self.units, wanted);
        let kept = old.intersection(&self.units);
        let from = positions_in(&old, &kept).unwrap_or_default().into_iter();
        let from: Vec<_> = from.chain((old.len()..old.len() + came.len()).map(|at| at as usize)).collect();
        let places = |units: &Units| positions_in(&self.units, units).unwrap_or_default();
        let to = [places(&kept), places(came)].concat();
        for tensor in [&mut self.input, &mut self.output] {
            let unit_len = tensor.unit_len;
            for buffer in tensor.state_mut() {
                close_up(buffer, unit_len, &from);
                reorder(buffer, unit_len, to.clone());
            }
        }
        self.resize(self.units.len());
    }
}

/// What makes room or moves units about: more threads than this gain nothing, since memory and the kernel's own locks are in
/// their way.
const AT_ONCE: usize = 4;

/// On several threads: touching new memory takes longer than all that comes after it. Members are paused meanwhile; a
/// newcomer, whose memory is made while the others train, takes no more processor time for it than one thread would.
fn at_once<I: Send>(items: &mut [I], work: impl Fn(&mut I) + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(AT_ONCE));
    std::thread::scope(|scope| {
        for part in items.chunks_mut(items.len().div_ceil(threads).max(1)) {
            scope.spawn(|| part.iter_mut().for_each(&work));
        }
    });
}

fn resize<T: Real>(buffer: &mut Vec<T>, len: usize) {
    lengthen(buffer, len);
    buffer.truncate(len);
    buffer.shrink_to_fit();
}

/// Moves the units at `from`, which ascends, to the front.
fn close_up<T: Real>(buffer: &mut [T], unit_len: usize, from: &[usize]) {
    for (to, &from) in from.iter().enumerate().filter(|(to, from)| to != *from) {
        buffer.copy_within(from * unit_len..(from + 1) * unit_len, to * unit_len);
    }
}

/// Moves the unit at each place `n` to place `to[n]`, with no memory beside.
fn reorder<T: Real>(buffer: &mut [T], unit_len: usize, mut to: Vec<usize>) {
    for place in 0..to.len() {
        // All before it are where they belong, so that each swap brings another one there.
        while to[place] != place {
            let target = to[place];
            let (front, back) = buffer.split_at_mut(target * unit_len);
            front[place * unit_len..][..unit_len].swap_with_slice(&mut back[..unit_len]);
            to.swap(place, target);
        }
    }
}

fn describe(axis: &Option<Axis>, units: &Units) -> String {
    match axis {
        Some(axis) => format!("units {units} of {axis}"),
        None => "the replicated parameters".to_owned(),
    }
}
