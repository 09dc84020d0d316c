//! How two ranks prove to each other that they belong to the same group of the same epoch.
//!
//! The connecting rank says who it is and whom it wants (hello, with a nonce). The other answers with a nonce of its
//! own and a proof; the first checks it and answers with its proof. A proof is an HMAC-SHA256 keyed by the epoch's
//! ticket over everything said so far and the side it comes from, so it can be neither guessed, replayed nor reflected.

use crate::Ticket;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Changes with every incompatible change of handshake, frames or algorithms.
const VERSION: u8 = 3;
const MAGIC: [u8; 7] = *b"reknit\0";
pub(super) const NONCE: usize = 32;
pub(super) const PROOF: usize = 32;
/// Magic, version and the length of the rest.
pub(super) const PREFIX: usize = 10;
const MAX_NAME: usize = 512;
const MAX_BODY: usize = 4 + 4 + 8 + NONCE + 2 * (2 + MAX_NAME);

pub(super) type Nonce = [u8; NONCE];

/// Which group a connection is for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) job: String,
    pub(super) epoch: u64,
    pub(super) group: String,
}

impl Key {
    pub(super) fn fits(&self) -> bool {
        self.job.len() <= MAX_NAME && self.group.len() <= MAX_NAME
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) key: Key,
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) nonce: Nonce,
}

/// Why a hello is turned away, before any proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The epoch is over for the peer.
    EpochClosed,
    /// The ranks do not fit the peer's group.
    WrongRank,
    /// Nobody joined this group there for a long time, or too many wait. Worth another try.
    NotYet,
}

impl Refusal {
    pub(super) fn encode(self) -> [u8; 2] {
        let code = match self {
            Refusal::EpochClosed => 1,
            Refusal::WrongRank => 2,
            Refusal::NotYet => 3,
        };
        [REFUSED, code]
    }

    pub(super) fn decode(code: u8) -> Refusal {
        match code {
            1 => Refusal::EpochClosed,
            2 => Refusal::WrongRank,
            _ => Refusal::NotYet,
        }
    }
}

/// First byte of an answer to a hello.
pub(super) const ACCEPTED: u8 = b'A';
pub(super) const REFUSED: u8 = b'R';
/// Marker, nonce and proof.
pub(super) const ANSWER: usize = 1 + NONCE + PROOF;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Connecting,
    Accepting,
}

impl Hello {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(MAX_BODY);
        body.extend(self.from.to_le_bytes());
        body.extend(self.to.to_le_bytes());
        body.extend(self.key.epoch.to_le_bytes());
        body.extend(self.nonce);
        for name in [&self.key.job, &self.key.group] {
            body.extend((name.len() as u16).to_le_bytes());
            body.extend(name.as_bytes());
        }
        let mut bytes = MAGIC.to_vec();
        bytes.push(VERSION);
        bytes.extend((body.len() as u16).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// Bytes after the prefix. `None` for a stranger.
    pub(super) fn body_len(prefix: &[u8; PREFIX]) -> Option<usize> {
        let len = usize::from(u16::from_le_bytes([prefix[8], prefix[9]]));
        (prefix[..7] == MAGIC && prefix[7] == VERSION && len <= MAX_BODY).then_some(len)
    }

    pub(super) fn decode(body: &[u8]) -> Option<Hello> {
        let (from, rest) = body.split_first_chunk()?;
        let (to, rest) = rest.split_first_chunk()?;
        let (epoch, rest) = rest.split_first_chunk()?;
        let (nonce, rest) = rest.split_first_chunk()?;
        let (job, rest) = name(rest)?;
        let (group, rest) = name(rest)?;
        rest.is_empty().then(|| Hello {
            key: Key { job, epoch: u64::from_le_bytes(*epoch), group },
            from: u32::from_le_bytes(*from),
            to: u32::from_le_bytes(*to),
            nonce: *nonce,
        })
    }

    fn mac(&self, answer: &Nonce, side: Side, ticket: &Ticket) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new(&key_block(ticket));
        mac.update(match side {
            Side::Connecting => b"reknit connecting",
            Side::Accepting => b"reknit accepting ",
        });
        mac.update(&self.encode());
        mac.update(answer);
        mac
    }

    /// The proof of one side, once the accepting side's nonce is known.
    pub(super) fn proof(&self, answer: &Nonce, side: Side, ticket: &Ticket) -> [u8; PROOF] {
        self.mac(answer, side, ticket).finalize().into_bytes().into()
    }

    /// In constant time.
    pub(super) fn verify(&self, answer: &Nonce, side: Side, ticket: &Ticket, proof: &[u8]) -> bool {
        self.mac(answer, side, ticket).verify_slice(proof).is_ok()
    }
}

/// HMAC pads a key shorter than the hash's block of 64 bytes with zeros; this does it beforehand, which cannot fail.
fn key_block(ticket: &Ticket) -> hmac::digest::Key<Hmac<Sha256>> {
    let mut block = [0; 64];
    block[..ticket.0.len()].copy_from_slice(&ticket.0);
    block.into()
}

fn name(bytes: &[u8]) -> Option<(String, &[u8])> {
    let (len, rest) = bytes.split_first_chunk()?;
    let (name, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*len)))?;
    Some((String::from_utf8(name.to_vec()).ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            key: Key { job: "job".into(), epoch: 7, group: "dp.0".into() },
            from: 2,
            to: 1,
            nonce: [9; NONCE],
        }
    }

    fn decode(bytes: &[u8]) -> Option<Hello> {
        let (prefix, body) = bytes.split_first_chunk()?;
        (Hello::body_len(prefix)? == body.len()).then(|| Hello::decode(body))?
    }

    #[test]
    fn a_hello_survives_the_wire_and_nothing_shorter_does() {
        let bytes = hello().encode();
        assert_eq!(decode(&bytes), Some(hello()));
        for len in 0..bytes.len() {
            assert_eq!(decode(&bytes[..len]), None);
        }
    }

    #[test]
    fn a_proof_holds_only_for_what_was_said() {
        let (ticket, answer) = (Ticket([1; 32]), [3; NONCE]);
        let proof = hello().proof(&answer, Side::Connecting, &ticket);
        let verify =
            |hello: &Hello, answer: &Nonce, side, ticket: &Ticket| hello.verify(answer, side, ticket, &proof);
        assert!(verify(&hello(), &answer, Side::Connecting, &ticket));
        assert!(!verify(&hello(), &answer, Side::Accepting, &ticket));
        assert!(!verify(&hello(), &[4; NONCE], Side::Connecting, &ticket));
        assert!(!verify(&hello(), &answer, Side::Connecting, &Ticket([2; 32])));
        let changes: [fn(&mut Hello); 6] = [
            |hello| hello.key.job.push('x'),
            |hello| hello.key.epoch += 1,
            |hello| hello.key.group.push('x'),
            |hello| hello.from += 1,
            |hello| hello.to += 1,
            |hello| hello.nonce[0] ^= 1,
        ];
        for change in changes {
            let mut other = hello();
            change(&mut other);
            assert!(!verify(&other, &answer, Side::Connecting, &ticket));
        }
    }
}
