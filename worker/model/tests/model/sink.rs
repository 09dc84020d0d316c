//! Gradients leave while the backward pass still runs.

use crate::support::{State, batch, lively, model, scattered, together};
use reknit_layout::Axis;
use reknit_layout::job::ModelSpec;
use reknit_model::{Alone, Batch, Bucket, GradientSink, Shard, ShardError, StepError};
use std::convert::Infallible;

/// Moves every bucket out when it is final.
#[derive(Default)]
struct Collector {
    taken: Vec<(Bucket, Vec<f64>)>,
}

impl GradientSink<f64> for Collector {
    type Error = Infallible;

    fn ready(&mut self, shard: &mut Shard<f64>, bucket: Bucket) -> Result<(), Infallible> {
        let values = match bucket {
            Bucket::Axis(axis) => shard.take_gradients(axis),
            Bucket::Replicated => shard.take_replicated_gradients(),
        };
        self.taken.push((bucket, values));
        Ok(())
    }
}

impl Collector {
    fn give_back(self, shard: &mut Shard<f64>) {
        for (bucket, values) in self.taken {
            match bucket {
                Bucket::Axis(axis) => shard.put_gradients(axis, values).expect("as taken"),
                Bucket::Replicated => shard.put_replicated_gradients(values).expect("as taken"),
            }
        }
    }
}

fn copies(model: &ModelSpec, owned: &crate::support::Owned) -> [Shard<f64>; 2] {
    let received = State::of(&[lively::<f64>(model)]);
    [(); 2].map(|()| received.build(model, owned))
}

fn all_gradients(shard: &Shard<f64>) -> Vec<u64> {
    let axes = shard.owned().keys().flat_map(|axis| shard.gradients(*axis));
    axes.chain(shard.replicated_gradients()).map(|value| value.to_bits()).collect()
}

/// What is moved out when it is called final is what is there at the end of a pass without a sink.
#[test]
fn a_bucket_called_final_does_not_change_any_more() {
    for tie_embeddings in [false, true] {
        let model = ModelSpec { tie_embeddings, ..model() };
        let owned = scattered(&model, 3);
        let (mut plain, mut moved): (Vec<_>, Vec<_>) =
            owned.iter().map(|owned| copies(&model, owned)).map(|[a, b]: [Shard<f64>; 2]| (a, b)).unzip();
        let [first, second] = [1, 2].map(|seed| batch(&model, 2, seed));
        together(&mut plain, |shard, rank| {
            for batch in [&first, &second] {
                shard.forward_backward(batch, 0.5, rank).expect("whole group");
            }
        });
        let order = together(&mut moved, |shard, rank| {
            shard.forward_backward(&first, 0.5, rank).expect("whole group");
            let mut collector = Collector::default();
            shard.forward_backward_into(&second, 0.5, rank, &mut collector).expect("whole group");
            assert!(shard.take_gradients(Axis::ffn(0)).is_empty());
            let order: Vec<Bucket> = collector.taken.iter().map(|(bucket, _)| *bucket).collect();
            collector.give_back(shard);
            order
        });
        for (plain, moved) in plain.iter().zip(&moved) {
            assert!(all_gradients(plain) == all_gradients(moved));
            assert_eq!(
                plain.gradient_norm_squared(true).to_bits(),
                moved.gradient_norm_squared(true).to_bits()
            );
        }
        let expected = [
            Bucket::Axis(Axis::ffn(1)),
            Bucket::Axis(Axis::attn(1)),
            Bucket::Axis(Axis::ffn(0)),
            Bucket::Axis(Axis::attn(0)),
            Bucket::Replicated,
            Bucket::Axis(Axis::vocab()),
        ];
        assert!(order.iter().all(|order| order == &expected), "{order:?}");
        assert!(moved[0].buckets().eq(expected));
    }
}

#[test]
fn an_empty_batch_calls_every_bucket_final() {
    let model = model();
    let [mut shard, _] = copies(&model, &scattered(&model, 2)[0]);
    let mut collector = Collector::default();
    let empty = Batch { seq_len: 7, ..Batch::default() };
    shard.forward_backward_into(&empty, 1.0, &mut Alone, &mut collector).expect("nothing to do");
    let order: Vec<Bucket> = collector.taken.iter().map(|(bucket, _)| *bucket).collect();
    assert!(shard.buckets().eq(order));
}

#[test]
fn what_is_out_is_missed_until_it_is_put_back_or_zeroed() {
    let model = model();
    let [mut shard, _] = copies(&model, &scattered(&model, 2)[0]);
    shard.forward_backward(&batch(&model, 2, 1), 1.0, &mut Alone).expect("alone");
    let axis = Axis::attn(1);
    let units = shard.owned()[&axis].clone();
    let mut taken = shard.take_gradients(axis);
    assert_eq!(shard.gradients(axis), []);
    let expected = taken.len();
    taken.pop();
    let error = shard.put_gradients(axis, taken).unwrap_err();
    assert_eq!(error, ShardError::Length { axis, units: units.clone(), got: expected - 1, expected });
    let error = shard.put_replicated_gradients(Vec::new()).unwrap_err();
    assert!(matches!(error, ShardError::ReplicatedLength { got: 0, .. }));
    shard.zero_gradients();
    assert_eq!(shard.gradients(axis), vec![0.0; expected]);
}

#[derive(Debug, thiserror::Error)]
#[error("the sink is full")]
struct Full;

/// Fails at one bucket.
struct Failing(Bucket);

impl GradientSink<f64> for Failing {
    type Error = Full;

    fn ready(&mut self, shard: &mut Shard<f64>, bucket: Bucket) -> Result<(), Full> {
        if let Bucket::Axis(axis) = bucket {
            drop(shard.take_gradients(axis));
        }
        if bucket == self.0 { Err(Full) } else { Ok(()) }
    }
}

#[test]
fn a_sink_that_fails_ends_the_pass_and_the_shard_goes_on() {
    let model = model();
    let [mut plain, mut shard] = copies(&model, &scattered(&model, 1)[0]);
    let batch = batch(&model, 2, 1);
    plain.forward_backward(&batch, 1.0, &mut Alone).expect("alone");
    for bucket in plain.buckets() {
        let error = shard.forward_backward_into(&batch, 1.0, &mut Alone, &mut Failing(bucket)).unwrap_err();
        assert!(matches!(error, StepError::Sink(Full)));
        shard.zero_gradients();
        shard.forward_backward(&batch, 1.0, &mut Alone).expect("alone");
        assert!(all_gradients(&plain) == all_gradients(&shard), "after failing at {bucket:?}");
        shard.zero_gradients();
    }
}
