//! A data plane that loses its rank at a chosen operation: the trait seam for faults in mid-step.

use reknit_plane::{
    AbortReason, Aborter, Buffer, Endpoint, Group, GroupSpec, Lent, Op, Plane, PlaneError, Work,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// What goes wrong, once, at the `at`-th of these operations (from 0) in the groups whose name starts with `group`.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    pub(crate) group: &'static str,
    pub(crate) op: fn(&str) -> bool,
    pub(crate) at: u64,
    pub(crate) how: How,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// The rank dies before the operation, or amid an exchange: its sockets close.
    Die,
    /// The operation succeeds, on this rank too, but this rank never learns of it. It fails only when all others have
    /// acted on their success: an earlier end of its connections could cut some of them short.
    LoseAnswer,
    /// The first byte that the rank sends each other in an exchange is another one.
    Damage,
}

/// Counts what happened on all ranks.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    count: Mutex<u64>,
    more: Condvar,
}

impl Tally {
    pub(crate) fn add(&self) {
        *self.count.lock().unwrap() += 1;
        self.more.notify_all();
    }

    pub(crate) fn now(&self) -> u64 {
        *self.count.lock().unwrap()
    }

    fn wait_for(&self, count: u64) {
        let all = self.count.lock().unwrap();
        let (_all, timeout) =
            self.more.wait_timeout_while(all, Duration::from_secs(20), |now| *now < count).unwrap();
        assert!(!timeout.timed_out(), "the others never committed");
    }
}

#[derive(Debug, Default)]
pub(crate) struct Trigger {
    /// The operations submitted so far: the group's name and the operation's.
    pub(crate) log: Mutex<Vec<(String, &'static str)>>,
    /// No operation seems done before it is waited for.
    pub(crate) blind: AtomicBool,
    pub(crate) fault: Mutex<Option<Fault>>,
    pub(crate) seen: AtomicU64,
    pub(crate) fired: AtomicBool,
    /// Steps committed on all ranks together, and how many of them a lost answer waits for.
    pub(crate) commits: Arc<Tally>,
    pub(crate) wait_for: AtomicU64,
}

pub(crate) struct FaultPlane {
    pub(crate) inner: Arc<dyn Plane>,
    pub(crate) trigger: Arc<Trigger>,
}

impl Trigger {
    pub(crate) fn arm(&self, fault: Fault) {
        self.seen.store(0, Ordering::SeqCst);
        self.fired.store(false, Ordering::SeqCst);
        *self.fault.lock().unwrap() = Some(fault);
    }

    pub(crate) fn disarm(&self) -> bool {
        *self.fault.lock().unwrap() = None;
        self.fired.load(Ordering::SeqCst)
    }

    fn due(&self, group: &str, op: &'static str) -> Option<How> {
        self.log.lock().unwrap().push((group.to_owned(), op));
        let mut fault = self.fault.lock().unwrap();
        let armed = fault.as_ref().filter(|fault| group.starts_with(fault.group) && (fault.op)(op))?;
        if self.seen.fetch_add(1, Ordering::SeqCst) < armed.at {
            return None;
        }
        let how = armed.how;
        *fault = None;
        self.fired.store(true, Ordering::SeqCst);
        Some(how)
    }
}

impl Plane for FaultPlane {
    fn endpoint(&self) -> Endpoint {
        self.inner.endpoint()
    }

    fn join(&self, spec: GroupSpec) -> Result<Box<dyn Group>, PlaneError> {
        let name = spec.name.clone();
        let group = self.inner.join(spec)?;
        Ok(Box::new(FaultGroup { name, group, trigger: Arc::clone(&self.trigger) }))
    }

    fn abort_joins(&self, epoch: u64) {
        self.inner.abort_joins(epoch);
    }
}

struct FaultGroup {
    name: String,
    group: Box<dyn Group>,
    trigger: Arc<Trigger>,
}

impl Group for FaultGroup {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn submit(&mut self, op: Op, deadline: Duration) -> Box<dyn Work> {
        let lost = || PlaneError::Aborted { group: self.name.clone(), reason: AbortReason::Leaving };
        match self.trigger.due(&self.name, name(&op)) {
            None if self.trigger.blind.load(Ordering::SeqCst) => {
                Box::new(Blind(self.group.submit(op, deadline)))
            }
            None => self.group.submit(op, deadline),
            Some(How::Die) => {
                self.group.aborter().abort(AbortReason::Leaving);
                Box::new(Failed { error: lost(), first: None })
            }
            Some(How::Damage) => unreachable!("exchanges are damaged"),
            Some(How::LoseAnswer) => {
                let first = (self.group.submit(op, deadline), Arc::clone(&self.trigger));
                Box::new(Failed { error: lost(), first: Some(first) })
            }
        }
    }

    fn exchange(&mut self, memory: &mut dyn Lent, deadline: Duration) -> Result<(), PlaneError> {
        let how = self.trigger.due(&self.name, "Exchange");
        let mut faulty = Faulty { memory, how, passed: 0, damaged: Vec::new() };
        let result = self.group.exchange(&mut faulty, deadline);
        match how {
            None | Some(How::Damage) => result,
            Some(How::Die) => {
                result.expect_err("its memory came to an end");
                Err(PlaneError::Aborted { group: self.name.clone(), reason: AbortReason::Leaving })
            }
            Some(How::LoseAnswer) => unreachable!("an exchange decides nothing"),
        }
    }

    fn health(&self) -> Option<PlaneError> {
        self.group.health()
    }

    fn aborter(&self) -> Arc<dyn Aborter> {
        self.group.aborter()
    }

    fn retire(self: Box<Self>) {
        self.group.retire();
    }
}

struct Faulty<'a> {
    memory: &'a mut dyn Lent,
    how: Option<How>,
    /// Bytes lent so far.
    passed: usize,
    damaged: Vec<u8>,
}

impl Faulty<'_> {
    /// So many bytes it lends before it dies: a part of a piece.
    const LAST: usize = 333;

    fn lends(&mut self, len: usize) -> usize {
        let len = match self.how {
            Some(How::Die) => len.min(Self::LAST - self.passed),
            Some(How::Damage | How::LoseAnswer) | None => len,
        };
        self.passed += len;
        len
    }
}

impl Lent for Faulty<'_> {
    fn outgoing(&self, to: usize) -> usize {
        self.memory.outgoing(to)
    }

    fn incoming(&self, from: usize) -> usize {
        self.memory.incoming(from)
    }

    fn send(&mut self, to: usize, at: usize) -> &[u8] {
        let len = self.memory.send(to, at).len();
        let len = self.lends(len);
        let bytes = &self.memory.send(to, at)[..len];
        if at > 0 || self.how != Some(How::Damage) {
            return bytes;
        }
        self.damaged = bytes.to_vec();
        self.damaged[0] ^= 1;
        &self.damaged
    }

    fn receive(&mut self, from: usize, at: usize) -> &mut [u8] {
        let len = self.memory.receive(from, at).len();
        let len = self.lends(len);
        &mut self.memory.receive(from, at)[..len]
    }
}

fn name(op: &Op) -> &'static str {
    match op {
        Op::AllReduce { .. } => "AllReduce",
        Op::ReduceScatterV { .. } => "ReduceScatterV",
        Op::AllGatherV { .. } => "AllGatherV",
        Op::AllToAllV { .. } => "AllToAllV",
        Op::Broadcast { .. } => "Broadcast",
        Op::Send { .. } => "Send",
        Op::Recv { .. } => "Recv",
        Op::Barrier => "Barrier",
    }
}

struct Blind(Box<dyn Work>);

impl Work for Blind {
    fn wait(self: Box<Self>) -> Result<Buffer, PlaneError> {
        self.0.wait()
    }

    fn is_done(&self) -> bool {
        false
    }
}

struct Failed {
    error: PlaneError,
    first: Option<(Box<dyn Work>, Arc<Trigger>)>,
}

impl Work for Failed {
    fn wait(self: Box<Self>) -> Result<Buffer, PlaneError> {
        if let Some((work, trigger)) = self.first {
            work.wait().expect("the operation itself succeeds");
            trigger.commits.wait_for(trigger.wait_for.load(Ordering::SeqCst));
        }
        Err(self.error)
    }

    fn is_done(&self) -> bool {
        self.first.as_ref().is_none_or(|(work, _)| work.is_done())
    }
}
