//! Small models, splits of them, and a tensor-parallel group of threads.

use reknit_layout::job::{Dtype, ModelKind, ModelSpec};
use reknit_layout::{Axis, Units};
use reknit_model::{ArrivalError, Batch, Real, Shard, TensorParallel};
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

pub(crate) type Owned = BTreeMap<Axis, Units>;

/// Two layers, 6 units of attention with 2 query heads each, 6 of FFN, 12 of vocabulary.
pub(crate) fn model() -> ModelSpec {
    ModelSpec {
        kind: ModelKind::Decoder,
        layers: 2,
        hidden: 16,
        heads: 12,
        kv_heads: 6,
        head_dim: Some(4),
        ffn: 18,
        ffn_block: 3,
        vocab: 24,
        vocab_block: 2,
        seq_len: 7,
        tie_embeddings: false,
        dtype: Dtype::F64,
        dropout: 0.0,
        recompute: false,
    }
}

pub(crate) fn everything(model: &ModelSpec) -> Owned {
    let axes = model.axes().into_iter();
    axes.map(|axis| (axis, Units::range(0, model.units(axis.family)))).collect()
}

/// As even as it gets; the ranks that carry an extra unit rotate over the axes.
pub(crate) fn split(model: &ModelSpec, ranks: u32) -> Vec<Owned> {
    let mut owned = vec![Owned::new(); ranks as usize];
    for (turn, axis) in model.axes().into_iter().enumerate() {
        let units = model.units(axis.family);
        let mut start = 0;
        for rank in 0..ranks {
            let place = (rank + turn as u32) % ranks;
            let count = units / ranks + u32::from(place < units % ranks);
            owned[rank as usize].insert(axis, Units::range(start, start + count));
            start += count;
        }
        assert_eq!(start, units);
    }
    owned
}

/// Round-robin, so that no rank's units are contiguous.
pub(crate) fn scattered(model: &ModelSpec, ranks: u32) -> Vec<Owned> {
    let of_rank = |rank| {
        let axes = model.axes().into_iter();
        axes.map(|axis| (axis, (rank..model.units(axis.family)).step_by(ranks as usize).collect())).collect()
    };
    (0..ranks).map(of_rank).collect()
}

/// Deterministic numbers that look random.
pub(crate) fn noise(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 20
    })
}

pub(crate) fn batch(model: &ModelSpec, samples: usize, seed: u64) -> Batch {
    let seq_len = model.seq_len as usize;
    let tokens = noise(seed).map(|x| (x % u64::from(model.vocab)) as u32);
    let tokens = tokens.take(samples * (seq_len + 1)).collect();
    Batch { tokens, samples, seq_len, seed, first_sample: 0 }
}

/// State as it travels, to make shards of.
#[derive(Default)]
pub(crate) struct State {
    blocks: Vec<(Option<Axis>, Units, Vec<u8>)>,
}

impl State {
    pub(crate) fn add_units(&mut self, axis: Axis, units: Units, bytes: Vec<u8>) {
        self.blocks.push((Some(axis), units, bytes));
    }

    pub(crate) fn set_replicated(&mut self, bytes: Vec<u8>) {
        self.blocks.push((None, Units::range(0, 1), bytes));
    }

    /// All that a set of shards holds.
    pub(crate) fn of<T: Real>(shards: &[Shard<T>]) -> Self {
        let mut state = Self::default();
        for shard in shards {
            for (&axis, units) in shard.owned() {
                let mut bytes = Vec::new();
                shard.export_units(axis, units, &mut bytes).expect("owned");
                state.add_units(axis, units.clone(), bytes);
            }
        }
        let mut bytes = Vec::new();
        shards[0].export_replicated(&mut bytes);
        state.set_replicated(bytes);
        state
    }

    /// A shard of these units, of what is here of them.
    pub(crate) fn try_build<T: Real>(
        &self,
        model: &ModelSpec,
        owned: &Owned,
    ) -> Result<Shard<T>, ArrivalError> {
        let mut shard = Shard::awaiting(model, owned)?;
        for (axis, units, bytes) in &self.blocks {
            let Some(axis) = *axis else {
                shard.receive(None, units, bytes)?;
                continue;
            };
            let unit_bytes = bytes.len() / units.len() as usize;
            for (unit, bytes) in units.iter().zip(bytes.chunks(unit_bytes)) {
                if owned.get(&axis).is_some_and(|owned| owned.contains(unit)) {
                    shard.receive(Some(axis), &Units::range(unit, unit + 1), bytes)?;
                }
            }
        }
        shard.check_arrived()?;
        shard.adopt();
        Ok(shard)
    }

    pub(crate) fn build<T: Real>(&self, model: &ModelSpec, owned: &Owned) -> Shard<T> {
        self.try_build(model, owned).expect("complete")
    }
}

/// The units' gradients, ascending; a unit's values in the order of the crate's table.
pub(crate) fn gradients<T: Real>(model: &ModelSpec, shard: &Shard<T>, axis: Axis, units: &Units) -> Vec<T> {
    let [input, output] = Shard::<T>::unit_parts(model, axis.family);
    let owned = &shard.owned()[&axis];
    let (inputs, outputs) = shard.gradients(axis).split_at(owned.len() as usize * input);
    let of_unit = |unit| {
        let position = owned.position(unit).expect("owned") as usize;
        [&inputs[position * input..][..input], &outputs[position * output..][..output]].concat()
    };
    units.iter().flat_map(of_unit).collect()
}

/// A whole model with weights large enough for every part to matter, and norms that are not 1.
pub(crate) fn lively<T: Real>(model: &ModelSpec) -> Shard<T> {
    let owned = everything(model);
    let fresh = Shard::<T>::init(model, 11, &owned);
    let mut state = State::default();
    for (&axis, units) in &owned {
        let mut bytes = Vec::new();
        fresh.export_units(axis, units, &mut bytes).expect("owned");
        for value in bytemuck::cast_slice_mut::<u8, T>(&mut bytes) {
            *value *= T::from_f64(15.0);
        }
        state.add_units(axis, units.clone(), bytes);
    }
    let mut bytes = Vec::new();
    fresh.export_replicated(&mut bytes);
    let gains = bytes.len() / 3 / size_of::<T>();
    let values = bytemuck::cast_slice_mut::<u8, T>(&mut bytes);
    for (value, bits) in values[..gains].iter_mut().zip(noise(5)) {
        *value = T::from_f64(0.7 + 0.6 * (bits % 1000) as f64 / 1000.0);
    }
    state.set_replicated(bytes);
    state.build(model, &owned)
}

/// One rank of a group of threads: everyone sends to everyone and reduces in rank order.
pub(crate) struct Rank<T> {
    number: usize,
    to: Vec<Sender<Vec<T>>>,
    from: Vec<Receiver<Vec<T>>>,
    pub(crate) exchanges: usize,
}

#[derive(Debug, thiserror::Error)]
#[error("rank {0} left the group")]
pub(crate) struct Left(pub(crate) usize);

pub(crate) fn group<T>(ranks: usize) -> Vec<Rank<T>> {
    let mut group: Vec<Rank<T>> =
        (0..ranks).map(|number| Rank { number, to: Vec::new(), from: Vec::new(), exchanges: 0 }).collect();
    for to in 0..ranks {
        for sender in &mut group {
            let (send, _) = channel();
            sender.to.push(send);
        }
        for from in 0..ranks {
            let (send, receive) = channel();
            group[from].to[to] = send;
            group[to].from.push(receive);
        }
    }
    group
}

impl<T: Real> Rank<T> {
    fn reduce(&mut self, values: &mut Vec<T>, with: impl Fn(T, T) -> T) -> Result<(), Left> {
        self.exchanges += 1;
        for (peer, sender) in self.to.iter().enumerate() {
            sender.send(values.clone()).map_err(|_| Left(peer))?;
        }
        let mut sum: Option<Vec<T>> = None;
        for (peer, receiver) in self.from.iter().enumerate() {
            let got = receiver.recv().map_err(|_| Left(peer))?;
            assert_eq!(got.len(), values.len(), "ranks {} and {peer} differ", self.number);
            sum = Some(match sum {
                None => got,
                Some(sum) => sum.into_iter().zip(got).map(|(a, b)| with(a, b)).collect(),
            });
        }
        *values = sum.expect("a rank is its own peer");
        Ok(())
    }
}

impl<T: Real> TensorParallel<T> for Rank<T> {
    type Error = Left;

    fn all_reduce_sum(&mut self, values: &mut Vec<T>) -> Result<(), Left> {
        self.reduce(values, T::add)
    }

    fn all_reduce_max(&mut self, values: &mut Vec<T>) -> Result<(), Left> {
        self.reduce(values, T::max)
    }
}

/// Runs `body` on a thread for each shard, as one group, and returns what they return.
pub(crate) fn together<T: Real, R: Send>(
    shards: &mut [Shard<T>],
    body: impl Fn(&mut Shard<T>, &mut Rank<T>) -> R + Sync,
) -> Vec<R> {
    let ranks = group(shards.len());
    thread::scope(|scope| {
        let threads: Vec<_> = shards
            .iter_mut()
            .zip(ranks)
            .map(|(shard, mut rank)| {
                let body = &body;
                scope.spawn(move || body(shard, &mut rank))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}
