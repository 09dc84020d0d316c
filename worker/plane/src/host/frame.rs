//! What stands before every piece of a message between two ranks.
//!
//! A message is cut into segments of [`SEGMENT`] bytes, each behind a header, so that a rank which gives up can say so
//! at the next segment instead of just vanishing.
//!
//! A header ends with its own checksum, and holds one of the segment behind it when that goes through a socket: the 16
//! bits of TCP's own let some damage pass, and a wrong gradient would train a wrong model without a word.

use crate::{AbortReason, PlaneError};

pub(super) const HEADER: usize = 48;
/// The header's bytes before its own checksum.
const SUMMED: usize = HEADER - 4;
/// Payload bytes behind one header at most.
pub(super) const SEGMENT: usize = 1 << 20;

const MAGIC: u32 = 0x314e_4b52; // "RKN1"

/// What a header says about the operation it belongs to. Both ends must agree on every field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) code: u8,
    pub(super) round: u16,
    pub(super) sequence: u64,
    pub(super) digest: u64,
    /// Of the whole message, in bytes.
    pub(super) length: u64,
}

/// Why a rank left, as told to its peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    EpochClosed,
    Sibling,
    Leaving,
    /// It saw this rank's connection end.
    LostPeer(usize),
    /// It waited too long for this rank.
    Deadline(usize),
    Mismatch(usize),
    Failure,
}

impl Cause {
    pub(super) fn of(error: &PlaneError) -> Cause {
        match error {
            PlaneError::PeerLost { rank, .. } => Cause::LostPeer(*rank),
            PlaneError::PeerLeft { .. } => Cause::Sibling,
            PlaneError::Deadline { waiting_for, .. } => match waiting_for.first() {
                Some(rank) => Cause::Deadline(*rank),
                None => Cause::Failure,
            },
            PlaneError::Aborted { reason, .. } => match reason {
                AbortReason::EpochClosed => Cause::EpochClosed,
                AbortReason::Sibling => Cause::Sibling,
                AbortReason::Leaving => Cause::Leaving,
            },
            PlaneError::Mismatch { rank, .. } => Cause::Mismatch(*rank),
            PlaneError::Handshake { .. } | PlaneError::Io { .. } => Cause::Failure,
        }
    }

    fn encode(self) -> (u8, u64) {
        match self {
            Cause::EpochClosed => (1, 0),
            Cause::Sibling => (2, 0),
            Cause::Leaving => (3, 0),
            Cause::LostPeer(rank) => (4, rank as u64),
            Cause::Deadline(rank) => (5, rank as u64),
            Cause::Mismatch(rank) => (6, rank as u64),
            Cause::Failure => (7, 0),
        }
    }

    fn decode(code: u8, rank: u64) -> Cause {
        let rank = usize::try_from(rank).unwrap_or(usize::MAX);
        match code {
            1 => Cause::EpochClosed,
            2 => Cause::Sibling,
            3 => Cause::Leaving,
            4 => Cause::LostPeer(rank),
            5 => Cause::Deadline(rank),
            6 => Cause::Mismatch(rank),
            _ => Cause::Failure,
        }
    }
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Cause::EpochClosed => f.write_str("its epoch was closed"),
            Cause::Sibling => f.write_str("a sibling group of it failed"),
            Cause::Leaving => f.write_str("it is going away"),
            Cause::LostPeer(rank) => write!(f, "it lost rank {rank}"),
            Cause::Deadline(rank) => write!(f, "it waited too long for rank {rank}"),
            Cause::Mismatch(rank) => write!(f, "rank {rank} runs another operation than it"),
            Cause::Failure => f.write_str("an error of its own"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// A segment follows, with this CRC-32 if it has one.
    Data(Stamp, Option<u32>),
    /// The rank leaves in order; nothing follows.
    Goodbye,
    /// The rank gave up; nothing follows.
    Abort(Cause),
}

impl Frame {
    pub(super) fn encode(self, epoch: u64) -> [u8; HEADER] {
        let nothing = Stamp { code: 0, round: 0, sequence: 0, digest: 0, length: 0 };
        let (kind, stamp, sum) = match self {
            Frame::Data(stamp, None) => (1, stamp, 0),
            Frame::Goodbye => (2, nothing, 0),
            Frame::Abort(cause) => {
                let (code, rank) = cause.encode();
                (3, Stamp { code, sequence: rank, ..nothing }, 0)
            }
            Frame::Data(stamp, Some(sum)) => (4, stamp, sum),
        };
        let Stamp { code, round, sequence, digest, length } = stamp;
        let mut bytes = [0; HEADER];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = kind;
        bytes[5] = code;
        bytes[6..8].copy_from_slice(&round.to_le_bytes());
        bytes[8..16].copy_from_slice(&epoch.to_le_bytes());
        bytes[16..24].copy_from_slice(&sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&digest.to_le_bytes());
        bytes[32..40].copy_from_slice(&length.to_le_bytes());
        bytes[40..SUMMED].copy_from_slice(&sum.to_le_bytes());
        let own = crc32fast::hash(&bytes[..SUMMED]);
        bytes[SUMMED..].copy_from_slice(&own.to_le_bytes());
        bytes
    }

    /// Fails with a text on bytes that no rank of this epoch would send (invariant ONE-EPOCH).
    pub(super) fn decode(bytes: &[u8; HEADER], epoch: u64) -> Result<Frame, String> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        if bytes[0..4] != MAGIC.to_le_bytes() {
            return Err("it sent something that is not a frame".into());
        }
        if bytes[SUMMED..] != crc32fast::hash(&bytes[..SUMMED]).to_le_bytes() {
            return Err("it sent a frame that was damaged on its way".into());
        }
        if word(8) != epoch {
            return Err(format!("it sent a frame of epoch {}", word(8)));
        }
        let stamp = Stamp {
            code: bytes[5],
            round: u16::from_le_bytes([bytes[6], bytes[7]]),
            sequence: word(16),
            digest: word(24),
            length: word(32),
        };
        match bytes[4] {
            1 => Ok(Frame::Data(stamp, None)),
            2 => Ok(Frame::Goodbye),
            3 => Ok(Frame::Abort(Cause::decode(stamp.code, stamp.sequence))),
            4 => Ok(Frame::Data(stamp, Some(word(40) as u32))),
            kind => Err(format!("it sent a frame of unknown kind {kind}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire() {
        let stamp = Stamp { code: 3, round: 1, sequence: 77, digest: u64::MAX - 5, length: 1 << 40 };
        let causes = [
            Cause::EpochClosed,
            Cause::Sibling,
            Cause::Leaving,
            Cause::LostPeer(3),
            Cause::Deadline(70_000),
            Cause::Mismatch(0),
            Cause::Failure,
        ];
        let frames = [Frame::Data(stamp, None), Frame::Data(stamp, Some(0)), Frame::Goodbye];
        let frames = frames.into_iter().chain(causes.map(Frame::Abort));
        for frame in frames {
            let bytes = frame.encode(9);
            assert_eq!(Frame::decode(&bytes, 9), Ok(frame));
            assert!(Frame::decode(&bytes, 8).is_err());
            for bit in 0..HEADER * 8 {
                let mut garbled = bytes;
                garbled[bit / 8] ^= 1 << (bit % 8);
                assert!(Frame::decode(&garbled, 9).is_err(), "{frame:?} with another bit {bit}");
            }
        }
    }
}
