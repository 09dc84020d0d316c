//! A group as its owner holds it.

use super::program::{self, Channel, Program, lower};
use super::room::Room;
use super::running::Task;
use super::work::{End, HostAborter, HostWork, Shared, Slot};
use crate::{AbortReason, Aborter, Buffer, Group, Lent, Op, PlaneError, Work};
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

    fn task(
        &mut self,
        program: Result<Program, String>,
        data: Buffer,
        limit: Duration,
        slot: &Arc<Slot>,
    ) -> Result<Task, PlaneError> {
        let shared = Arc::clone(&self.room.shared);
        if let Some(error) = shared.error() {
            return Err(error);
        }
        if shared.pending() >= MAX_PENDING {
            let text = format!("more than {MAX_PENDING} operations are pending; wait for some first");
            return Err(shared.io(text));
        }
        let program = program.map_err(|detail| shared.io(format!("operation refused: {detail}")))?;
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

    /// An operation that comes about on this rank; the error is the group's.
    fn begin(&mut self, task: Result<Task, PlaneError>) -> Result<(String, Instant), PlaneError> {
        match task {
            Ok(task) => {
                let (what, deadline) = (task.what(), task.deadline);
                self.last_deadline = self.last_deadline.max(deadline);
                self.room.submit(task);
                Ok((what, deadline))
            }
            Err(error) => {
                // The peers run an operation that this rank does not: the group is of no use any more.
                let error = self.room.shared.fail(error);
                self.room.ring();
                Err(error)
            }
        }
    }
}

impl Group for HostGroup {
    fn rank(&self) -> usize {
        self.room.shared.rank
    }

    fn size(&self) -> usize {
        self.room.shared.size
    }

    fn submit(&mut self, op: Op, deadline: Duration) -> Box<dyn Work> {
        let limit = deadline.min(LONGEST);
        let slot = Arc::new(Slot::default());
        let program = lower(&op, self.rank(), self.size());
        let task = self.task(program, op.into_buffer(), limit, &slot);
        let (what, deadline) = self.begin(task).unwrap_or_else(|_of_the_group| {
            slot.set(End::Failed);
            (String::new(), Instant::now())
        });
        Box::new(HostWork { room: Arc::clone(&self.room), slot, what, deadline, limit })
    }

    fn exchange(&mut self, memory: &mut dyn Lent, deadline: Duration) -> Result<(), PlaneError> {
        let slot = Arc::new(Slot::default());
        let outgoing: Vec<usize> = (0..self.size()).map(|to| memory.outgoing(to)).collect();
        let incoming: Vec<usize> = (0..self.size()).map(|from| memory.incoming(from)).collect();
        let program = program::exchange(self.rank(), &outgoing, &incoming);
        let task = self.task(program, Buffer::empty(), deadline.min(LONGEST), &slot);
        let (_, until) = self.begin(task)?;
        let shared = &self.room.shared;
        if !self.room.drive(&slot, until, Some(memory)) {
            let error = shared.fail(shared.io("another thread waits for an operation during an exchange"));
            self.room.ring();
            return Err(error);
        }
        shared.outcome(slot.take(Instant::now()).unwrap_or(End::Failed)).map(drop)
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
