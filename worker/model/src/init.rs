//! First weights: a function of the seed and of each value's name, never of the layout.

use crate::Real;
use crate::random::Name;
use crate::shard::{AxisShard, Shard, Tensor};
use reknit_layout::job::ModelSpec;
use reknit_layout::{Axis, Units};
use std::collections::BTreeMap;

const DEVIATION: f64 = 0.02;

/// Which matrix: part of the name of each random value, so the numbers must not change.
#[derive(Debug, Clone, Copy)]
enum Matrix {
    AttnInput = 0,
    AttnOutput = 1,
    FfnInput = 2,
    FfnOutput = 3,
    Embedding = 4,
    Head = 5,
}

impl<T: Real> Shard<T> {
    /// The owned part of a new model: normal with deviation 0.02, the projections back to the residual stream scaled by
    /// `1 / sqrt(2 * layers)` as in GPT-2, norms 1, moments 0. Axes and units that the model does not have are left out.
    pub fn init(model: &ModelSpec, seed: u64, owned: &BTreeMap<Axis, Units>) -> Self {
        let mut shard = Self::zeros(model, owned);
        let residual = DEVIATION / (2.0 * f64::from(model.layers)).sqrt();
        for layer in 0..shard.shape.layers {
            let AxisShard { units, input, output, .. } = &mut shard.attn[layer];
            let (name, layer_number) = (Name::new(seed), layer as u64);
            fill(input, units, name.with(Matrix::AttnInput as u64).with(layer_number), DEVIATION);
            fill(output, units, name.with(Matrix::AttnOutput as u64).with(layer_number), residual);
            let AxisShard { units, input, output, .. } = &mut shard.ffn[layer];
            fill(input, units, name.with(Matrix::FfnInput as u64).with(layer_number), DEVIATION);
            fill(output, units, name.with(Matrix::FfnOutput as u64).with(layer_number), residual);
        }
        let AxisShard { units, input, output, .. } = &mut shard.vocab;
        let name = Name::new(seed);
        fill(input, units, name.with(Matrix::Embedding as u64), DEVIATION);
        fill(output, units, name.with(Matrix::Head as u64), DEVIATION);
        shard.replicated.weights.fill(T::ONE);
        shard
    }
}

fn fill<T: Real>(tensor: &mut Tensor<T>, units: &Units, name: Name, deviation: f64) {
    for (position, unit) in units.iter().enumerate() {
        let name = name.with(u64::from(unit));
        let place = tensor.place(position);
        for (element, weight) in tensor.weights[place].iter_mut().enumerate() {
            *weight = T::from_f64(deviation * name.with(element as u64).normal());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_deviation_and_tails_are_those_of_a_normal() {
        let values: Vec<f64> = (0..200_000).map(|i| Name::new(7).with(i).normal()).collect();
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        let beyond_two = values.iter().filter(|x| x.abs() > 2.0).count() as f64 / count;
        assert!(mean.abs() < 0.01, "{mean}");
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
        assert!((beyond_two - 0.0455).abs() < 0.003, "{beyond_two}");
    }
}
