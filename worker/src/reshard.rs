//! Moves the lost slices: every participant sends what it holds and receives what it shall own.
//!
//! What travels from one rank to another is cut into chunks. In each round every pair exchanges one chunk, and up to
//! [`AHEAD`] rounds are on their way: while one is on the wire, the next are read and summed, and those before are checked
//! and placed. So the memory needed beyond old and new state is a few chunks for each peer, whatever moves.
//!
//! What comes lies behind what is held, which nothing touches (ONLY-COPY). Each piece of a block carries its epoch, the
//! transfer it answers, its place in it and a checksum.

use crate::groups::{CommError, Communicator, Running, bytes};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Epoch, Transfer, WorkerKey};
use reknit_model::{ArrivalError, Real, Shard, ShardError};
use reknit_plane::{Buffer, Op, Reduce};
use std::collections::VecDeque;
use std::ops::Range;

#[derive(Debug, thiserror::Error)]
pub enum ReshardError {
    #[error(transparent)]
    Plane(#[from] CommError),
    #[error("the plan wants {transfer} sent from this worker: {source}")]
    NotHeld { transfer: String, source: ShardError },
    #[error("the block of {transfer} from worker {from} is damaged: {what}")]
    Damaged { transfer: String, from: WorkerKey, what: &'static str },
    #[error("the plan brings this worker what it does not need: {0}")]
    Unexpected(#[from] ArrivalError),
}

/// Payload of a round for one peer, in bytes. Two of them about fill a shared ring, so that the sender need not
/// wait while the receiver places one; and it is long against what a round costs. See `examples/reshard_rate.rs`.
pub const CHUNK: usize = 256 << 10;

/// Payload behind one checksum at most: summed while it is still in the cache, after it was read and before it is placed.
const PIECE: usize = 32 << 10;

/// Rounds that are on their way before the first of them is waited for.
const AHEAD: usize = 4;

/// Epoch, number of the transfer in the plan, where in its block the piece begins, its length, CRC-32; little-endian.
const HEADER: usize = 8 + 4 + 8 + 8 + 4;

/// A part of one transfer's block.
#[derive(Debug, Clone, Copy)]
struct Piece<'a> {
    number: usize,
    transfer: &'a Transfer,
    at: usize,
    len: usize,
}

/// The transfers in which this worker takes part.
#[derive(Debug)]
pub struct Exchange<'a> {
    pub model: &'a ModelSpec,
    pub epoch: Epoch,
    /// Each with its number in the plan.
    pub transfers: &'a [(usize, Transfer)],
    /// The ranks of the communicator, in order.
    pub participants: &'a [WorkerKey],
    /// A multiple of 8; the same on all.
    pub chunk: usize,
}

impl Exchange<'_> {
    /// Sends what the shard holds and fills the room that it has made. Returns how many bytes came.
    ///
    /// # Errors
    /// The exchange is over for all; a part has come, and what is held is as it was.
    pub fn run<T: Real>(&self, comm: &mut Communicator, shard: &mut Shard<T>) -> Result<u64, ReshardError> {
        let me = &self.participants[comm.rank()];
        let pairs = |pair: &dyn Fn(&WorkerKey) -> [WorkerKey; 2]| -> Vec<_> {
            self.participants.iter().map(|peer| self.rounds::<T>(&pair(peer))).collect()
        };
        let outgoing = pairs(&|peer| [me.clone(), peer.clone()]);
        let incoming = pairs(&|peer| [peer.clone(), me.clone()]);
        let longest = outgoing.iter().chain(&incoming).map(Vec::len).max().unwrap_or_default();
        // Others may have more to say to each other.
        let mut rounds = vec![longest as f64];
        comm.all_reduce(Reduce::Max, &mut rounds)?;
        let rounds = rounds.first().map_or(0, |rounds| *rounds as usize);

        let mut came = 0;
        let mut ahead: VecDeque<(usize, Running)> = VecDeque::with_capacity(AHEAD);
        for round in 0..rounds + AHEAD {
            // A round works in the memory of one that is over.
            let mut buffer = Vec::new();
            if round >= AHEAD
                && let Some((round, running)) = ahead.pop_front()
            {
                buffer = bytes(comm.wait(running)?)?;
                let [_, receive] = places(round, &outgoing, &incoming);
                for (rounds, place) in incoming.iter().zip(receive) {
                    came += place.len() as u64;
                    self.take_in(pieces(rounds, round), &buffer[place], shard)?;
                }
            }
            if round < rounds {
                let [send, receive] = places(round, &outgoing, &incoming);
                buffer.resize(receive.last().map_or(0, |last| last.end), 0);
                for (rounds, place) in outgoing.iter().zip(&send) {
                    self.give_out(pieces(rounds, round), &mut buffer[place.clone()], shard)?;
                }
                let op = Op::AllToAllV { buffer: Buffer::Bytes(buffer), send, receive };
                ahead.push_back((round, comm.submit(op)));
            }
        }
        Ok(came)
    }

    /// What one worker sends another, by round. Both of them find the same.
    fn rounds<T: Real>(&self, [from, to]: &[WorkerKey; 2]) -> Vec<Vec<Piece<'_>>> {
        let mut rounds: Vec<Vec<Piece<'_>>> = Vec::new();
        let mut room = 0;
        for (number, transfer) in self.transfers {
            if (&transfer.from, &transfer.to) != (from, to) {
                continue;
            }
            let (mut at, end) = (0, payload_len::<T>(self.model, transfer));
            while at < end {
                if room == 0 {
                    rounds.push(Vec::new());
                    room = self.chunk;
                }
                let len = room.min(end - at).min(PIECE);
                if let Some(round) = rounds.last_mut() {
                    round.push(Piece { number: *number, transfer, at, len });
                }
                at += len;
                room -= len;
            }
        }
        rounds
    }

    /// Writes these pieces, which are for one peer.
    fn give_out<T: Real>(
        &self,
        pieces: &[Piece<'_>],
        out: &mut [u8],
        shard: &Shard<T>,
    ) -> Result<(), ReshardError> {
        let mut rest = out;
        for piece in pieces {
            let transfer = piece.transfer;
            let (header, after) = std::mem::take(&mut rest).split_at_mut(HEADER);
            let (payload, after) = after.split_at_mut(piece.len);
            shard
                .export_part(transfer.axis, &transfer.units, piece.at, payload)
                .map_err(|source| ReshardError::NotHeld { transfer: describe(transfer), source })?;
            header.copy_from_slice(&self.header(piece, payload));
            rest = after;
        }
        Ok(())
    }

    /// Checks and places these pieces, which one peer has sent.
    fn take_in<T: Real>(
        &self,
        pieces: &[Piece<'_>],
        bytes: &[u8],
        shard: &mut Shard<T>,
    ) -> Result<(), ReshardError> {
        let mut rest = bytes;
        for piece in pieces {
            let transfer = piece.transfer;
            let (block, after) = rest.split_at(HEADER + piece.len);
            let (header, payload) = block.split_at(HEADER);
            let expected = self.header(piece, payload);
            if header[..HEADER - 4] != expected[..HEADER - 4] {
                return Err(damaged(transfer, "its header is of another block"));
            }
            if *header != expected {
                return Err(damaged(transfer, "its checksum is wrong"));
            }
            shard.receive(transfer.axis, &transfer.units, piece.at, payload)?;
            rest = after;
        }
        Ok(())
    }

    fn header(&self, piece: &Piece<'_>, payload: &[u8]) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&self.epoch.0.to_le_bytes());
        header[8..12].copy_from_slice(&(piece.number as u32).to_le_bytes());
        header[12..20].copy_from_slice(&(piece.at as u64).to_le_bytes());
        header[20..28].copy_from_slice(&(piece.len as u64).to_le_bytes());
        header[28..].copy_from_slice(&crc32fast::hash(payload).to_le_bytes());
        header
    }
}

/// The round's pieces of what one worker sends another.
fn pieces<'a, 'b>(rounds: &'b [Vec<Piece<'a>>], round: usize) -> &'b [Piece<'a>] {
    rounds.get(round).map_or(&[], Vec::as_slice)
}

/// Where in the round's buffer lies what each peer is sent, and behind it what each sends.
fn places(
    round: usize,
    outgoing: &[Vec<Vec<Piece<'_>>>],
    incoming: &[Vec<Vec<Piece<'_>>>],
) -> [Vec<Range<usize>>; 2] {
    let mut end = 0;
    [outgoing, incoming].map(|pairs| {
        let place = |rounds: &Vec<Vec<Piece<'_>>>| {
            let start = end;
            end += pieces(rounds, round).iter().map(|piece| HEADER + piece.len).sum::<usize>();
            start..end
        };
        pairs.iter().map(place).collect()
    })
}

fn payload_len<T: Real>(model: &ModelSpec, transfer: &Transfer) -> usize {
    let parameters = match transfer.axis {
        Some(axis) => transfer.units.len() as usize * Shard::<T>::unit_len(model, axis.family),
        None => model.replicated_params() as usize,
    };
    // A weight and both Adam moments.
    parameters * 3 * size_of::<T>()
}

fn damaged(transfer: &Transfer, what: &'static str) -> ReshardError {
    ReshardError::Damaged { transfer: describe(transfer), from: transfer.from.clone(), what }
}

fn describe(transfer: &Transfer) -> String {
    match transfer.axis {
        Some(axis) => format!("{axis} units {}", transfer.units),
        None => "the replicated parameters".to_owned(),
    }
}
