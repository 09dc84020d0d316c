//! One group as whoever moves its data sees it: its links and its queue of operations.

use super::frame::{Cause, Frame, HEADER};
use super::link::Link;
use super::memory::{Lending, Memory};
use super::running::{Running, Task};
use super::transfer::{Outgoing, TransferError};
use super::work::{End, Shared, Slot};
use crate::{Buffer, PlaneError};
use rustix::net::{Shutdown, shutdown};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Passes over one group before the others get their turn.
const PASSES: usize = 8;
/// How long a rank that left, or gave up, tries to tell its peers. Who does not hear it takes it for dead: far longer than
/// a busy machine leaves a peer without a core.
const LINGER: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Meeting {
    shared: Arc<Shared>,
    /// By rank. `None` for this rank itself and for those that retired.
    links: Vec<Option<Link>>,
    queue: VecDeque<Task>,
    running: Option<Running>,
    scratch: Vec<u64>,
    /// Set once the owner has left; told when the peers were.
    retiring: Option<Arc<Slot>>,
}

/// What is to be done with a meeting after a turn.
#[derive(Debug)]
pub(super) enum Turn {
    /// Nothing moves until the next event.
    Idle,
    /// There may be more to do at once.
    More,
    Retired,
    Failed(PlaneError),
}

impl Meeting {
    pub(super) fn new(shared: Arc<Shared>, links: Vec<Option<Link>>) -> Meeting {
        Meeting { shared, links, queue: VecDeque::new(), running: None, scratch: Vec::new(), retiring: None }
    }

    pub(super) fn links(&self) -> impl Iterator<Item = (usize, &Link)> {
        let links = self.links.iter().enumerate();
        links.filter_map(|(rank, link)| Some((rank, link.as_ref()?)))
    }

    pub(super) fn links_mut(&mut self) -> impl Iterator<Item = &mut Link> {
        self.links.iter_mut().flatten()
    }

    pub(super) fn link(&mut self, rank: usize) -> Option<&mut Link> {
        self.links.get_mut(rank)?.as_mut()
    }

    /// Notes in the shared windows what the running operation waits for.
    pub(super) fn doze(&mut self) {
        if let Some(running) = &self.running {
            running.doze(&mut self.links);
        }
    }

    pub(super) fn submit(&mut self, task: Task) {
        self.queue.push_back(task);
    }

    pub(super) fn retire(&mut self, told: Arc<Slot>) {
        self.retiring = Some(told);
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let running = self.running.iter().map(|running| running.deadline);
        running.chain(self.queue.iter().map(|task| task.deadline)).min()
    }

    pub(super) fn turn(&mut self, now: Instant, mut lent: Lending<'_, '_>) -> Turn {
        if let Some(error) = self.shared.error() {
            return Turn::Failed(error);
        }
        for _ in 0..PASSES {
            match self.pass(lent.as_deref_mut()) {
                Ok(true) => {}
                Ok(false) => return self.rest(now),
                Err((rank, error)) => return Turn::Failed(self.blame(rank, error)),
            }
        }
        match self.overdue(now) {
            Some(error) => Turn::Failed(error),
            None => Turn::More,
        }
    }

    fn rest(&self, now: Instant) -> Turn {
        self.shared.tell_waiting(self.running.as_ref());
        if let Some(error) = self.overdue(now) {
            Turn::Failed(error)
        } else if self.retiring.is_some() && self.running.is_none() && self.queue.is_empty() {
            Turn::Retired
        } else {
            Turn::Idle
        }
    }

    /// True when something moved.
    fn pass(&mut self, lent: Lending<'_, '_>) -> Result<bool, (usize, TransferError)> {
        let mut moved = false;
        if self.running.is_none()
            && let Some(task) = self.queue.pop_front()
        {
            let scratch = std::mem::take(&mut self.scratch);
            self.running = Some(Running::start(task, self.shared.epoch, scratch));
            moved = true;
        }
        if let Some(mut running) = self.running.take() {
            let passed = running.pass(&mut self.links, lent);
            if passed.is_ok() && running.turn(self.shared.epoch) {
                let (slot, buffer, scratch) = running.finish();
                self.scratch = scratch;
                slot.set(End::Done(buffer));
            } else {
                self.running = Some(running);
            }
            moved |= passed?;
        }
        Ok(self.listen()? || moved)
    }

    /// Reads the next header of every idle link, so that a peer's end is seen at once. True when one has come: it may be
    /// what the running operation has just looked for in vain, and no call will tell of what is taken already.
    fn listen(&mut self) -> Result<bool, (usize, TransferError)> {
        let mut heard = false;
        for (rank, seat) in self.links.iter_mut().enumerate() {
            let Some(link) = seat else { continue };
            let known = link.header_known();
            heard |= link.peek().map_err(|error| (rank, error.into()))?.is_some() && !known;
            if link.retired() {
                *seat = None;
            }
        }
        Ok(heard)
    }

    fn overdue(&self, now: Instant) -> Option<PlaneError> {
        if let Some(running) = &self.running
            && running.deadline <= now
        {
            let what = running.what.clone();
            return Some(self.shared.late(Some(running), what, running.limit));
        }
        let task = self.queue.iter().find(|task| task.deadline <= now)?;
        let (what, limit) = (task.what(), task.limit);
        Some(self.shared.late(self.running.as_ref(), what, limit))
    }

    fn blame(&self, rank: usize, error: TransferError) -> PlaneError {
        let group = self.shared.name.clone();
        match error {
            TransferError::Mismatch(detail) => PlaneError::Mismatch { group, rank, detail },
            TransferError::Retired => {
                PlaneError::PeerLost { group, rank, detail: "it has retired but is still needed".into() }
            }
            TransferError::NotLent => PlaneError::Io {
                group,
                detail: format!("no more memory is lent for what this rank exchanges with rank {rank}"),
            },
            TransferError::Link(error) => error.blame(&group, self.shared.rank, rank),
        }
    }

    /// Ends every operation with the error and begins to tell the peers why.
    pub(super) fn fail(self, error: &PlaneError, now: Instant, lent: Lending<'_, '_>) -> Parting {
        let frame = Frame::Abort(Cause::of(error));
        if let Some(running) = &self.running {
            running.slot.set(End::Failed);
        }
        for task in &self.queue {
            task.slot.set(End::Failed);
        }
        self.part(frame, now + LINGER, lent)
    }

    pub(super) fn say_goodbye(self, now: Instant) -> Parting {
        self.part(Frame::Goodbye, now + LINGER, None)
    }

    fn part(self, frame: Frame, until: Instant, lent: Lending<'_, '_>) -> Parting {
        let (memory, outgoing) = match self.running.map(|running| running.give_up(lent)) {
            Some((memory, outgoing)) => (Some(memory), outgoing),
            None => (None, Vec::new()),
        };
        let mut farewells: Vec<Option<Farewell>> = self
            .links
            .into_iter()
            .map(|link| {
                link.map(|link| Farewell {
                    link,
                    unfinished: None,
                    frame: frame.encode(self.shared.epoch),
                    left: HEADER,
                })
            })
            .collect();
        for outgoing in outgoing {
            if let Some(farewell) = &mut farewells[outgoing.transfer.peer] {
                farewell.unfinished = Some(outgoing);
            }
        }
        Parting { memory, farewells, until, told: self.retiring }
    }
}

/// A group that is over for this rank, while the last words go out.
#[derive(Debug)]
pub(super) struct Parting {
    memory: Option<Memory>,
    farewells: Vec<Option<Farewell>>,
    pub(super) until: Instant,
    told: Option<Arc<Slot>>,
}

#[derive(Debug)]
struct Farewell {
    link: Link,
    /// A segment that was begun: the peer could not tell the last word from payload.
    unfinished: Option<Outgoing>,
    frame: [u8; HEADER],
    left: usize,
}

impl Parting {
    pub(super) fn link(&mut self, rank: usize) -> Option<&mut Link> {
        let farewell = self.farewells.get_mut(rank)?.as_mut()?;
        Some(&mut farewell.link)
    }

    pub(super) fn links_mut(&mut self) -> impl Iterator<Item = &mut Link> {
        self.farewells.iter_mut().flatten().map(|farewell| &mut farewell.link)
    }

    /// Notes in the shared windows that everything a peer does is of interest.
    pub(super) fn doze(&mut self) {
        for ring in self.links_mut().filter_map(|link| link.wire.ring()) {
            ring.await_data();
            ring.await_room();
        }
    }

    /// True when nothing is left to do.
    pub(super) fn turn(&mut self, now: Instant) -> bool {
        let mut junk = [0; 16 << 10];
        let late = now >= self.until;
        for seat in &mut self.farewells {
            if let Some(farewell) = seat {
                let said = farewell.say(self.memory.as_ref());
                // Unread data at the close would make TCP throw the last words away.
                let closed = farewell.link.drain(&mut junk);
                if late || said.is_err() || (closed && farewell.left == 0) {
                    *seat = None;
                }
            }
        }
        let all_said = self.farewells.iter().flatten().all(|farewell| farewell.left == 0);
        if all_said && let Some(told) = self.told.take() {
            told.set(End::Done(Buffer::empty()));
        }
        self.farewells.iter().all(Option::is_none)
    }
}

impl Farewell {
    fn say(&mut self, memory: Option<&Memory>) -> Result<(), TransferError> {
        if let (Some(outgoing), Some(memory)) = (&mut self.unfinished, memory) {
            while outgoing.push(&mut self.link, memory, None)? {}
            if !outgoing.done() {
                return Ok(());
            }
            self.unfinished = None;
        }
        if self.left > 0 {
            self.left -= self.link.write(&self.frame[HEADER - self.left..], &[])?;
            if self.left == 0 {
                // The peer's own end of the connection tells whether this worked.
                let _ = shutdown(self.link.wire.socket(), Shutdown::Write);
            }
        }
        Ok(())
    }
}
