//! AdamW and its schedule against figures worked out outside this crate.

use crate::support::{State, everything, model};
use reknit_layout::job::{ModelSpec, OptimizerSpec};
use reknit_layout::{Axis, Step, Units};
use reknit_model::{Shard, learning_rate};

const CONSTANT: OptimizerSpec = OptimizerSpec {
    lr: 0.01,
    warmup_steps: 0,
    decay_steps: 0,
    min_lr: 0.0,
    betas: [0.9, 0.999],
    eps: 1e-8,
    weight_decay: 0.1,
    grad_clip: 0.0,
};

/// A model whose every weight is 0.5 and every moment 0.
fn level(model: &ModelSpec) -> Shard<f64> {
    let mut received = State::default();
    let state = |count: usize| -> Vec<u8> {
        let values: Vec<f64> = (0..3 * count).map(|i| if i < count { 0.5 } else { 0.0 }).collect();
        bytemuck::cast_slice(&values).to_vec()
    };
    let owned = everything(model);
    for (&axis, units) in &owned {
        let unit = state(Shard::<f64>::unit_len(model, axis.family));
        received.add_units(axis, units.clone(), unit.repeat(units.len() as usize));
    }
    received.set_replicated(state(model.replicated_params() as usize));
    received.build(model, &owned)
}

fn set_all(shard: &mut Shard<f64>, model: &ModelSpec, gradient: f64) {
    for axis in model.axes() {
        let count = shard.take_gradients(axis).len();
        shard.put_gradients(axis, vec![gradient; count]).expect("length");
    }
    let count = shard.take_replicated_gradients().len();
    shard.put_replicated_gradients(vec![gradient; count]).expect("length");
}

/// Weight, first and second moment of the last element of a unit, and of the last norm.
fn values(shard: &Shard<f64>, axis: Axis) -> [[f64; 3]; 2] {
    let (mut unit, mut replicated) = (Vec::new(), Vec::new());
    shard.export_units(axis, &Units::range(1, 2), &mut unit).expect("owned");
    shard.export_replicated(&mut replicated);
    [unit, replicated].map(|bytes| {
        let values: &[f64] = bytemuck::cast_slice(&bytes);
        let last = values.len() / 3 - 1;
        [0, 1, 2].map(|part| values[part * values.len() / 3 + last])
    })
}

fn assert_near(got: [f64; 3], expected: [f64; 3]) {
    for (got, expected) in got.into_iter().zip(expected) {
        assert!((got - expected).abs() < 1e-15, "{got} instead of {expected}");
    }
}

#[test]
fn two_steps_by_hand() {
    let model = model();
    let mut shard = level(&model);
    for axis in [Axis::attn(1), Axis::ffn(0), Axis::vocab()] {
        assert_near(values(&shard, axis)[0], [0.5, 0.0, 0.0]);
    }
    set_all(&mut shard, &model, 0.1);
    shard.apply(Step(1), &CONSTANT, 1e9);
    for axis in [Axis::attn(1), Axis::ffn(0), Axis::vocab()] {
        let [matrix, norm] = values(&shard, axis);
        assert_near(matrix, [0.489_500_000_999_999_9, 0.01, 1e-5]);
        assert_near(norm, [0.490_000_000_999_999_9, 0.01, 1e-5]);
    }
    set_all(&mut shard, &model, -0.2);
    shard.apply(Step(2), &CONSTANT, 1e9);
    for axis in [Axis::attn(1), Axis::ffn(0), Axis::vocab()] {
        let [matrix, norm] = values(&shard, axis);
        assert_near(matrix, [0.492_671_536_037_848_86, -0.011, 4.999e-5]);
        assert_near(norm, [0.493_661_036_038_848_87, -0.011, 4.999e-5]);
    }
}

#[test]
fn clipping_scales_by_the_norm_of_the_whole_model() {
    let model = model();
    let clipped = OptimizerSpec { grad_clip: 2.0, ..CONSTANT };
    let first_moment = |optimizer: &OptimizerSpec, norm_squared: f64| {
        let mut shard = level(&model);
        set_all(&mut shard, &model, 0.1);
        shard.apply(Step(1), optimizer, norm_squared);
        values(&shard, Axis::attn(0)).map(|values| values[1])
    };
    for (got, expected) in [
        (first_moment(&clipped, 64.0), 0.01 * 2.0 / 8.0),
        (first_moment(&clipped, 3.9), 0.01),
        (first_moment(&CONSTANT, 64.0), 0.01),
    ] {
        assert!(got.iter().all(|got| (got - expected).abs() < 1e-15), "{got:?} {expected}");
    }
}

#[test]
fn the_schedule_warms_up_and_decays() {
    let schedule = OptimizerSpec { lr: 1.0, warmup_steps: 10, decay_steps: 110, min_lr: 0.1, ..CONSTANT };
    for (step, rate) in [
        (1, 0.1),
        (5, 0.5),
        (10, 1.0),
        (35, 0.55 + 0.45 * 0.5_f64.sqrt()),
        (60, 0.55),
        (110, 0.1),
        (1000, 0.1),
    ] {
        let got = learning_rate(&schedule, Step(step));
        assert!((got - rate).abs() < 1e-12, "step {step}: {got} instead of {rate}");
    }
    for step in 1..200 {
        let rates = [step, step + 1].map(|step| learning_rate(&schedule, Step(step)));
        assert_eq!(rates[0] < rates[1], step < 10, "step {step}");
    }
    assert_eq!(learning_rate(&CONSTANT, Step(1)), 0.01);
    assert_eq!(learning_rate(&CONSTANT, Step(1_000_000)), 0.01);
    // Decay over before the warm-up is: no division by nothing.
    let odd = OptimizerSpec { decay_steps: 5, ..schedule };
    assert_eq!(learning_rate(&odd, Step(10)), 1.0);
    assert_eq!(learning_rate(&odd, Step(11)), 0.1);
}
