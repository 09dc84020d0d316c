//! A group as its owner holds it.

use super::program::{Channel, lower};
use super::room::Room;
use super::running::Task;
use super::work::{End, HostAborter, HostWork, Shared, Slot};
use crate::{AbortReason, Aborter, Group, Op, PlaneError, Work};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Operations that may wait in one group. More means that nobody waits for them.
const MAX_PENDING: usize = 4096;
/// How long an owner that retires waits for the word to go out, beyond its last operation.
const RETIRE_PATIENCE: Duration = Duration::from_secs(1);
/// So far away that adding it to a clock never overflows.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

#[derive(Debug)]
pub(super) struct HostGroup {
    room: Arc<Room>,
    /// Operations of the whole group so far.
    collectives: u64,
    /// By rank: messages to it and from it so far.
    sent: Vec<u64>,
    received: Vec<u64>,
    /// Of the operation that may run longest.
    last_deadline: Instant,
    retired: bool,
}

impl HostGroup {
    pub(super) fn new(room: Arc<Room>) -> HostGroup {
        let size = room.shared.size;
        HostGroup {
            room,
            collectives: 0,
            sent: vec![0; size],
            received: vec![0; size],
            last_deadline: Instant::now(),
            retired: false,
        }
    }

    fn next_sequence(&mut self, channel: Channel) -> u64 {
        let counter = match channel {
            Channel::Group => &mut self.collectives,
            Channel::To(peer) => &mut self.sent[peer],
            Channel::From(peer) => &mut self.received[peer],
        };
        let sequence = *counter;
        *counter += 1;
        sequence
    }

    fn prepare(&mut self, op: Op, limit: Duration, slot: &Arc<Slot>) -> Result<Task, PlaneError> {
        let shared = Arc::clone(&self.room.shared);
        if let Some(error) = shared.error() {
            return Err(error);
        }
        if shared.pending() >= MAX_PENDING {
            let text = format!("more than {MAX_PENDING} operations are pending; wait for some first");
            return Err(shared.io(text));
        }
        let program = lower(&op, shared.rank, shared.size)
            .map_err(|detail| shared.io(format!("operation refused: {detail}")))?;
        let data = match op {
            Op::AllReduce { buffer, .. }
            | Op::ReduceScatterV { buffer, .. }
            | Op::AllGatherV { buffer, .. }
            | Op::AllToAllV { buffer, .. }
            | Op::Broadcast { buffer, .. }
            | Op::Send { buffer, .. }
            | Op::Recv { buffer, .. } => buffer,
            Op::Barrier => crate::Buffer::empty(),
        };
        Ok(Task {
            pending: Shared::count(&shared),
            sequence: self.next_sequence(program.channel),
            program,
            data,
            deadline: Instant::now() + limit,
            limit,
            slot: Arc::clone(slot),
        })
    }
}

impl Group for HostGroup {
    fn rank(&self) -> usize {
        self.room.shared.rank
    }

    fn size(&self) -> usize {
        self.room.shared.size
    }

    fn epoch(&self) -> u64 {
        self.room.shared.epoch
    }

    fn submit(&mut self, op: Op, deadline: Duration) -> Box<dyn Work> {
        let limit = deadline.min(LONGEST);
        let slot = Arc::new(Slot::default());
        let (what, deadline) = match self.prepare(op, limit, &slot) {
            Ok(task) => {
                let (what, deadline) = (task.what(), task.deadline);
                self.room.submit(task);
                (what, deadline)
            }
            Err(error) => {
                // The peers run an operation that this rank does not: the group is of no use any more.
                self.room.shared.fail(error);
                self.room.ring();
                slot.set(End::Failed);
                (String::new(), Instant::now())
            }
        };
        self.last_deadline = self.last_deadline.max(deadline);
        Box::new(HostWork { room: Arc::clone(&self.room), slot, what, deadline, limit })
    }

    fn health(&self) -> Option<PlaneError> {
        self.room.shared.error()
    }

    fn aborter(&self) -> Arc<dyn Aborter> {
        Arc::new(HostAborter(Arc::clone(&self.room)))
    }

    fn retire(mut self: Box<Self>) {
        self.retired = true;
        let told = Arc::new(Slot::default());
        self.room.retire(Arc::clone(&told));
        told.take(self.last_deadline.max(Instant::now()) + RETIRE_PATIENCE);
    }
}

impl Drop for HostGroup {
    fn drop(&mut self) {
        if !self.retired {
            self.aborter().abort(AbortReason::Leaving);
        }
    }
}
