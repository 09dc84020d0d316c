//! Turns an operation into rounds of sends and receives. Pure: a function of the operation, the rank and the size.
//!
//! All algorithms are direct: each rank talks to each other one itself, with small messages in one round, and large ones
//! as a reduce-scatter and an all-gather, chunk by chunk. Each rank then sends and receives as much as in a ring, in
//! fewer steps, and no order of the ranks is forced upon the sum. Reductions take the ranks' values in rank
//! order, whoever computes them, so all ranks and all repeats get the same bits.

mod check;

use crate::buffer::Kind;
use crate::{Op, Reduce};
use check::{check_counts, check_places, in_group, numeric};
use std::ops::Range;

/// All-reduces up to this many bytes run in one round: everybody sends everything to everybody.
pub(super) const TINY: usize = 16 << 10;

/// Larger ones run in chunks of this many bytes per rank, so that what is reduced is still in the cache, and the scratch
/// memory stays small. Two such messages fit into a shared ring at once.
pub(super) const PART: usize = 128 << 10;

/// Which of an operation's memories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    /// The buffer given with the operation.
    Data,
    Scratch,
    /// Lent by the thread that runs the operation, for this transfer.
    Lent,
}

/// A range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) space: Space,
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Span {
    /// At most `most` bytes of it from `start` on; nothing when it ends before.
    fn piece(self, start: usize, most: usize) -> Span {
        let start = start.min(self.len);
        Span { start: self.start + start, len: most.min(self.len - start), ..self }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) peer: usize,
    pub(super) span: Span,
    /// Which of the same round's sends or receives comes before it on the way to or from the same peer.
    pub(super) after: Option<usize>,
}

impl Transfer {
    fn new(peer: usize, span: Span) -> Transfer {
        Transfer { peer, span, after: None }
    }
}

/// Local work after a round's transfers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Inside the data.
    Copy { from: Span, to: Span },
    /// `into` becomes the reduction of `inputs`, taken in this order. `into` may be one of them.
    Reduce { reduce: Reduce, inputs: Vec<Span>, into: Span },
}

/// Transfers that run at the same time, then local work. Those with one peer go in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) sends: Vec<Transfer>,
    pub(super) receives: Vec<Transfer>,
    pub(super) then: Vec<Step>,
}

impl Round {
    /// Adds a second exchange with the same peers behind this one.
    fn and_then(mut self, other: Round) -> Round {
        let behind = |first: &mut Vec<Transfer>, second: Vec<Transfer>| {
            let any = !first.is_empty();
            for (place, transfer) in second.into_iter().enumerate() {
                first.push(Transfer { after: any.then_some(place), ..transfer });
            }
        };
        behind(&mut self.sends, other.sends);
        behind(&mut self.receives, other.receives);
        self.then.extend(other.then);
        self
    }

    /// A rank that only sends would wait for whom it sends nothing to.
    fn leave_out_empty(&mut self) {
        for transfers in [&mut self.sends, &mut self.receives] {
            transfers.retain(|transfer| transfer.span.len > 0);
        }
    }
}

/// What numbers an operation: the group, or one direction between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Channel {
    Group,
    To(usize),
    From(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum OpCode {
    AllReduce = 1,
    ReduceScatterV = 2,
    AllGatherV = 3,
    AllToAllV = 4,
    Broadcast = 5,
    PointToPoint = 6,
    Barrier = 7,
    Exchange = 8,
}

impl OpCode {
    pub(super) fn name(code: u8) -> &'static str {
        match code {
            1 => "all-reduce",
            2 => "reduce-scatter",
            3 => "all-gather",
            4 => "all-to-all",
            5 => "broadcast",
            6 => "send/receive",
            7 => "barrier",
            8 => "exchange",
            _ => "unknown operation",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Program {
    pub(super) code: OpCode,
    /// Of everything that must be equal on all ranks that take part.
    pub(super) digest: u64,
    pub(super) channel: Channel,
    pub(super) kind: Kind,
    /// In bytes. Never more than [`PART`] for each peer.
    pub(super) scratch: usize,
    pub(super) rounds: Vec<Round>,
}

/// Fails with a text when the operation makes no sense for its buffer or group.
pub(super) fn lower(op: &Op, rank: usize, size: usize) -> Result<Program, String> {
    let group = Ranks { rank, size };
    match op {
        Op::AllReduce { reduce, buffer } => {
            let kind = numeric(buffer.kind())?;
            Ok(group.all_reduce(*reduce, kind, buffer.len()))
        }
        Op::ReduceScatterV { buffer, counts } => {
            let kind = numeric(buffer.kind())?;
            check_counts(counts, size, buffer.len())?;
            Ok(group.reduce_scatter(kind, counts))
        }
        Op::AllGatherV { buffer, counts } => {
            check_counts(counts, size, buffer.len())?;
            Ok(group.all_gather(buffer.kind(), counts))
        }
        Op::AllToAllV { buffer, send, receive } => {
            check_places(send, receive, rank, size, buffer.len())?;
            Ok(group.all_to_all(buffer.kind(), send, receive))
        }
        Op::Broadcast { root, buffer } => {
            in_group(*root, size)?;
            Ok(group.broadcast(*root, buffer.kind(), buffer.len()))
        }
        Op::Send { to, buffer } => {
            group.check_peer(*to)?;
            Ok(group.point_to_point(Channel::To(*to), buffer.kind(), buffer.len()))
        }
        Op::Recv { from, buffer } => {
            group.check_peer(*from)?;
            Ok(group.point_to_point(Channel::From(*from), buffer.kind(), buffer.len()))
        }
        Op::Barrier => Ok(group.barrier()),
    }
}

/// An exchange of so many bytes with each rank.
pub(super) fn exchange(rank: usize, outgoing: &[usize], incoming: &[usize]) -> Result<Program, String> {
    if outgoing[rank] > 0 || incoming[rank] > 0 {
        return Err("a rank exchanges nothing with itself".into());
    }
    let span = |len| Span { space: Space::Lent, start: 0, len };
    let mut round = Ranks { rank, size: outgoing.len() }.exchange(
        |to| span(outgoing[to]),
        |from| span(incoming[from]),
        Vec::new(),
    );
    round.leave_out_empty();
    Ok(Program {
        code: OpCode::Exchange,
        digest: digest(&[OpCode::Exchange as u64]),
        channel: Channel::Group,
        kind: Kind::Bytes,
        scratch: 0,
        rounds: vec![round],
    })
}

#[derive(Clone, Copy)]
struct Ranks {
    rank: usize,
    size: usize,
}

impl Ranks {
    fn peers(self) -> impl Iterator<Item = usize> {
        (0..self.size).filter(move |&peer| peer != self.rank)
    }

    /// One message to each peer, and one from each.
    fn exchange(
        self,
        send: impl Fn(usize) -> Span,
        receive: impl Fn(usize) -> Span,
        then: Vec<Step>,
    ) -> Round {
        let transfers =
            |span: &dyn Fn(usize) -> Span| self.peers().map(|peer| Transfer::new(peer, span(peer))).collect();
        Round { sends: transfers(&send), receives: transfers(&receive), then }
    }

    /// Where the values of each rank for a span of this rank's data lie: its own in place, the others' in scratch.
    fn contributions(self, own: Span) -> Vec<Span> {
        (0..self.size)
            .map(|from| match from.cmp(&self.rank) {
                std::cmp::Ordering::Equal => own,
                std::cmp::Ordering::Less => scratch(from, own.len),
                std::cmp::Ordering::Greater => scratch(from - 1, own.len),
            })
            .collect()
    }

    fn all_reduce(self, reduce: Reduce, kind: Kind, len: usize) -> Program {
        let whole = span(Space::Data, 0, len, kind);
        let digest = digest(&[OpCode::AllReduce as u64, reduce_code(reduce), kind_code(kind), len as u64]);
        let mut program = Program {
            code: OpCode::AllReduce,
            digest,
            channel: Channel::Group,
            kind,
            scratch: 0,
            rounds: Vec::new(),
        };
        if self.size == 1 {
            return program;
        }
        if whole.len <= TINY {
            let inputs = self.contributions(whole);
            program.scratch = (self.size - 1) * whole.len;
            program.rounds.push(self.exchange(
                |_| whole,
                |from| inputs[from],
                vec![Step::Reduce { reduce, inputs: inputs.clone(), into: whole }],
            ));
            return program;
        }
        // Each rank reduces its part of a chunk, and gives it to all while the next chunk's parts are on their way.
        let most = self.size * PART / kind.width();
        let mut round = Round::default();
        for start in (0..len).step_by(most) {
            let chunk = even_parts(most.min(len - start), self.size);
            let mut parts = spans(&chunk, kind);
            for part in &mut parts {
                part.start += start * kind.width();
            }
            let own = parts[self.rank];
            let inputs = self.contributions(own);
            program.scratch = program.scratch.max((self.size - 1) * own.len);
            let then = vec![Step::Reduce { reduce, inputs: inputs.clone(), into: own }];
            let scatter = self.exchange(|to| parts[to], |from| inputs[from], then);
            program.rounds.push(round.and_then(scatter));
            round = self.exchange(|_| own, |from| parts[from], Vec::new());
        }
        program.rounds.push(round);
        program
    }

    /// Chunk by chunk, for the same reasons as above. Ranks whose part has ended go on with nothing.
    fn reduce_scatter(self, kind: Kind, counts: &[usize]) -> Program {
        let parts = spans(counts, kind);
        let longest = parts.iter().map(|part| part.len).max().unwrap_or_default();
        let round = |start: usize| {
            let piece = |rank: usize| parts[rank].piece(start, PART);
            let own = piece(self.rank);
            let inputs = self.contributions(own);
            let then = vec![Step::Reduce { reduce: Reduce::Sum, inputs: inputs.clone(), into: own }];
            self.exchange(piece, |from| inputs[from], then)
        };
        Program {
            code: OpCode::ReduceScatterV,
            digest: counts_digest(OpCode::ReduceScatterV, kind, counts),
            channel: Channel::Group,
            kind,
            scratch: (self.size - 1) * parts[self.rank].len.min(PART),
            rounds: (0..longest.max(1)).step_by(PART).map(round).collect(),
        }
    }

    fn all_gather(self, kind: Kind, counts: &[usize]) -> Program {
        let parts = spans(counts, kind);
        Program {
            code: OpCode::AllGatherV,
            digest: counts_digest(OpCode::AllGatherV, kind, counts),
            channel: Channel::Group,
            kind,
            scratch: 0,
            rounds: vec![self.exchange(|_| parts[self.rank], |from| parts[from], Vec::new())],
        }
    }

    /// The counts of two ranks differ; each message's length is checked instead.
    fn all_to_all(self, kind: Kind, send: &[Range<usize>], receive: &[Range<usize>]) -> Program {
        let place = |range: &Range<usize>| span(Space::Data, range.start, range.len(), kind);
        let (from, to) = (place(&send[self.rank]), place(&receive[self.rank]));
        let then = if from == to { Vec::new() } else { vec![Step::Copy { from, to }] };
        let mut round = self.exchange(|to| place(&send[to]), |from| place(&receive[from]), then);
        round.leave_out_empty();
        Program {
            code: OpCode::AllToAllV,
            digest: digest(&[OpCode::AllToAllV as u64, kind_code(kind)]),
            channel: Channel::Group,
            kind,
            scratch: 0,
            rounds: vec![round],
        }
    }

    fn broadcast(self, root: usize, kind: Kind, len: usize) -> Program {
        let whole = span(Space::Data, 0, len, kind);
        let mut round = Round::default();
        if self.rank == root {
            round.sends = self.peers().map(|peer| Transfer::new(peer, whole)).collect();
        } else {
            round.receives.push(Transfer::new(root, whole));
        }
        Program {
            code: OpCode::Broadcast,
            digest: digest(&[OpCode::Broadcast as u64, root as u64, kind_code(kind), len as u64]),
            channel: Channel::Group,
            kind,
            scratch: 0,
            rounds: vec![round],
        }
    }

    fn point_to_point(self, channel: Channel, kind: Kind, len: usize) -> Program {
        let whole = span(Space::Data, 0, len, kind);
        let mut round = Round::default();
        match channel {
            Channel::To(peer) => round.sends.push(Transfer::new(peer, whole)),
            Channel::From(peer) => round.receives.push(Transfer::new(peer, whole)),
            Channel::Group => {}
        }
        Program {
            code: OpCode::PointToPoint,
            digest: digest(&[OpCode::PointToPoint as u64, kind_code(kind), len as u64]),
            channel,
            kind,
            scratch: 0,
            rounds: vec![round],
        }
    }

    fn barrier(self) -> Program {
        let nothing = span(Space::Scratch, 0, 0, Kind::Bytes);
        Program {
            code: OpCode::Barrier,
            digest: digest(&[OpCode::Barrier as u64]),
            channel: Channel::Group,
            kind: Kind::Bytes,
            scratch: 0,
            rounds: vec![self.exchange(|_| nothing, |_| nothing, Vec::new())],
        }
    }

    fn check_peer(self, peer: usize) -> Result<(), String> {
        in_group(peer, self.size)?;
        if peer == self.rank {
            return Err("a rank cannot send to or receive from itself".into());
        }
        Ok(())
    }
}

fn span(space: Space, start: usize, len: usize, kind: Kind) -> Span {
    Span { space, start: start * kind.width(), len: len * kind.width() }
}

fn scratch(slot: usize, len: usize) -> Span {
    Span { space: Space::Scratch, start: slot * len, len }
}

/// Consecutive parts of the data, of `counts` elements.
fn spans(counts: &[usize], kind: Kind) -> Vec<Span> {
    let mut start = 0;
    counts
        .iter()
        .map(|&count| {
            let part = span(Space::Data, start, count, kind);
            start += count;
            part
        })
        .collect()
}

/// `len` in `size` parts that differ by one element at most.
fn even_parts(len: usize, size: usize) -> Vec<usize> {
    (0..size).map(|part| len / size + usize::from(part < len % size)).collect()
}

fn reduce_code(reduce: Reduce) -> u64 {
    match reduce {
        Reduce::Sum => 1,
        Reduce::Max => 2,
    }
}

fn kind_code(kind: Kind) -> u64 {
    match kind {
        Kind::F32 => 1,
        Kind::F64 => 2,
        Kind::Bytes => 3,
    }
}

fn counts_digest(code: OpCode, kind: Kind, counts: &[usize]) -> u64 {
    let mut words = vec![code as u64, kind_code(kind)];
    words.extend(counts.iter().map(|&count| count as u64));
    digest(&words)
}

/// FNV-1a: it finds mistakes, not attacks; the handshake keeps strangers out.
fn digest(words: &[u64]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in words.iter().flat_map(|word| word.to_le_bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash
}

#[cfg(test)]
mod tests;
