//! The memory of a round of the reshard: the shard's own.

use super::{LABEL, Piece, ReshardError};
use crc32fast::Hasher;
use reknit_layout::Epoch;
use reknit_model::{Real, Shard};
use reknit_plane::Lent;

/// Lends the pieces of a round where they lie, and sums each before it goes and after it has come.
pub(super) struct Round<'a, T> {
    epoch: Epoch,
    shard: &'a mut Shard<T>,
    /// By rank.
    to: Vec<Stream<'a>>,
    from: Vec<Stream<'a>>,
    /// What stopped it.
    error: Option<ReshardError>,
}

/// What goes to one peer, or comes from it: pieces, and behind them their labels.
struct Stream<'a> {
    pieces: &'a [Piece<'a>],
    payload: usize,
    /// As they are written here for the pieces so far.
    labels: Vec<u8>,
    /// As they have come.
    told: Vec<u8>,
    /// The piece in work, and where in the stream it begins.
    current: usize,
    start: usize,
}

impl<'a> Stream<'a> {
    fn new(pieces: &'a [Piece<'a>]) -> Self {
        Self {
            pieces,
            payload: pieces.iter().map(|piece| piece.len).sum(),
            labels: Vec::new(),
            told: vec![0; pieces.len() * LABEL],
            current: 0,
            start: 0,
        }
    }

    fn len(&self) -> usize {
        self.payload + self.pieces.len() * LABEL
    }

    /// The piece in which byte `at` lies, and where in it; `None` among the labels. Never goes back.
    fn piece_at(&mut self, at: usize) -> Option<(Piece<'a>, usize)> {
        while let Some(piece) = self.pieces.get(self.current) {
            if at < self.start + piece.len {
                return Some((*piece, at - self.start));
            }
            self.start += piece.len;
            self.current += 1;
        }
        None
    }
}

impl<'a, T: Real> Round<'a, T> {
    /// Of what goes to each rank and what comes from it.
    pub(super) fn new(
        epoch: Epoch,
        shard: &'a mut Shard<T>,
        outgoing: impl Iterator<Item = &'a [Piece<'a>]>,
        incoming: impl Iterator<Item = &'a [Piece<'a>]>,
    ) -> Self {
        let (to, from) = (outgoing.map(Stream::new).collect(), incoming.map(Stream::new).collect());
        Self { epoch, shard, to, from, error: None }
    }

    /// What it could not lend: the cause of the exchange's own error.
    pub(super) fn refused(&mut self) -> Result<(), ReshardError> {
        self.error.take().map_or(Ok(()), Err)
    }

    /// After the exchange: sees that all pieces came as they were sent. Returns their bytes.
    pub(super) fn check(self) -> Result<u64, ReshardError> {
        let mut came = 0;
        for Stream { pieces, labels, told, .. } in self.from {
            let labels = labels.chunks_exact(LABEL).zip(told.chunks_exact(LABEL));
            for (piece, (own, told)) in pieces.iter().zip(labels) {
                if own[..LABEL - 4] != told[..LABEL - 4] {
                    return Err(piece.damaged("it is labelled as another one"));
                }
                if own != told {
                    return Err(piece.damaged("its checksum is wrong"));
                }
                if piece.is_last {
                    self.shard.arrived(piece.transfer.axis, &piece.transfer.units);
                }
                came += piece.len as u64;
            }
        }
        Ok(came)
    }
}

/// What goes out from byte `at` of the stream on.
fn outgoing<'s, T: Real>(
    epoch: Epoch,
    shard: &'s Shard<T>,
    stream: &'s mut Stream<'_>,
    at: usize,
) -> Result<&'s [u8], ReshardError> {
    let Some((piece, within)) = stream.piece_at(at) else {
        return Ok(&stream.labels[at - stream.payload..]);
    };
    let part = |within: usize| {
        let part = shard.part(piece.transfer.axis, &piece.transfer.units, piece.at + within);
        part.map(|part| piece.cut(part, within)).map_err(|source| piece.not_held(source))
    };
    if stream.labels.len() == stream.current * LABEL {
        let mut sum = Hasher::new();
        let mut summed = 0;
        while summed < piece.len {
            let part = part(summed)?;
            sum.update(part);
            summed += part.len();
        }
        stream.labels.extend(piece.label(epoch, sum.finalize()));
    }
    part(within)
}

/// Where what comes goes from byte `at` of the stream on.
fn incoming<'s, T: Real>(
    epoch: Epoch,
    shard: &'s mut Shard<T>,
    stream: &'s mut Stream<'_>,
    at: usize,
) -> Result<&'s mut [u8], ReshardError> {
    let before = stream.current;
    let found = stream.piece_at(at);
    for piece in &stream.pieces[before..stream.current] {
        let mut sum = Hasher::new();
        let mut summed = 0;
        while summed < piece.len {
            let room = shard.room(piece.transfer.axis, &piece.transfer.units, piece.at + summed)?;
            let part = piece.cut(room, summed);
            sum.update(part);
            summed += part.len();
        }
        stream.labels.extend(piece.label(epoch, sum.finalize()));
    }
    let Some((piece, within)) = found else {
        return Ok(&mut stream.told[at - stream.payload..]);
    };
    let room = shard.room(piece.transfer.axis, &piece.transfer.units, piece.at + within)?;
    let len = piece.cut(room, within).len();
    Ok(&mut room[..len])
}

impl<T: Real> Lent for Round<'_, T> {
    fn outgoing(&self, to: usize) -> usize {
        self.to[to].len()
    }

    fn incoming(&self, from: usize) -> usize {
        self.from[from].len()
    }

    fn send(&mut self, to: usize, at: usize) -> &[u8] {
        outgoing(self.epoch, self.shard, &mut self.to[to], at).unwrap_or_else(|error| {
            self.error = Some(error);
            &[]
        })
    }

    fn receive(&mut self, from: usize, at: usize) -> &mut [u8] {
        incoming(self.epoch, self.shard, &mut self.from[from], at).unwrap_or_else(|error| {
            self.error = Some(error);
            &mut []
        })
    }
}
