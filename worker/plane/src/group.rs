//! The trait that every data plane implements.

use crate::{AbortReason, Buffer, Lent, PlaneError};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Where a worker's data plane listens. Peers on the same node use the Unix socket, others TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    pub node: String,
    /// Name of a socket in Linux's abstract namespace: it leaves nothing on disk.
    pub unix: String,
    /// `host:port`.
    pub tcp: String,
}

/// The secret of one epoch, given to each of its members alone. Never logged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ticket(pub [u8; 32]);

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket(..)")
    }
}

/// Which group to join, as which rank.
#[derive(Debug, Clone)]
pub struct GroupSpec {
    pub job: String,
    pub epoch: u64,
    /// Unique within the epoch, such as `tp.0.0` or `world`.
    pub name: String,
    /// In rank order.
    pub members: Vec<Endpoint>,
    pub rank: usize,
    pub ticket: Ticket,
    /// All members must have joined within this time.
    pub deadline: Duration,
}

/// How values of several ranks become one. Always computed in rank order, so that results repeat bit by bit,
/// and every rank gets the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    Sum,
    Max,
}

/// An operation of a whole group. It works in the buffer that is given with it, which comes back with its end. Counts and
/// ranges are in elements of the buffer's type.
#[derive(Debug)]
pub enum Op {
    /// Every rank ends with the reduction of all buffers, which have one length.
    AllReduce {
        reduce: Reduce,
        buffer: Buffer,
    },
    /// The buffer is a part for each rank, in rank order, `counts[r]` long. Rank `r`'s part becomes the sum of everybody's
    /// `r`-th part on rank `r`; what its other parts hold then is not told.
    ReduceScatterV {
        buffer: Buffer,
        counts: Vec<usize>,
    },
    /// The buffer is a part for each rank, in rank order, `counts[r]` long. Every rank gives its own part, in its place, and
    /// ends with all of them.
    AllGatherV {
        buffer: Buffer,
        counts: Vec<usize>,
    },
    /// Rank `r` is sent `send[r]` of this rank's buffer, and what rank `r` sends comes to `receive[r]`. The rest of the
    /// buffer stays as it is. A range in `receive` overlaps no other, neither there nor in `send`; only what a rank sends
    /// itself may stay in place. Two ranks that exchange nothing do not wait for each other.
    AllToAllV {
        buffer: Buffer,
        send: Vec<Range<usize>>,
        receive: Vec<Range<usize>>,
    },
    /// Every rank ends with the root's buffer; the others give one of the same length.
    Broadcast {
        root: usize,
        buffer: Buffer,
    },
    Send {
        to: usize,
        buffer: Buffer,
    },
    /// The buffer gives type and length and is overwritten.
    Recv {
        from: usize,
        buffer: Buffer,
    },
    Barrier,
}

impl Op {
    pub(crate) fn into_buffer(self) -> Buffer {
        match self {
            Op::AllReduce { buffer, .. }
            | Op::ReduceScatterV { buffer, .. }
            | Op::AllGatherV { buffer, .. }
            | Op::AllToAllV { buffer, .. }
            | Op::Broadcast { buffer, .. }
            | Op::Send { buffer, .. }
            | Op::Recv { buffer, .. } => buffer,
            Op::Barrier => Buffer::empty(),
        }
    }
}

/// An operation on its way. It owns its buffer until it is waited for.
pub trait Work: Send {
    /// Waits for the end. The buffer comes back, as the operation left it, only if that finished on this rank, the group was
    /// not aborted, and the deadline given at submission was kept. A `Barrier` gives back an empty one.
    fn wait(self: Box<Self>) -> Result<Buffer, PlaneError>;
    /// [`Work::wait`] would return at once. Never blocks.
    fn is_done(&self) -> bool;
}

pub trait Group: Send {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;
    /// Queues an operation. Operations run in order; every rank must submit the same ones in the same order
    /// (`Send` and `Recv` only on the two ranks concerned).
    fn submit(&mut self, op: Op, deadline: Duration) -> Box<dyn Work>;
    /// Runs an operation of the whole group to its end: each rank sends each other one bytes out of lent memory, and what
    /// they send comes into it. Two ranks that exchange nothing do not wait for each other. No other thread may wait for one
    /// of this group's operations meanwhile. After an error a part may have come.
    fn exchange(&mut self, memory: &mut dyn Lent, deadline: Duration) -> Result<(), PlaneError>;
    /// The first error of the group, if any. Never blocks.
    fn health(&self) -> Option<PlaneError>;
    fn aborter(&self) -> Arc<dyn Aborter>;
    /// Leaves a healthy group after its last operation, so that peers see an orderly end.
    fn retire(self: Box<Self>);
}

impl fmt::Debug for dyn Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group(rank {} of {})", self.rank(), self.size())
    }
}

/// Ends a group from any thread. May be called again and again; the first reason stays.
pub trait Aborter: Send + Sync {
    /// Returns at once. Every pending and later operation of the group fails.
    fn abort(&self, reason: AbortReason);
    /// The first few ranks, at most [`WAITING_SHOWN`], without which the operation in hand cannot go on. Empty when none
    /// is missing or the plane cannot tell. Never blocks for long.
    fn waiting_for(&self) -> Vec<usize>;
}

/// How many of the ranks that an operation waits for are told.
pub const WAITING_SHOWN: usize = 8;

/// A worker's entrance to the data plane.
pub trait Plane: Send + Sync {
    /// Where peers reach this worker.
    fn endpoint(&self) -> Endpoint;
    /// Joins a group together with all its members. Blocks until all are there, the deadline passes, or
    /// [`Plane::abort_joins`] is called. May be called from several threads at once for different groups.
    fn join(&self, spec: GroupSpec) -> Result<Box<dyn Group>, PlaneError>;
    /// Fails every join of epochs up to and including `epoch`, now and later.
    fn abort_joins(&self, epoch: u64);
}
