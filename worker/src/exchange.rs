//! The sum of gradients over replicas, while the backward pass still runs.
//!
//! A parcel of gradients ([`Parcel`]) goes through three stages, each an operation of a group of its own: it is handed
//! over to the hosts of its columns inside the group, summed over the replicas by each column's hosts, and returned to
//! its owners. Nothing of it is waited for before the pass is over: whenever a bucket is ready, the parcels under way
//! whose operation has ended move on to the next stage, and [`Exchange::finish`] waits for the rest.
//!
//! # Order
//! Every rank of a group must submit the same operations in the same order, whatever the timing. Each stage has a
//! communicator of its own, parcels enter every stage in the order in which they left (one never overtakes an
//! older one), and all ranks have the same parcels: so every communicator sees parcel 0, 1, 2, ... on all its ranks.
//! Tensor-parallel sums go through yet another communicator, so no parcel is ever queued in front of one.
//!
//! # No deadlock
//! During the pass nothing here blocks: a rank reaches the end of its pass if its group does. From there on it waits
//! for the oldest parcel's present stage. That operation needs the same stage of the same parcel on other ranks, which
//! these enter after the stages before it and after older parcels: waiting always leads to an older parcel or an
//! earlier stage, and the hand-over of the first one needs nothing but that the pass ends.
//!
//! # The same bits
//! What is summed, in which operation and in which order of ranks, is a function of the layout. When it happens is
//! not part of it: a sum that leaves under backward has the same bits as one that leaves after it.

use crate::groups::{CommError, Communicator, Running, numbers};
use crate::parcels::{Parcel, pack, unpack};
use crate::sync::SyncPlan;
use reknit_model::{Bucket, GradientSink, Real, Shard, ShardError};
use reknit_plane::{Element, Op, Reduce};
use std::collections::HashMap;
use std::ops::Range;

#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    #[error(transparent)]
    Plane(#[from] CommError),
    #[error("the sum of gradients: {0}")]
    Shard(#[from] ShardError),
    #[error("the backward pass was done with {0:?} out of turn")]
    OutOfTurn(Bucket),
}

/// The communicators of a rank's part in the sum.
#[derive(Debug, Default)]
pub struct SumGroups {
    /// The rank's own group, once for each direction; `None` where nothing is handed over.
    pub handover: Option<Communicator>,
    pub giveback: Option<Communicator>,
    /// The hosts of this rank's sync column; `None` when it hosts none or there is one replica.
    pub column: Option<Communicator>,
}

impl SumGroups {
    pub fn communicators(&mut self) -> impl Iterator<Item = &mut Communicator> {
        [&mut self.handover, &mut self.giveback, &mut self.column].into_iter().flatten()
    }

    /// Leaves the groups in order, so that slower peers see an end and not a death.
    pub fn retire(self) {
        for group in [self.handover, self.giveback, self.column].into_iter().flatten() {
            group.retire();
        }
    }
}

/// A rank's gradients on their way to becoming the sum over all replicas, from one step to the next of an epoch.
#[derive(Debug)]
pub struct Exchange<T> {
    groups: SumGroups,
    parcels: Vec<Parcel>,
    /// Of each parcel.
    flights: Vec<Flight<T>>,
    idle: Idle<T>,
    /// Parcels that have left, and of these the ones that are back.
    left: usize,
    landed: usize,
    /// The rank whose replicated gradients are those of its group; `None` when there is nobody to pass them on to.
    replicated_root: Option<usize>,
    /// Squares are summed up.
    norm: bool,
}

/// Buffers that no parcel needs at present, by length: parcels are alike from layer to layer, so that a few buffers serve
/// all of them, and are still in the cache.
#[derive(Debug, Default)]
struct Idle<T>(HashMap<usize, Vec<Vec<T>>>);

impl<T: Real> Idle<T> {
    /// What it holds is not told.
    fn take(&mut self, len: usize) -> Vec<T> {
        let idle = self.0.get_mut(&len).and_then(Vec::pop);
        idle.unwrap_or_else(|| vec![T::ZERO; len])
    }

    fn put(&mut self, buffer: Vec<T>) {
        self.0.entry(buffer.len()).or_default().push(buffer);
    }
}

/// One parcel in one step.
#[derive(Debug)]
struct Flight<T> {
    stage: Stage,
    work: Option<Running>,
    /// The gradients taken out of the shard so far, by bucket.
    own: Vec<Vec<T>>,
    /// What this rank gives to others and what they give to it.
    passing: Vec<T>,
    /// Of the gradients that came back.
    squares: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Not all of its buckets are ready.
    Loading,
    HandedOver,
    Summed,
    Returned,
    /// Its gradients are back in the shard.
    Landed,
}

impl<T> Flight<T> {
    fn new() -> Self {
        Self { stage: Stage::Loading, work: None, own: Vec::new(), passing: Vec::new(), squares: 0.0 }
    }

    /// The stage's operation, if there is one, has ended.
    fn is_done(&self) -> bool {
        self.work.as_ref().is_none_or(|work| work.is_done())
    }
}

impl<T: Real + Element> Exchange<T> {
    pub fn communicators(&mut self) -> impl Iterator<Item = &mut Communicator> {
        self.groups.communicators()
    }

    pub fn new(groups: SumGroups, parcels: Vec<Parcel>, sync: &SyncPlan, norm: bool) -> Self {
        let others = sync.is_needed() && sync.give.len() > 1;
        Self {
            groups,
            flights: parcels.iter().map(|_| Flight::new()).collect(),
            idle: Idle(HashMap::new()),
            parcels,
            left: 0,
            landed: 0,
            replicated_root: others.then_some(sync.replicated_root),
            norm,
        }
    }

    /// A new step. What is still under way of one that failed is forgotten.
    pub fn begin(&mut self) {
        self.left = 0;
        self.landed = 0;
        for flight in &mut self.flights {
            flight.stage = Stage::Loading;
            flight.work = None;
            flight.own.clear();
            flight.squares = 0.0;
        }
    }

    /// Lets leave what has not left yet and waits until everything is back: the shard's gradients are then the sum over
    /// all replicas, the same bits in each, and the replicated ones the same on all ranks (REPLICATED).
    ///
    /// After an error the shard's gradients are garbage, and some may be missing until they are zeroed.
    pub fn finish(&mut self, shard: &mut Shard<T>, tensor: &mut Communicator) -> Result<(), ExchangeError> {
        while let Some(bucket) = self.expected() {
            self.ready(shard, bucket)?;
        }
        while self.landed < self.parcels.len() {
            self.move_on(self.landed, shard)?;
            self.advance(shard)?;
        }
        if let Some(root) = self.replicated_root {
            let values = shard.take_replicated_gradients();
            let values = tensor.run_on(values, |buffer| Op::Broadcast { root, buffer })?;
            shard.put_replicated_gradients(values)?;
        }
        Ok(())
    }

    /// The sum of this rank's squared gradients, without the replicated ones: always added in the same order.
    pub fn norm_squared(&self) -> f64 {
        self.flights.iter().map(|flight| flight.squares).sum()
    }

    pub fn into_groups(self) -> SumGroups {
        self.groups
    }

    /// The bucket that the backward pass is done with next.
    fn expected(&self) -> Option<Bucket> {
        let loaded = self.flights.get(self.left)?.own.len();
        self.parcels[self.left].buckets.get(loaded).copied()
    }

    /// Moves every parcel on as far as that can be done without waiting.
    fn advance(&mut self, shard: &mut Shard<T>) -> Result<(), ExchangeError> {
        let mut older = Stage::Landed;
        for number in self.landed..self.left {
            while self.flights[number].stage < older && self.flights[number].is_done() {
                self.move_on(number, shard)?;
            }
            older = self.flights[number].stage;
        }
        Ok(())
    }

    /// Waits for the end of the parcel's stage and enters the next.
    fn move_on(&mut self, number: usize, shard: &mut Shard<T>) -> Result<(), ExchangeError> {
        let Self { groups, parcels, flights, idle, .. } = self;
        let (parcel, flight) = (&parcels[number], &mut flights[number]);
        let work = flight.work.take();
        match flight.stage {
            Stage::Loading => {
                flight.stage = Stage::HandedOver;
                if let Some(handover) = groups.handover.as_mut().filter(|_| parcel.crossing) {
                    flight.hand_over(parcel, idle, handover);
                }
            }
            Stage::HandedOver => {
                if let (Some(handover), Some(work)) = (&groups.handover, work) {
                    flight.passing = numbers(handover.wait(work)?)?;
                }
                flight.stage = Stage::Summed;
                if let Some(hosts) = groups.column.as_mut().filter(|_| parcel.column > 0) {
                    flight.sum(parcel, idle, hosts);
                }
            }
            Stage::Summed => {
                if let (Some(hosts), Some(work)) = (&groups.column, work) {
                    let column = numbers(hosts.wait(work)?)?;
                    flight.keep_own(parcel, column, idle);
                }
                flight.stage = Stage::Returned;
                if let Some(giveback) = groups.giveback.as_mut().filter(|_| parcel.crossing) {
                    flight.give_back(parcel, giveback);
                }
            }
            Stage::Returned => {
                if let (Some(giveback), Some(work)) = (&groups.giveback, work) {
                    flight.passing = numbers(giveback.wait(work)?)?;
                    flight.take_back(parcel, idle);
                }
                flight.stage = Stage::Landed;
                flight.land(parcel, shard, self.norm)?;
                self.landed += 1;
            }
            Stage::Landed => {}
        }
        Ok(())
    }
}

impl<T: Real + Element> Flight<T> {
    fn hand_over(&mut self, parcel: &Parcel, idle: &mut Idle<T>, group: &mut Communicator) {
        self.passing = if parcel.passed_whole {
            std::mem::take(&mut self.own[0])
        } else {
            let mut passing = idle.take(parcel.passing());
            pack(&parcel.give, &self.own, &mut passing);
            passing
        };
        self.pass(&parcel.given, &parcel.handed, group);
    }

    fn pass(&mut self, send: &[Range<usize>], receive: &[Range<usize>], group: &mut Communicator) {
        let buffer = T::wrap(std::mem::take(&mut self.passing));
        let (send, receive) = (send.to_vec(), receive.to_vec());
        self.work = Some(group.submit(Op::AllToAllV { buffer, send, receive }));
    }

    fn sum(&mut self, parcel: &Parcel, idle: &mut Idle<T>, hosts: &mut Communicator) {
        let buffer = if parcel.whole {
            std::mem::take(&mut self.own[0])
        } else {
            let mut column = idle.take(parcel.column);
            pack(&parcel.keep, &self.own, &mut column);
            pack(&parcel.take, std::slice::from_ref(&self.passing), &mut column);
            column
        };
        let reduce = Reduce::Sum;
        self.work = Some(hosts.submit(Op::AllReduce { reduce, buffer: T::wrap(buffer) }));
    }

    /// Takes the summed gradients that are this rank's out of its column, and those to be returned.
    fn keep_own(&mut self, parcel: &Parcel, column: Vec<T>, idle: &mut Idle<T>) {
        if parcel.whole {
            self.own[0] = column;
        } else {
            unpack(&parcel.keep, &column, &mut self.own);
            unpack(&parcel.take, &column, std::slice::from_mut(&mut self.passing));
            idle.put(column);
        }
    }

    /// The hand-over, the other way round.
    fn give_back(&mut self, parcel: &Parcel, group: &mut Communicator) {
        self.pass(&parcel.handed, &parcel.given, group);
    }

    fn take_back(&mut self, parcel: &Parcel, idle: &mut Idle<T>) {
        let passing = std::mem::take(&mut self.passing);
        if parcel.passed_whole {
            self.own[0] = passing;
        } else {
            unpack(&parcel.give, &passing, &mut self.own);
            idle.put(passing);
        }
    }

    fn land(&mut self, parcel: &Parcel, shard: &mut Shard<T>, norm: bool) -> Result<(), ShardError> {
        for (bucket, gradients) in parcel.buckets.iter().zip(self.own.drain(..)) {
            match *bucket {
                Bucket::Axis(axis) => {
                    shard.put_gradients(axis, gradients)?;
                    if norm {
                        self.squares += shard.axis_norm_squared(axis);
                    }
                }
                Bucket::Replicated => shard.put_replicated_gradients(gradients)?,
            }
        }
        Ok(())
    }
}

impl<T: Real + Element> GradientSink<T> for Exchange<T> {
    type Error = ExchangeError;

    fn ready(&mut self, shard: &mut Shard<T>, bucket: Bucket) -> Result<(), ExchangeError> {
        if self.expected() != Some(bucket) {
            return Err(ExchangeError::OutOfTurn(bucket));
        }
        let flight = &mut self.flights[self.left];
        flight.own.push(match bucket {
            Bucket::Axis(axis) => shard.take_gradients(axis),
            Bucket::Replicated => shard.take_replicated_gradients(),
        });
        if flight.own.len() == self.parcels[self.left].buckets.len() {
            self.left += 1;
        }
        self.advance(shard)
    }
}
