//! The communicators of one epoch.

use crate::abort::Aborts;
use crate::messages::{Participant, Prepare, Timeouts};
use crate::sync::SyncPlan;
use reknit_layout::{Layout, Place, Slot, WorkerKey};
use reknit_model::TensorParallel;
use reknit_plane::{Buffer, Element, Group, GroupSpec, Op, Plane, PlaneError, Reduce};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A group of the data plane whose ranks have names.
#[derive(Debug)]
pub struct Communicator {
    group: Box<dyn Group>,
    members: Vec<WorkerKey>,
    deadline: Duration,
    ticks: Arc<AtomicU64>,
}

/// A failed operation, with the worker to suspect where the data plane can tell.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{error}{}", .peer.as_ref().map(|peer| format!(" [worker {peer}]")).unwrap_or_default())]
pub struct CommError {
    pub error: PlaneError,
    pub peer: Option<WorkerKey>,
}

impl CommError {
    pub fn timed_out(&self) -> bool {
        match self.error {
            PlaneError::Deadline { .. } => true,
            PlaneError::PeerLost { .. }
            | PlaneError::PeerLeft { .. }
            | PlaneError::Aborted { .. }
            | PlaneError::Mismatch { .. }
            | PlaneError::Handshake { .. }
            | PlaneError::Io { .. } => false,
        }
    }

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

    /// Runs one operation to its end.
    pub fn run(&mut self, op: Op) -> Result<Buffer, CommError> {
        let result = self.group.submit(op, self.deadline).wait();
        self.ticks.fetch_add(1, Ordering::Relaxed);
        result.map_err(|error| CommError::new(error, &self.members))
    }

    /// Runs one operation on numbers; it gives back numbers of the same type.
    pub fn run_on<T: Element>(
        &mut self,
        values: Vec<T>,
        op: impl FnOnce(Buffer) -> Op,
    ) -> Result<Vec<T>, CommError> {
        let buffer = self.run(op(T::wrap(values)))?;
        T::unwrap(buffer).ok_or_else(|| {
            let detail = "the operation gave back another type".to_owned();
            let error = PlaneError::Io { group: "?".to_owned(), detail };
            CommError { error, peer: None }
        })
    }

    pub fn retire(self) {
        self.group.retire();
    }
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
}

impl Communicator {
    pub fn all_reduce<T: Element>(&mut self, reduce: Reduce, values: &mut Vec<T>) -> Result<(), CommError> {
        if self.size() == 1 {
            // Progress all the same: a member without any is suspected.
            self.ticks.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        *values = self.run_on(std::mem::take(values), |buffer| Op::AllReduce { reduce, buffer })?;
        Ok(())
    }
}

/// Joins groups of one epoch under its ticket.
#[derive(Debug, Clone, Copy)]
pub struct Joiner<'a> {
    pub job: &'a str,
    pub me: &'a WorkerKey,
    pub prepare: &'a Prepare,
    pub timeouts: Timeouts,
    pub ticks: &'a Arc<AtomicU64>,
    pub aborts: &'a Aborts,
}

impl Joiner<'_> {
    /// Joins the group of these workers, in this rank order.
    ///
    /// `None` when this worker is not among them.
    pub fn join(
        &self,
        plane: &dyn Plane,
        name: String,
        members: Vec<WorkerKey>,
    ) -> Result<Option<Communicator>, CommError> {
        let Some(rank) = members.iter().position(|member| member == self.me) else { return Ok(None) };
        let endpoint = |member: &WorkerKey| {
            let found = self.prepare.participants.iter().find(|participant| participant.worker == *member);
            found.map(|participant: &Participant| participant.endpoint.clone()).ok_or_else(|| {
                let detail = format!("worker {member} has no endpoint in the order to prepare");
                CommError { error: PlaneError::Io { group: name.clone(), detail }, peer: None }
            })
        };
        let endpoints = members.iter().map(endpoint).collect::<Result<_, _>>()?;
        let spec = GroupSpec {
            job: self.job.to_owned(),
            epoch: self.prepare.epoch.0,
            name,
            members: endpoints,
            rank,
            ticket: self.prepare.ticket,
            deadline: self.timeouts.join,
        };
        let group = plane.join(spec).map_err(|error| CommError::new(error, &members))?;
        self.aborts.register(self.prepare.epoch, group.aborter());
        let (deadline, ticks) = (self.timeouts.operation, Arc::clone(self.ticks));
        Ok(Some(Communicator { group, members, deadline, ticks }))
    }
}

/// What a member trains with: its place, its part in the sums, and its communicators.
#[derive(Debug)]
pub struct Team {
    pub layout: Layout,
    pub place: Place,
    pub sync: SyncPlan,
    /// The slots of this replica and stage.
    pub tensor: Communicator,
    /// The hosts of this rank's sync column; `None` when it hosts none or there is one replica.
    pub column: Option<Communicator>,
    /// Every member of the epoch.
    pub world: Communicator,
    /// The lowest rank of each replica speaks for its loss, and the first training replica for the norm.
    pub speaks_for_loss: bool,
    pub speaks_for_norm: bool,
}

/// Everything of an epoch that this worker joins.
#[derive(Debug)]
pub struct Joined {
    /// All participants, for the transfers; `None` when nothing is to be moved.
    pub reshard: Option<Communicator>,
    /// `None` for a worker that only sends and then leaves.
    pub team: Option<Team>,
}

/// Joins all groups of the epoch at once, so that the slowest decides and not the sum.
pub fn join_all(joiner: Joiner<'_>, plane: &dyn Plane) -> Result<Joined, CommError> {
    let plan = &joiner.prepare.plan;
    let layout = &plan.layout;
    let worker_at = |place: Place| {
        let member = layout.members().find(|(at, _)| *at == place);
        member.map(|(_, member)| member.worker.clone())
    };
    let everyone = joiner.prepare.participants.iter().map(|participant| participant.worker.clone()).collect();
    let place = layout.place_of(joiner.me);
    let sync = place.and_then(|place| SyncPlan::new(layout, place));
    let column = sync.as_ref().filter(|sync| sync.needed).and_then(|sync| sync.column.clone());

    let cause = OnceLock::new();
    let joined = std::thread::scope(|scope| {
        let join = |name: String, members: Vec<WorkerKey>| {
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
        let reshard = (!plan.transfers.is_empty()).then(|| join("reshard".to_owned(), everyone));
        let world = place.map(|_| {
            join("world".to_owned(), layout.members().map(|(_, member)| member.worker.clone()).collect())
        });
        let tensor = place.map(|place| {
            let slots: Vec<Slot> =
                layout.group(place.replica, place.stage).map(|g| g.active()).unwrap_or_default();
            let members = slots.into_iter().filter_map(|slot| worker_at(Place { slot, ..place })).collect();
            join(format!("tensor.{}.{}", place.replica, place.stage), members)
        });
        let column = column.zip(place).map(|(column, place)| {
            let hosts = column.hosts.iter().filter_map(|host| worker_at(*host)).collect();
            join(format!("column.{}.{}", place.stage, column.index), hosts)
        });

        let reshard = wait(reshard)?;
        let (tensor, column, world) = (wait(tensor)?, wait(column)?, wait(world)?);
        let team = match (place, sync, tensor, world) {
            (Some(place), Some(sync), Some(tensor), Some(world)) => Some(Team {
                speaks_for_loss: tensor.rank() == 0,
                speaks_for_norm: layout
                    .members()
                    .next()
                    .is_some_and(|(first, _)| first.replica == place.replica),
                layout: layout.clone(),
                place,
                sync,
                tensor,
                column,
                world,
            }),
            (None, ..) | (_, None, ..) | (_, _, None, _) | (_, _, _, None) => None,
        };
        Ok(Joined { reshard, team })
    });
    // The joins that were cut short cannot tell why.
    joined.map_err(|error| cause.into_inner().unwrap_or(error))
}

type Joining<'scope> = std::thread::ScopedJoinHandle<'scope, Result<Option<Communicator>, CommError>>;

fn wait(joining: Option<Joining<'_>>) -> Result<Option<Communicator>, CommError> {
    match joining.map(Joining::join) {
        None => Ok(None),
        Some(Ok(result)) => result,
        Some(Err(panic)) => std::panic::resume_unwind(panic),
    }
}

impl Team {
    /// Every member's value, in rank order.
    pub fn gather(&mut self, value: u32) -> Result<Vec<u32>, CommError> {
        let counts = vec![1; self.world.size()];
        let values = self.world.run_on(vec![f64::from(value)], |buffer| Op::AllGatherV { buffer, counts })?;
        Ok(values.into_iter().map(|value| value as u32).collect())
    }

    /// Leaves all groups in order, so that slower peers see an end and not a death.
    pub fn retire(self) {
        self.tensor.retire();
        self.world.retire();
        if let Some(column) = self.column {
            column.retire();
        }
    }
}
