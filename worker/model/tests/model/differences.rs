//! The gradient of every tensor against finite differences of the loss, on one rank in f64.

use crate::support::{State, batch, gradients, lively, model, noise};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use reknit_model::{Alone, Batch, Shard};

/// Elements tried in each unit, and in the replicated parameters.
const TRIED: usize = 12;
const SCALE: f64 = 0.37;

/// d loss / d element, by a central difference of fourth order.
fn difference(loss_at: impl Fn(f64) -> f64) -> f64 {
    let step = 1e-3;
    let odd = |distance: f64| loss_at(distance) - loss_at(-distance);
    (8.0 * odd(step) - odd(2.0 * step)) / (12.0 * step)
}

fn check(what: &str, analytic: f64, numeric: f64) {
    let allowed = 1e-6 * numeric.abs() + 1e-8;
    assert!(
        (analytic - numeric).abs() < allowed,
        "{what}: backward says {analytic}, differences say {numeric}"
    );
}

/// The loss after `change` was applied to the bytes of one axis, or of the replicated parameters.
fn loss_with(
    model: &ModelSpec,
    shard: &Shard<f64>,
    batch: &Batch,
    axis: Option<Axis>,
    change: impl Fn(&mut [f64]),
) -> f64 {
    let mut received = State::default();
    for (&each, units) in shard.owned() {
        let mut bytes = Vec::new();
        shard.export_units(each, units, &mut bytes).expect("owned");
        if axis == Some(each) {
            change(bytemuck::cast_slice_mut(&mut bytes));
        }
        received.add_units(each, units.clone(), bytes);
    }
    let mut bytes = Vec::new();
    shard.export_replicated(&mut bytes);
    if axis.is_none() {
        change(bytemuck::cast_slice_mut(&mut bytes));
    }
    received.set_replicated(bytes);
    let mut changed: Shard<f64> = received.build(model, shard.owned());
    SCALE * changed.loss_only(batch, &mut Alone).expect("alone")
}

fn gradients_match_differences(model: &ModelSpec) {
    let mut shard = lively::<f64>(model);
    let batch = batch(model, 2, 3);
    shard.forward_backward(&batch, SCALE, &mut Alone).expect("valid");
    let mut random = noise(17);
    let (mut tried, mut mattered) = (0, 0);
    for axis in model.axes() {
        let unit_len = Shard::<f64>::unit_len(model, axis.family);
        for unit in 0..model.units(axis.family) {
            let gradients = gradients(model, &shard, axis, &Units::range(unit, unit + 1));
            assert_eq!(gradients.len(), unit_len);
            // The first and the last element, and some between them: input and output rows alike.
            let some = random.by_ref().take(TRIED).map(|x| x as usize % unit_len);
            for element in some.chain([0, unit_len - 1]) {
                let place = unit as usize * 3 * unit_len + element;
                let numeric =
                    difference(|d| loss_with(model, &shard, &batch, Some(axis), |values| values[place] += d));
                check(&format!("{axis} unit {unit} element {element}"), gradients[element], numeric);
                tried += 1;
                mattered += usize::from(numeric.abs() > 1e-4);
            }
        }
    }
    for element in random.take(2 * TRIED) {
        let element = element as usize % shard.replicated_gradients().len();
        let numeric = difference(|d| loss_with(model, &shard, &batch, None, |values| values[element] += d));
        check(&format!("norm {element}"), shard.replicated_gradients()[element], numeric);
    }
    assert!(mattered * 4 > tried * 3, "only {mattered} of {tried} gradients are far from zero");
}

fn small() -> ModelSpec {
    ModelSpec { heads: 4, kv_heads: 2, ffn: 9, vocab: 10, hidden: 12, seq_len: 5, ..model() }
}

#[test]
fn two_layers_grouped_queries() {
    gradients_match_differences(&small());
}

#[test]
fn one_layer_tied_every_head_its_own_key() {
    gradients_match_differences(&ModelSpec { layers: 1, kv_heads: 4, tie_embeddings: true, ..small() });
}

#[test]
fn with_dropout_and_recomputation() {
    gradients_match_differences(&ModelSpec { dropout: 0.3, recompute: true, ..small() });
    gradients_match_differences(&ModelSpec { dropout: 0.3, tie_embeddings: true, layers: 1, ..small() });
}

#[test]
fn one_key_for_all_heads_and_several_causal_blocks() {
    gradients_match_differences(&ModelSpec {
        layers: 1,
        kv_heads: 1,
        seq_len: 130,
        ffn: 3,
        vocab: 4,
        ..small()
    });
}

#[test]
fn gradients_accumulate_and_loss_does_not_depend_on_the_micro_batches() {
    let model = small();
    let mut at_once = lively::<f64>(&model);
    let mut one_by_one = State::of(&[lively::<f64>(&model)]).build(&model, at_once.owned());
    let all = batch(&model, 3, 3);
    let expected = at_once.forward_backward(&all, SCALE, &mut Alone).unwrap();
    let mut sum = 0.0;
    for text in all.tokens.chunks(all.seq_len + 1) {
        let one = Batch { tokens: text.to_vec(), samples: 1, seq_len: all.seq_len, ..Batch::default() };
        sum += one_by_one.forward_backward(&one, SCALE, &mut Alone).unwrap();
    }
    assert!((sum - expected).abs() < 1e-12 * expected);
    let norms = [&at_once, &one_by_one].map(|shard| shard.gradient_norm_squared(true));
    assert!(norms[0] > 0.0 && (norms[0] / norms[1] - 1.0).abs() < 1e-10);
    one_by_one.zero_gradients();
    assert_eq!(one_by_one.gradient_norm_squared(true), 0.0);
}
