//! The communicators of one epoch.

use crate::abort::Aborts;
use crate::exchange::{Exchange, SumGroups};
use crate::messages::{Participant, Prepare, StepPart, Timeouts};
use crate::pace::{Pace, Party};
use crate::parcels::{PARCEL_BYTES, Parcel};
use crate::sync::SyncPlan;
use reknit_layout::{JobSpec, Layout, Place, WorkerKey};
use reknit_model::{Real, TensorParallel};
use reknit_plane::{Buffer, Element, Group, GroupSpec, Lent, Op, Plane, PlaneError, Reduce, Work};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A group of the data plane whose ranks have names.
#[derive(Debug)]
pub struct Communicator {
    group: Box<dyn Group>,
    party: Arc<Party>,
    deadline: Duration,
    pace: Arc<Pace>,
    /// A sum that the model began.
    begun: Option<Running>,
}

/// An operation that goes on by itself until somebody waits for it.
pub struct Running(Box<dyn Work>);

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Running")
    }
}

impl Running {
    /// Waiting for it would not take any time.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }
}

/// A failed operation, with the worker to suspect where the data plane can tell.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{error}{}", .peer.as_ref().map(|peer| format!(" [worker {peer}]")).unwrap_or_default())]
pub struct CommError {
    pub error: PlaneError,
    pub peer: Option<WorkerKey>,
}

impl CommError {
    fn new(error: PlaneError, members: &[WorkerKey]) -> Self {
        let rank = match &error {
            PlaneError::PeerLost { rank, .. } | PlaneError::Mismatch { rank, .. } => Some(*rank),
            PlaneError::Deadline { waiting_for, .. } => waiting_for.first().copied(),
            PlaneError::PeerLeft { .. }
            | PlaneError::Aborted { .. }
            | PlaneError::Handshake { .. }
            | PlaneError::Io { .. } => None,
        };
        let peer = rank.and_then(|rank| members.get(rank).cloned());
        Self { error, peer }
    }
}

impl Communicator {
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// In rank order.
    pub fn members(&self) -> &[WorkerKey] {
        &self.party.members
    }

    /// Starts an operation.
    pub fn submit(&mut self, op: Op) -> Running {
        Running(self.group.submit(op, self.deadline))
    }

    /// Waits for the end of one of this group's operations.
    pub fn wait(&self, running: Running) -> Result<Buffer, CommError> {
        let result = self.pace.wait(&self.party, || running.0.wait());
        result.map_err(|error| CommError::new(error, &self.party.members))
    }

    /// Runs one operation to its end.
    pub fn run(&mut self, op: Op) -> Result<Buffer, CommError> {
        let running = self.submit(op);
        self.wait(running)
    }

    /// Exchanges what lies in lent memory.
    pub fn exchange(&mut self, memory: &mut dyn Lent) -> Result<(), CommError> {
        let Self { group, party, deadline, pace, .. } = self;
        let result = pace.wait(party, || group.exchange(memory, *deadline));
        result.map_err(|error| CommError::new(error, &party.members))
    }

    /// Runs one operation on numbers; it gives back numbers of the same type.
    pub fn run_on<T: Element>(
        &mut self,
        values: Vec<T>,
        op: impl FnOnce(Buffer) -> Op,
    ) -> Result<Vec<T>, CommError> {
        numbers(self.run(op(T::wrap(values)))?)
    }

    pub fn retire(self) {
        self.group.retire();
    }
}

/// The numbers that an operation on numbers of this type gave back.
pub fn numbers<T: Element>(buffer: Buffer) -> Result<Vec<T>, CommError> {
    T::unwrap(buffer).ok_or_else(another_type)
}

fn another_type() -> CommError {
    let detail = "the operation gave back another type".to_owned();
    CommError { error: PlaneError::Io { group: "?".to_owned(), detail }, peer: None }
}

/// The tensor-parallel group as the model uses it.
impl<T: Element> TensorParallel<T> for Communicator {
    type Error = CommError;

    fn all_reduce_sum(&mut self, values: &mut Vec<T>) -> Result<(), CommError> {
        self.all_reduce(Reduce::Sum, values)
    }

    fn all_reduce_max(&mut self, values: &mut Vec<T>) -> Result<(), CommError> {
        self.all_reduce(Reduce::Max, values)
    }

    fn begin_sum(&mut self, values: &mut Vec<T>) -> Result<(), CommError> {
        if self.size() > 1 {
            let buffer = T::wrap(std::mem::take(values));
            self.begun = Some(self.submit(Op::AllReduce { reduce: Reduce::Sum, buffer }));
        }
        Ok(())
    }

    fn finish_sum(&mut self, values: &mut Vec<T>) -> Result<(), CommError> {
        match self.begun.take() {
            Some(running) => *values = numbers(self.wait(running)?)?,
            // Progress all the same: a member without any is suspected.
            None => self.pace.tick(),
        }
        Ok(())
    }

    fn backward_begins(&mut self) {
        self.pace.enter(StepPart::Backward);
    }
}

impl Communicator {
    pub fn all_reduce<T: Element>(&mut self, reduce: Reduce, values: &mut Vec<T>) -> Result<(), CommError> {
        if self.size() == 1 {
            // Progress all the same: a member without any is suspected.
            self.pace.tick();
            return Ok(());
        }
        *values = self.run_on(std::mem::take(values), |buffer| Op::AllReduce { reduce, buffer })?;
        Ok(())
    }
}

/// Joins groups of one epoch under its ticket.
#[derive(Debug, Clone, Copy)]
pub struct Joiner<'a> {
    pub job: &'a JobSpec,
    pub me: &'a WorkerKey,
    pub prepare: &'a Prepare,
    pub timeouts: Timeouts,
    pub pace: &'a Arc<Pace>,
    pub aborts: &'a Aborts,
}

impl Joiner<'_> {
    /// Joins the group of these workers, in this rank order. It is an error when this worker is not among them.
    pub fn join(
        &self,
        plane: &dyn Plane,
        name: String,
        members: &[Participant],
    ) -> Result<Communicator, CommError> {
        let rank = members.iter().position(|member| member.worker == *self.me);
        let rank = rank.ok_or_else(|| gap(&name, "this worker is not among them".to_owned()))?;
        let endpoints = members.iter().map(|member| member.endpoint.clone());
        let spec = GroupSpec {
            job: self.job.name.clone(),
            epoch: self.prepare.epoch.0,
            name,
            members: endpoints.collect(),
            rank,
            ticket: self.prepare.ticket,
            deadline: self.timeouts.join,
        };
        let members: Vec<_> = members.iter().map(|member| member.worker.clone()).collect();
        let group = plane.join(spec).map_err(|error| CommError::new(error, &members))?;
        let aborter = group.aborter();
        self.aborts.register(self.prepare.epoch, Arc::clone(&aborter));
        let (deadline, pace) = (self.timeouts.operation, Arc::clone(self.pace));
        let party = Arc::new(Party { aborter, members });
        Ok(Communicator { group, party, deadline, pace, begun: None })
    }
}

/// What a member trains with: its place, its part in the sums, and its communicators.
#[derive(Debug)]
pub struct Team<T> {
    /// Cut to this rank's group.
    pub layout: Layout,
    pub place: Place,
    /// The slots of this replica and stage.
    pub tensor: Communicator,
    /// The sum of gradients over replicas.
    pub exchange: Exchange<T>,
    /// The first ranks of all groups, for one that is first in its own; `None` too when there is one group.
    pub speakers: Option<Communicator>,
    /// Those that train.
    pub replicas: usize,
    /// The first training replica speaks for the norm.
    pub speaks_for_norm: bool,
}

/// Everything of an epoch that this worker joins.
#[derive(Debug)]
pub struct Joined<T> {
    /// Those that exchange this worker's transfers; `None` when it has none.
    pub reshard: Option<Communicator>,
    /// `None` for a worker that only sends and then leaves.
    pub team: Option<Team<T>>,
}

impl<T: Real + Element> Joined<T> {
    /// From now on its operations are told of there.
    pub fn at_pace(mut self, pace: &Arc<Pace>) -> Self {
        let team = self.team.iter_mut().flat_map(Team::communicators);
        for comm in self.reshard.iter_mut().chain(team) {
            comm.pace = Arc::clone(pace);
        }
        self
    }
}

/// What an order to prepare makes of this worker, and whom it trains with.
struct Seat<'a> {
    layout: &'a Layout,
    place: Place,
    sync: SyncPlan,
    tensor: &'a [Participant],
    column: Option<&'a [Participant]>,
    speakers: Option<&'a [Participant]>,
}

impl<'a> Seat<'a> {
    /// `None` for a worker that only sends and then leaves.
    ///
    /// # Errors
    /// When the peers do not fit the layout: sums over fewer than all would train a wrong model without a word.
    fn new(prepare: &'a Prepare, me: &WorkerKey) -> Result<Option<Self>, CommError> {
        let Some(layout) = &prepare.layout else { return Ok(None) };
        layout.check_shape().map_err(|hole| gap("layout", hole))?;
        let seat = layout.place_of(me).and_then(|place| Some((place, SyncPlan::new(layout, place)?)));
        let (place, sync) =
            seat.ok_or_else(|| gap("layout", "this worker does not train under it".to_owned()))?;
        let must_be = |group: &str, found: usize, wanted: usize| {
            if found == wanted {
                Ok(())
            } else {
                Err(gap(group, format!("{found} peers are named, and the layout has {wanted}")))
            }
        };
        let slots = layout.group(place.replica, place.stage).map_or(0, |group| group.active().len());
        must_be("tensor", prepare.tensor.len(), slots)?;
        let hosts = sync.is_needed() && sync.column.is_some();
        if hosts {
            must_be("column", prepare.column.len(), sync.replicas)?;
        }
        let first = prepare.tensor.first().is_some_and(|first| first.worker == *me);
        if first {
            // There is one stage.
            must_be("speakers", prepare.speakers.len(), sync.replicas)?;
        }
        let speaks = first && sync.replicas > 1;
        Ok(Some(Self {
            layout,
            place,
            sync,
            tensor: &prepare.tensor,
            column: hosts.then_some(&prepare.column),
            speakers: speaks.then_some(&prepare.speakers),
        }))
    }
}

/// Joins all groups of the epoch at once, so that the slowest decides and not the sum.
///
/// # Errors
/// When a group does not come about, or the order to prepare has a gap.
pub fn join_all<'a, T: Real + Element>(
    joiner: Joiner<'a>,
    plane: &dyn Plane,
) -> Result<Joined<T>, CommError> {
    let prepare = joiner.prepare;
    let seat = Seat::new(prepare, joiner.me)?;
    let parcels = seat.as_ref().map(|seat| Parcel::all::<T>(&joiner.job.model, &seat.sync, PARCEL_BYTES));
    let parcels = parcels.transpose().map_err(|hole| gap("column", hole.to_string()))?.unwrap_or_default();
    let cause = OnceLock::new();
    let joined = std::thread::scope(|scope| {
        let join = |name: String, members: &'a [Participant]| {
            let cause = &cause;
            scope.spawn(move || {
                let result = joiner.join(plane, name, members);
                if let Err(error) = &result {
                    let _only_the_first_counts = cause.set(error.clone());
                    // The epoch cannot come about any more: do not sit out the deadlines of the other joins.
                    plane.abort_joins(joiner.prepare.epoch.0);
                }
                result
            })
        };
        let reshard = (!prepare.movers.is_empty()).then(|| join("reshard".to_owned(), &prepare.movers));
        let team = seat.map(|seat| {
            let Place { replica, stage, .. } = seat.place;
            let index = seat.sync.column.as_ref().map_or(0, |column| column.index);
            let tensor = join(format!("tensor.{replica}.{stage}"), seat.tensor);
            let column = seat.column.map(|peers| join(format!("column.{stage}.{index}"), peers));
            let speakers = seat.speakers.map(|peers| join("speakers".to_owned(), peers));
            let within = |name: &str| {
                (!seat.sync.crossing.is_empty())
                    .then(|| join(format!("{name}.{replica}.{stage}"), seat.tensor))
            };
            let (handover, giveback) = (within("handover"), within("giveback"));
            (seat, tensor, speakers, [handover, giveback, column])
        });

        let reshard = reshard.map(wait).transpose()?;
        let team = match team {
            Some((seat, tensor, speakers, [handover, giveback, column])) => {
                let tensor = wait(tensor)?;
                let groups = SumGroups {
                    handover: handover.map(wait).transpose()?,
                    giveback: giveback.map(wait).transpose()?,
                    column: column.map(wait).transpose()?,
                };
                let speaks_for_norm = seat.sync.first_replica == seat.place.replica;
                Some(Team {
                    replicas: seat.sync.replicas,
                    speaks_for_norm,
                    layout: seat.layout.clone(),
                    place: seat.place,
                    exchange: Exchange::new(groups, parcels, &seat.sync, speaks_for_norm),
                    tensor,
                    speakers: speakers.map(wait).transpose()?,
                })
            }
            None => None,
        };
        Ok(Joined { reshard, team })
    });
    // The joins that were cut short cannot tell why.
    joined.map_err(|error| cause.into_inner().unwrap_or(error))
}

/// The order to prepare does not say all that this worker must know.
fn gap(group: &str, detail: String) -> CommError {
    let detail = format!("the order to prepare has a gap: {detail}");
    CommError { error: PlaneError::Io { group: group.to_owned(), detail }, peer: None }
}

type Joining<'scope> = std::thread::ScopedJoinHandle<'scope, Result<Communicator, CommError>>;

fn wait(joining: Joining<'_>) -> Result<Communicator, CommError> {
    joining.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl<T: Real + Element> Team<T> {
    fn communicators(&mut self) -> impl Iterator<Item = &mut Communicator> {
        let Self { tensor, exchange, speakers, .. } = self;
        [tensor].into_iter().chain(speakers).chain(exchange.communicators())
    }

    /// The sum over all members: the same bits on each, and only when every member has come to it. Each group sums for
    /// itself, its first rank speaks for it among all groups, and passes on what comes of that.
    pub fn sum(&mut self, mut values: Vec<f64>) -> Result<Vec<f64>, CommError> {
        self.tensor.all_reduce(Reduce::Sum, &mut values)?;
        if let Some(speakers) = &mut self.speakers {
            speakers.all_reduce(Reduce::Sum, &mut values)?;
        }
        self.pass_on(values)
    }

    /// Every member's value, by group, then rank. No group has more than `largest` members.
    pub fn gather(&mut self, value: u32, largest: usize) -> Result<Vec<u32>, CommError> {
        /// Stands for a member that is not there.
        const NOBODY: f64 = -1.0;
        let mut values = collect(&mut self.tensor, &[f64::from(value)])?;
        values.resize(largest, NOBODY);
        if let Some(speakers) = &mut self.speakers {
            values = collect(speakers, &values)?;
        }
        values.resize(largest * self.replicas, NOBODY);
        let values = self.pass_on(values)?;
        Ok(values.into_iter().filter(|value| *value >= 0.0).map(|value| value as u32).collect())
    }

    /// The first rank's values become those of all of its group.
    fn pass_on(&mut self, values: Vec<f64>) -> Result<Vec<f64>, CommError> {
        if self.tensor.size() == 1 {
            return Ok(values);
        }
        self.tensor.run_on(values, |buffer| Op::Broadcast { root: 0, buffer })
    }

    /// Leaves all groups in order, so that slower peers see an end and not a death.
    pub fn retire(self) {
        self.tensor.retire();
        self.exchange.into_groups().retire();
        if let Some(speakers) = self.speakers {
            speakers.retire();
        }
    }
}

/// Everybody's values, as many from each, in rank order.
fn collect(comm: &mut Communicator, values: &[f64]) -> Result<Vec<f64>, CommError> {
    let counts = vec![values.len(); comm.size()];
    let all = values.repeat(comm.size());
    comm.run_on(all, |buffer| Op::AllGatherV { buffer, counts })
}
