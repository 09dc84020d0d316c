//! The memories of a running operation, and the local work on them.

use super::program::{Space, Span, Step, Transfer};
use crate::buffer::Kind;
use crate::{Buffer, Element, Lent, Reduce};

/// Elements reduced at a time: small enough for the fastest cache.
const BLOCK: usize = 1024;

#[derive(Debug)]
pub(super) struct Memory {
    pub(super) data: Buffer,
    /// In words, so that it is aligned for every element.
    pub(super) scratch: Vec<u64>,
}

/// What the thread that moves a group's data has lent for it, if it is the one that runs the operation.
pub(super) type Lending<'a, 'b> = Option<&'a mut (dyn Lent + 'b)>;

impl Memory {
    pub(super) fn bytes(&self, span: Span) -> &[u8] {
        let space = match span.space {
            Space::Data => self.data.as_bytes(),
            Space::Scratch => bytemuck::cast_slice(&self.scratch),
            Space::Lent => return &[],
        };
        &space[span.start..span.start + span.len]
    }

    pub(super) fn bytes_mut(&mut self, span: Span) -> &mut [u8] {
        let space = match span.space {
            Space::Data => self.data.as_bytes_mut(),
            Space::Scratch => bytemuck::cast_slice_mut(&mut self.scratch),
            Space::Lent => return &mut [],
        };
        &mut space[span.start..span.start + span.len]
    }

    /// What goes out from byte `at` of the transfer on, up to its byte `end`, as far as it lies side by side.
    pub(super) fn outgoing<'a>(
        &'a self,
        lent: Lending<'a, '_>,
        transfer: &Transfer,
        at: usize,
        end: usize,
    ) -> &'a [u8] {
        let bytes = match (transfer.span.space, lent) {
            (Space::Lent, Some(lent)) if at < end => lent.send(transfer.peer, at),
            (Space::Lent, Some(_) | None) => &[],
            (Space::Data | Space::Scratch, _) => &self.bytes(transfer.span)[at..],
        };
        &bytes[..bytes.len().min(end - at)]
    }

    /// Where what comes from byte `at` of the transfer on goes, as far as that lies side by side.
    pub(super) fn incoming<'a>(
        &'a mut self,
        lent: Lending<'a, '_>,
        transfer: &Transfer,
        at: usize,
    ) -> &'a mut [u8] {
        let len = transfer.span.len;
        let bytes = match (transfer.span.space, lent) {
            (Space::Lent, Some(lent)) if at < len => lent.receive(transfer.peer, at),
            (Space::Lent, Some(_) | None) => &mut [],
            (Space::Data | Space::Scratch, _) => &mut self.bytes_mut(transfer.span)[at..],
        };
        let end = bytes.len().min(len - at);
        &mut bytes[..end]
    }

    /// A copy of what the transfer sends from byte `at` to byte `end`, for when what is lent is gone; zeros where there is
    /// nothing any more.
    pub(super) fn keep(
        &mut self,
        mut lent: Lending<'_, '_>,
        transfer: &Transfer,
        at: usize,
        end: usize,
    ) -> Span {
        let mut kept = std::mem::replace(&mut self.data, Buffer::empty()).into_bytes();
        let (start, len) = (kept.len(), end - at);
        while kept.len() < start + len {
            let more = self.outgoing(lent.as_deref_mut(), transfer, at + kept.len() - start, end);
            match more.is_empty() {
                true => kept.resize(start + len, 0),
                false => kept.extend_from_slice(more),
            }
        }
        self.data = Buffer::Bytes(kept);
        Span { space: Space::Data, start, len }
    }

    pub(super) fn run(&mut self, step: &Step, kind: Kind) {
        match step {
            Step::Copy { from, to } => {
                self.data.as_bytes_mut().copy_within(from.start..from.start + from.len, to.start);
            }
            Step::Reduce { reduce, inputs, into } => match kind {
                Kind::F32 => self.reduce::<f32>(*reduce, inputs, *into),
                Kind::F64 => self.reduce::<f64>(*reduce, inputs, *into),
                // `lower` lets no reduction of bytes through.
                Kind::Bytes => {}
            },
        }
    }

    fn reduce<T: Element>(&mut self, reduce: Reduce, inputs: &[Span], into: Span) {
        let Some((first, rest)) = inputs.split_first() else {
            return;
        };
        let step = BLOCK * size_of::<T>();
        let mut block = [T::zeroed(); BLOCK];
        for start in (0..into.len).step_by(step) {
            let len = step.min(into.len - start);
            let piece = |span: Span| Span { start: span.start + start, len, ..span };
            let block = &mut block[..len / size_of::<T>()];
            block.copy_from_slice(bytemuck::cast_slice(self.bytes(piece(*first))));
            for input in rest {
                let values: &[T] = bytemuck::cast_slice(self.bytes(piece(*input)));
                match reduce {
                    Reduce::Sum => add(block, values),
                    Reduce::Max => max(block, values),
                }
            }
            self.bytes_mut(piece(into)).copy_from_slice(bytemuck::cast_slice(block));
        }
    }
}

fn add<T: Element>(sums: &mut [T], values: &[T]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += *value;
    }
}

/// Not-a-number wins, so that an overflow on one rank is seen by all.
fn max<T: Element>(greatest: &mut [T], values: &[T]) {
    for (greatest, value) in greatest.iter_mut().zip(values) {
        if *value > *greatest || value.partial_cmp(value).is_none() {
            *greatest = *value;
        }
    }
}
