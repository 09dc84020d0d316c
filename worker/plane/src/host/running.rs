//! The operation at the head of a group's queue.

use super::frame::Stamp;
use super::link::Link;
use super::memory::{Lending, Memory};
use super::program::{OpCode, Program};
use super::transfer::{Incoming, Outgoing, TransferError};
use super::work::{Pending, Slot};
use crate::Buffer;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An operation as it is submitted.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) pending: Pending,
    pub(super) program: Program,
    pub(super) sequence: u64,
    pub(super) data: Buffer,
    pub(super) deadline: Instant,
    /// The time given at submission, for the message.
    pub(super) limit: Duration,
    pub(super) slot: Arc<Slot>,
}

impl Task {
    pub(super) fn what(&self) -> String {
        let name = OpCode::name(self.program.code as u8);
        format!("{name} number {}", self.sequence)
    }
}

#[derive(Debug)]
pub(super) struct Running {
    _pending: Pending,
    program: Program,
    sequence: u64,
    round: usize,
    memory: Memory,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    pub(super) slot: Arc<Slot>,
    pub(super) deadline: Instant,
    pub(super) limit: Duration,
    pub(super) what: String,
}

impl Running {
    pub(super) fn start(task: Task, epoch: u64, mut scratch: Vec<u64>) -> Running {
        let words = task.program.scratch.div_ceil(8);
        if scratch.len() < words {
            scratch.resize(words, 0);
        }
        let what = task.what();
        let mut running = Running {
            _pending: task.pending,
            program: task.program,
            sequence: task.sequence,
            round: 0,
            memory: Memory { data: task.data, scratch },
            outgoing: Vec::new(),
            incoming: Vec::new(),
            slot: task.slot,
            deadline: task.deadline,
            limit: task.limit,
            what,
        };
        running.begin_round(epoch);
        running
    }

    fn begin_round(&mut self, epoch: u64) {
        self.outgoing.clear();
        self.incoming.clear();
        let Some(round) = self.program.rounds.get(self.round) else {
            return;
        };
        let stamp = |length: usize| Stamp {
            code: self.program.code as u8,
            round: self.round as u16,
            sequence: self.sequence,
            digest: self.program.digest,
            length: length as u64,
        };
        self.outgoing
            .extend(round.sends.iter().map(|&send| Outgoing::new(send, stamp(send.span.len), epoch)));
        self.incoming
            .extend(round.receives.iter().map(|&receive| Incoming::new(receive, stamp(receive.span.len))));
    }

    /// One pass over all transfers. True when something moved; an error names the rank.
    pub(super) fn pass(
        &mut self,
        links: &mut [Option<Link>],
        mut lent: Lending<'_, '_>,
    ) -> Result<bool, (usize, TransferError)> {
        let mut moved = false;
        if self.program.code == OpCode::Exchange && lent.is_none() {
            // The thread that lends its memory is yet to come.
            return Ok(false);
        }
        for at in 0..self.outgoing.len() {
            let held_up = self.outgoing[at].transfer.after.is_some_and(|first| !self.outgoing[first].done());
            let send = &mut self.outgoing[at];
            let peer = send.transfer.peer;
            moved |= match &mut links[peer] {
                _ if held_up || send.done() => false,
                Some(link) if !link.retired() => {
                    send.push(link, &self.memory, lent.as_deref_mut()).map_err(|error| (peer, error))?
                }
                _ => return Err((peer, TransferError::Retired)),
            };
        }
        for at in 0..self.incoming.len() {
            let held_up = self.incoming[at].transfer.after.is_some_and(|first| !self.incoming[first].done);
            let receive = &mut self.incoming[at];
            let peer = receive.transfer.peer;
            moved |= match &mut links[peer] {
                _ if held_up || receive.done => false,
                Some(link) => {
                    let pulled = receive.pull(link, &mut self.memory, lent.as_deref_mut());
                    pulled.map_err(|error| (peer, error))?
                }
                None => return Err((peer, TransferError::Retired)),
            };
        }
        Ok(moved)
    }

    /// Notes in the shared windows what the unfinished transfers wait for.
    pub(super) fn doze(&self, links: &mut [Option<Link>]) {
        for receive in self.incoming.iter().filter(|receive| !receive.done) {
            if let Some(ring) = links[receive.transfer.peer].as_mut().and_then(|link| link.wire.ring()) {
                ring.await_data();
            }
        }
        for send in self.outgoing.iter().filter(|send| !send.done()) {
            if let Some(ring) = links[send.transfer.peer].as_mut().and_then(|link| link.wire.ring()) {
                ring.await_room();
            }
        }
    }

    /// Ends rounds whose transfers are all done. True when it was the last one.
    pub(super) fn turn(&mut self, epoch: u64) -> bool {
        while self.outgoing.iter().all(Outgoing::done) && self.incoming.iter().all(|r| r.done) {
            let Some(round) = self.program.rounds.get(self.round) else {
                return true;
            };
            for step in &round.then {
                self.memory.run(step, self.program.kind);
            }
            self.round += 1;
            self.begin_round(epoch);
        }
        false
    }

    /// Its buffer, and the scratch memory for the next operation.
    pub(super) fn finish(self) -> (Arc<Slot>, Buffer, Vec<u64>) {
        (self.slot, self.memory.data, self.memory.scratch)
    }

    /// The rank of every unfinished transfer.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = usize> {
        let sends = self.outgoing.iter().filter(|send| !send.done());
        let receives = self.incoming.iter().filter(|receive| !receive.done);
        receives.map(|receive| receive.transfer.peer).chain(sends.map(|send| send.transfer.peer))
    }

    /// The ranks with unfinished transfers.
    pub(super) fn waiting_for(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> = self.unfinished().collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// What has to be finished before the links can carry a last word: segments that were begun.
    pub(super) fn give_up(mut self, mut lent: Lending<'_, '_>) -> (Memory, Vec<Outgoing>) {
        self.outgoing.retain(Outgoing::mid_segment);
        for send in &mut self.outgoing {
            send.keep(&mut self.memory, lent.as_deref_mut());
        }
        (self.memory, self.outgoing)
    }
}
