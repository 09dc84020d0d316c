//! What leaves together for the sum over replicas, and where each value of it lies on the way: pure, made once an
//! epoch, so that a step only copies.

use crate::sync::{Pieces, SyncPlan};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use reknit_model::{Bucket, Real, Shard};
use std::collections::HashMap;
use std::ops::Range;

/// Buckets are put together until they have so many bytes a column. An operation of the host plane costs about what
/// this many bytes cost on the way, so larger parcels gain little; and smaller ones leave earlier, above all the last,
/// which no backward pass is left to hide.
pub const PARCEL_BYTES: usize = 64 << 10;

/// Buckets whose gradients leave for the sum together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parcel {
    /// In the order in which a backward pass is done with them.
    pub buckets: Vec<Bucket>,
    /// Somebody in the group hands something of it over, so that all of the group takes part.
    pub crossing: bool,
    /// Between this rank's gradients, a buffer for each bucket, and what passes between it and other hosts: first what it
    /// hands over to them, then what they hand to it.
    pub give: Vec<Run>,
    /// Between this rank's gradients and the column that it hosts.
    pub keep: Vec<Run>,
    /// Between what passes, which is one buffer, and the column.
    pub take: Vec<Run>,
    /// Of what passes, by rank of the group: what it is handed by this one, and what it hands to this one.
    pub given: Vec<Range<usize>>,
    pub handed: Vec<Range<usize>>,
    /// Values of the column; 0 when this rank hosts none.
    pub column: usize,
    /// The column is one bucket just as it lies in this rank's gradients: it is moved instead of copied.
    pub whole: bool,
    /// What passes is, in the same way, one bucket that is handed over as a whole.
    pub passed_whole: bool,
}

/// Values that lie side by side in one of several buffers and in a packed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub buffer: usize,
    pub at: usize,
    pub packed: usize,
    pub len: usize,
}

/// The layout has a hole: a sum without this unit would train a wrong model without a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("nobody in the group brings {axis} unit {unit} to the host of its column")]
pub struct Unbrought {
    pub axis: Axis,
    pub unit: u32,
}

impl Parcel {
    /// All of a step's parcels in the order in which they leave: the same on every rank of the stage.
    ///
    /// # Errors
    /// The sync columns do not fit what the group's slots own.
    pub fn all<T: Real>(model: &ModelSpec, sync: &SyncPlan, target: usize) -> Result<Vec<Self>, Unbrought> {
        let bytes = |bucket: &Bucket| match bucket {
            Bucket::Axis(axis) => {
                let units = model.units(axis.family) as usize / sync.columns.max(1);
                units * Shard::<T>::unit_len(model, axis.family) * size_of::<T>()
            }
            Bucket::Replicated => model.replicated_params() as usize * size_of::<T>(),
        };
        let mut loads: Vec<Vec<Bucket>> = Vec::new();
        for bucket in Bucket::in_order(model) {
            match loads.last_mut() {
                Some(load) if load.iter().map(bytes).sum::<usize>() < target => load.push(bucket),
                Some(_) | None => loads.push(vec![bucket]),
            }
        }
        loads.into_iter().map(|buckets| Self::new::<T>(model, sync, buckets)).collect()
    }

    fn new<T: Real>(model: &ModelSpec, sync: &SyncPlan, buckets: Vec<Bucket>) -> Result<Self, Unbrought> {
        let stops = |pieces: &[Pieces]| stops::<T>(model, &buckets, pieces);
        let own = |stop: &Stop| own_place::<T>(model, sync, stop);
        let by_rank = |stops: &[Stop], mut start: usize| -> Vec<Range<usize>> {
            let mut counts = vec![0; sync.give.len()];
            stops.iter().for_each(|stop| counts[stop.list] += stop.len);
            let range = |count| {
                start += count;
                start - count..start
            };
            counts.into_iter().map(range).collect()
        };

        let mut give = Vec::new();
        let outgoing = stops(&sync.give);
        let given = by_rank(&outgoing, 0);
        for stop in &outgoing {
            join(&mut give, stop.run(stop.bucket, own(stop).ok_or(stop.unbrought())?));
        }
        let incoming = stops(&sync.take);
        let behind = given.last().map_or(0, |last| last.end);
        let brought: HashMap<_, _> =
            incoming.iter().map(|stop| (stop.what(), behind + stop.packed)).collect();

        let (mut keep, mut take) = (Vec::new(), Vec::new());
        let mut column = 0;
        if let Some(hosted) = sync.column.as_ref().filter(|_| sync.is_needed()) {
            for stop in stops(std::slice::from_ref(&hosted.pieces)) {
                match (own(&stop), brought.get(&stop.what())) {
                    (Some(at), _) => join(&mut keep, stop.run(stop.bucket, at)),
                    (None, Some(&at)) => join(&mut take, stop.run(0, at)),
                    (None, None) => return Err(stop.unbrought()),
                }
                column += stop.len;
            }
            let replicated = buckets.iter().position(|bucket| *bucket == Bucket::Replicated);
            if let Some(buffer) = replicated.filter(|_| hosted.index == 0) {
                let len = model.replicated_params() as usize;
                join(&mut keep, Run { buffer, at: 0, packed: column, len });
                column += len;
            }
        }
        let moved = [Run { buffer: 0, at: 0, packed: 0, len: own_len::<T>(model, sync, &buckets) }];
        let alone = buckets.len() == 1 && incoming.is_empty();
        let (whole, passed_whole) = (alone && keep == moved, alone && give == moved);
        let handed = by_rank(&incoming, behind);
        let crossing = buckets.iter().any(|bucket| match bucket {
            Bucket::Axis(axis) => sync.crossing.contains(axis),
            Bucket::Replicated => false,
        });
        Ok(Self { buckets, crossing, give, keep, take, given, handed, column, whole, passed_whole })
    }

    /// How many values pass between this rank and others.
    pub fn passing(&self) -> usize {
        self.handed.last().map_or(0, |last| last.end)
    }
}

/// Fills a packed buffer.
pub fn pack<T: Copy>(runs: &[Run], buffers: &[Vec<T>], packed: &mut [T]) {
    for run in runs {
        let values = &buffers[run.buffer][run.at..run.at + run.len];
        packed[run.packed..run.packed + run.len].copy_from_slice(values);
    }
}

/// The way back of [`pack`].
pub fn unpack<T: Copy>(runs: &[Run], packed: &[T], buffers: &mut [Vec<T>]) {
    for run in runs {
        let values = &packed[run.packed..run.packed + run.len];
        buffers[run.buffer][run.at..run.at + run.len].copy_from_slice(values);
    }
}

/// One side of a unit, input or output, in a packed buffer.
#[derive(Debug, Clone, Copy)]
struct Stop {
    /// Which of the lists of pieces it came from.
    list: usize,
    bucket: usize,
    axis: Axis,
    side: usize,
    unit: u32,
    packed: usize,
    len: usize,
}

impl Stop {
    fn what(&self) -> (Axis, usize, u32) {
        (self.axis, self.side, self.unit)
    }

    fn run(&self, buffer: usize, at: usize) -> Run {
        Run { buffer, at, packed: self.packed, len: self.len }
    }

    fn unbrought(&self) -> Unbrought {
        Unbrought { axis: self.axis, unit: self.unit }
    }
}

/// What a packed buffer holds of these buckets, in its order: list, bucket, side, unit.
fn stops<T: Real>(model: &ModelSpec, buckets: &[Bucket], lists: &[Pieces]) -> Vec<Stop> {
    let mut stops = Vec::new();
    let mut packed = 0;
    for (list, pieces) in lists.iter().enumerate() {
        for (bucket, axis) in buckets.iter().enumerate().filter_map(|(number, bucket)| match bucket {
            Bucket::Axis(axis) => Some((number, *axis)),
            Bucket::Replicated => None,
        }) {
            let found = pieces.iter().find(|(of, _)| *of == axis);
            let units = found.map(|(_, units)| units.clone()).unwrap_or_default();
            for (side, len) in Shard::<T>::unit_parts(model, axis.family).into_iter().enumerate() {
                for unit in units.iter() {
                    stops.push(Stop { list, bucket, axis, side, unit, packed, len });
                    packed += len;
                }
            }
        }
    }
    stops
}

/// Where it lies in this rank's own gradients of the axis: the input rows of all units, then the output rows.
fn own_place<T: Real>(model: &ModelSpec, sync: &SyncPlan, stop: &Stop) -> Option<usize> {
    let owned = sync.owned.get(&stop.axis)?;
    let position = owned.position(stop.unit)? as usize;
    let before = &Shard::<T>::unit_parts(model, stop.axis.family)[..stop.side];
    Some(before.iter().sum::<usize>() * owned.len() as usize + position * stop.len)
}

fn own_len<T: Real>(model: &ModelSpec, sync: &SyncPlan, buckets: &[Bucket]) -> usize {
    let len = |bucket: &Bucket| match bucket {
        Bucket::Axis(axis) => {
            let units = sync.owned.get(axis).map_or(0, Units::len) as usize;
            units * Shard::<T>::unit_len(model, axis.family)
        }
        Bucket::Replicated => model.replicated_params() as usize,
    };
    buckets.iter().map(len).sum()
}

/// Appends a run, as a longer last one if it follows it in both buffers.
fn join(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last)
            if last.buffer == run.buffer
                && last.at + last.len == run.at
                && last.packed + last.len == run.packed =>
        {
            last.len += run.len;
        }
        Some(_) | None => runs.push(run),
    }
}
