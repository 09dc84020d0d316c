//! Moves the lost slices: every participant sends what it holds and receives what it shall own, in one exchange.
//!
//! Blocks go into fresh buffers; nothing that is held is touched (ONLY-COPY). Each block carries its epoch, the
//! transfer it answers and a checksum.

use crate::groups::{CommError, Communicator};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Epoch, Transfer, WorkerKey};
use reknit_model::{Real, Received, Shard, ShardError};
use reknit_plane::{Buffer, Op};

#[derive(Debug, thiserror::Error)]
pub enum ReshardError {
    #[error(transparent)]
    Plane(#[from] CommError),
    #[error("the plan wants {transfer} sent from this worker: {source}")]
    NotHeld { transfer: String, source: ShardError },
    #[error(
        "the plan wants {transfer} sent from this worker, which holds nothing of the step to resume from"
    )]
    NothingHeld { transfer: String },
    #[error("the block of {transfer} from worker {from} is damaged: {what}")]
    Damaged { transfer: String, from: WorkerKey, what: &'static str },
}

/// Epoch, number of the transfer in the plan, length of the payload, CRC-32 of the payload; little-endian.
const HEADER: usize = 8 + 4 + 8 + 4;

/// Runs the transfers in which this worker takes part, each with its number in the plan.
///
/// `participants` are the ranks of `comm`, in order. Returns what came, and how many bytes it was.
pub fn exchange<T: Real>(
    comm: &mut Communicator,
    model: &ModelSpec,
    epoch: Epoch,
    transfers: &[(usize, Transfer)],
    participants: &[WorkerKey],
    held: Option<&Shard<T>>,
) -> Result<(Received, u64), ReshardError> {
    let me = &participants[comm.rank()];
    let between = |from: &WorkerKey, to: &WorkerKey| {
        let (from, to) = (from.clone(), to.clone());
        let all = transfers.iter().map(|(number, transfer)| (*number, transfer));
        all.filter(move |(_, transfer)| (&transfer.from, &transfer.to) == (&from, &to))
    };

    let mut outgoing = Vec::new();
    let mut send = Vec::with_capacity(participants.len());
    for to in participants {
        let before = outgoing.len();
        for (number, transfer) in between(me, to) {
            write_block(epoch, number, transfer, held, &mut outgoing)?;
        }
        send.push(outgoing.len() - before);
    }
    let length = |transfer: &Transfer| HEADER + payload_len::<T>(model, transfer);
    let receive = participants
        .iter()
        .map(|from| between(from, me).map(|(_, transfer)| length(transfer)).sum())
        .collect();

    let incoming = comm.run(Op::AllToAllV { buffer: Buffer::Bytes(outgoing), send, receive })?;
    let incoming = match incoming {
        Buffer::Bytes(bytes) => bytes,
        Buffer::F32(_) | Buffer::F64(_) => Vec::new(),
    };
    let mut rest = incoming.as_slice();
    let mut received = Received::default();
    for from in participants {
        for (number, transfer) in between(from, me) {
            let block =
                rest.split_off(..length(transfer)).ok_or_else(|| damaged(transfer, "it is too short"))?;
            let payload = check_block(epoch, number, transfer, block)?.to_vec();
            match transfer.axis {
                Some(axis) => received.add_units(axis, transfer.units.clone(), payload),
                None => received.set_replicated(payload),
            }
        }
    }
    Ok((received, incoming.len() as u64))
}

fn payload_len<T: Real>(model: &ModelSpec, transfer: &Transfer) -> usize {
    let parameters = match transfer.axis {
        Some(axis) => transfer.units.len() as usize * Shard::<T>::unit_len(model, axis.family),
        None => model.replicated_params() as usize,
    };
    // A weight and both Adam moments.
    parameters * 3 * size_of::<T>()
}

fn write_block<T: Real>(
    epoch: Epoch,
    number: usize,
    transfer: &Transfer,
    held: Option<&Shard<T>>,
    out: &mut Vec<u8>,
) -> Result<(), ReshardError> {
    let held = held.ok_or_else(|| ReshardError::NothingHeld { transfer: describe(transfer) })?;
    let start = out.len();
    out.resize(start + HEADER, 0);
    match transfer.axis {
        Some(axis) => held
            .export_units(axis, &transfer.units, out)
            .map_err(|source| ReshardError::NotHeld { transfer: describe(transfer), source })?,
        None => held.export_replicated(out),
    }
    let payload = &out[start + HEADER..];
    let (length, checksum) = (payload.len() as u64, crc32fast::hash(payload));
    let header = &mut out[start..start + HEADER];
    header[..8].copy_from_slice(&epoch.0.to_le_bytes());
    header[8..12].copy_from_slice(&(number as u32).to_le_bytes());
    header[12..20].copy_from_slice(&length.to_le_bytes());
    header[20..].copy_from_slice(&checksum.to_le_bytes());
    Ok(())
}

fn check_block<'a>(
    epoch: Epoch,
    number: usize,
    transfer: &Transfer,
    block: &'a [u8],
) -> Result<&'a [u8], ReshardError> {
    let (header, payload) = block.split_at(HEADER);
    let expected =
        [&epoch.0.to_le_bytes()[..], &(number as u32).to_le_bytes(), &(payload.len() as u64).to_le_bytes()];
    if header[..20] != expected.concat() {
        return Err(damaged(transfer, "its header is of another block"));
    }
    if header[20..] != crc32fast::hash(payload).to_le_bytes() {
        return Err(damaged(transfer, "its checksum is wrong"));
    }
    Ok(payload)
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
