//! A group as its owner holds it.

use super::engine::Command;
use super::program::{Channel, lower};
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
    shared: Arc<Shared>,
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
    pub(super) fn new(shared: Arc<Shared>) -> HostGroup {
        let size = shared.size;
        HostGroup {
            shared,
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
        if let Some(error) = self.shared.error() {
            return Err(error);
        }
        if self.shared.pending() >= MAX_PENDING {
            let text = format!("more than {MAX_PENDING} operations are pending; wait for some first");
            return Err(self.shared.io(text));
        }
        let program = lower(&op, self.shared.rank, self.shared.size)
            .map_err(|detail| self.shared.io(format!("operation refused: {detail}")))?;
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
            pending: Shared::count(&self.shared),
            sequence: self.next_sequence(program.channel),
            output: program.kind.zeros(program.output),
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
        self.shared.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    fn epoch(&self) -> u64 {
        self.shared.epoch
    }

    fn submit(&mut self, op: Op, deadline: Duration) -> Box<dyn Work> {
        let limit = deadline.min(LONGEST);
        let slot = Arc::new(Slot::default());
        let (what, deadline) = match self.prepare(op, limit, &slot) {
            Ok(task) => {
                let (what, deadline) = (task.what(), task.deadline);
                let command = Command::Submit(self.shared.id, task);
                if self.shared.mailbox.post(command).is_err() {
                    self.shared.fail(self.shared.aborted(AbortReason::Leaving));
                    slot.set(End::Failed);
                }
                (what, deadline)
            }
            Err(error) => {
                // The peers run an operation that this rank does not: the group is of no use any more.
                self.shared.fail(error);
                self.shared.mailbox.abort(self.shared.id);
                slot.set(End::Failed);
                (String::new(), Instant::now())
            }
        };
        self.last_deadline = self.last_deadline.max(deadline);
        Box::new(HostWork { shared: Arc::clone(&self.shared), slot, what, deadline, limit })
    }

    fn health(&self) -> Option<PlaneError> {
        self.shared.error()
    }

    fn aborter(&self) -> Arc<dyn Aborter> {
        Arc::new(HostAborter(Arc::clone(&self.shared)))
    }

    fn retire(mut self: Box<Self>) {
        self.retired = true;
        let told = Arc::new(Slot::default());
        let command = Command::Retire(self.shared.id, Arc::clone(&told));
        if self.shared.mailbox.post(command).is_ok() {
            told.take(self.last_deadline.max(Instant::now()) + RETIRE_PATIENCE);
        }
    }
}

impl Drop for HostGroup {
    fn drop(&mut self) {
        if !self.retired {
            self.aborter().abort(AbortReason::Leaving);
        }
    }
}
