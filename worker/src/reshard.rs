//! Moves the lost slices: every participant sends what it holds and receives what it shall own.
//!
//! What travels from one rank to another is cut into pieces, and goes straight from the one's shard into the room that the
//! other has made behind what it holds, which nothing touches (ONLY-COPY): no memory is needed beyond old and new state.
//! Behind the pieces of a round comes a label for each, with its epoch, the transfer it answers, its place in that and a
//! checksum. A piece is summed just before it leaves and just after it has come, while it is in the cache.

mod round;

use crate::groups::{CommError, Communicator};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Epoch, Transfer, WorkerKey};
use reknit_model::{ArrivalError, Real, Shard, ShardError};
use reknit_plane::Reduce;
use round::Round;

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

/// Payload of a round for one peer, in bytes. Each round has a deadline of its own.
pub const CHUNK: usize = 16 << 20;

/// Payload behind one checksum at most.
const PIECE: usize = 64 << 10;

/// Epoch, number of the transfer in the plan, where in its block the piece begins, its length, CRC-32; little-endian.
const LABEL: usize = 8 + 4 + 8 + 8 + 4;

/// A part of one transfer's block.
#[derive(Debug, Clone, Copy)]
struct Piece<'a> {
    number: usize,
    transfer: &'a Transfer,
    at: usize,
    len: usize,
    /// Its block is whole with it.
    is_last: bool,
}

impl Piece<'_> {
    /// What belongs to it of bytes that lie from its byte `within` on.
    fn cut<'a>(&self, bytes: &'a [u8], within: usize) -> &'a [u8] {
        &bytes[..bytes.len().min(self.len - within)]
    }

    fn label(&self, epoch: Epoch, sum: u32) -> [u8; LABEL] {
        let mut label = [0; LABEL];
        label[..8].copy_from_slice(&epoch.0.to_le_bytes());
        label[8..12].copy_from_slice(&(self.number as u32).to_le_bytes());
        label[12..20].copy_from_slice(&(self.at as u64).to_le_bytes());
        label[20..28].copy_from_slice(&(self.len as u64).to_le_bytes());
        label[28..].copy_from_slice(&sum.to_le_bytes());
        label
    }

    fn not_held(&self, source: ShardError) -> ReshardError {
        ReshardError::NotHeld { transfer: describe(self.transfer), source }
    }

    fn damaged(&self, what: &'static str) -> ReshardError {
        let Transfer { from, .. } = self.transfer;
        ReshardError::Damaged { transfer: describe(self.transfer), from: from.clone(), what }
    }
}

/// The transfers in which this worker takes part.
#[derive(Debug)]
pub struct Reshard<'a> {
    pub model: &'a ModelSpec,
    pub epoch: Epoch,
    /// Each with its number in the plan.
    pub transfers: &'a [(usize, Transfer)],
    /// A multiple of 8; the same on all.
    pub chunk: usize,
}

impl Reshard<'_> {
    /// Sends what the shard holds and fills the room that it has made. Returns how many bytes came.
    ///
    /// # Errors
    /// The exchange is over for all; a part has come, and what is held is as it was.
    pub fn run<T: Real>(&self, comm: &mut Communicator, shard: &mut Shard<T>) -> Result<u64, ReshardError> {
        let participants = comm.members();
        let me = &participants[comm.rank()];
        let pairs = |pair: &dyn Fn(&WorkerKey) -> [WorkerKey; 2]| -> Vec<_> {
            participants.iter().map(|peer| self.rounds::<T>(&pair(peer))).collect()
        };
        let outgoing = pairs(&|peer| [me.clone(), peer.clone()]);
        let incoming = pairs(&|peer| [peer.clone(), me.clone()]);
        let longest = outgoing.iter().chain(&incoming).map(Vec::len).max().unwrap_or_default();
        // Others may have more to say to each other.
        let mut rounds = vec![longest as f64];
        comm.all_reduce(Reduce::Max, &mut rounds)?;
        let rounds = rounds.first().map_or(0, |rounds| *rounds as usize);

        let mut came = 0;
        for round in 0..rounds {
            let to = outgoing.iter().map(|rounds| pieces(rounds, round));
            let from = incoming.iter().map(|rounds| pieces(rounds, round));
            let mut lent = Round::new(self.epoch, shard, to, from);
            let exchanged = comm.exchange(&mut lent);
            lent.refused()?;
            exchanged?;
            came += lent.check()?;
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
            let (mut at, end) = (0, Shard::<T>::block_len(self.model, transfer.axis, &transfer.units));
            while at < end {
                if room == 0 {
                    rounds.push(Vec::new());
                    room = self.chunk;
                }
                let len = room.min(end - at).min(PIECE);
                if let Some(round) = rounds.last_mut() {
                    round.push(Piece { number: *number, transfer, at, len, is_last: at + len == end });
                }
                at += len;
                room -= len;
            }
        }
        rounds
    }
}

/// The round's pieces of what one worker sends another.
fn pieces<'a, 'b>(rounds: &'b [Vec<Piece<'a>>], round: usize) -> &'b [Piece<'a>] {
    rounds.get(round).map_or(&[], Vec::as_slice)
}

fn describe(transfer: &Transfer) -> String {
    match transfer.axis {
        Some(axis) => format!("{axis} units {}", transfer.units),
        None => "the replicated parameters".to_owned(),
    }
}
