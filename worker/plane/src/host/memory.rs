//! The memories of a running operation, and the local work on them.

use super::program::{Space, Span, Step};
use crate::buffer::Kind;
use crate::{Buffer, Element, Reduce};

/// Elements reduced at a time: small enough for the fastest cache.
const BLOCK: usize = 1024;

#[derive(Debug)]
pub(super) struct Memory {
    pub(super) data: Buffer,
    /// In words, so that it is aligned for every element.
    pub(super) scratch: Vec<u64>,
}

impl Memory {
    pub(super) fn bytes(&self, span: Span) -> &[u8] {
        let space = match span.space {
            Space::Data => self.data.as_bytes(),
            Space::Scratch => bytemuck::cast_slice(&self.scratch),
        };
        &space[span.start..span.start + span.len]
    }

    pub(super) fn bytes_mut(&mut self, span: Span) -> &mut [u8] {
        let space = match span.space {
            Space::Data => self.data.as_bytes_mut(),
            Space::Scratch => bytemuck::cast_slice_mut(&mut self.scratch),
        };
        &mut space[span.start..span.start + span.len]
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
