//! A worker's model state as numbers that can be checked: one value per unit, derived from every step applied to it.

use crate::random::mix;
use reknit_layout::{Axis, Units};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Units of each axis.
pub(crate) const UNITS: u32 = 12;
pub(crate) const BATCH: u64 = 8;

pub(crate) fn axes() -> [Axis; 3] {
    [Axis::attn(0), Axis::ffn(0), Axis::vocab()]
}

/// All units, and behind them the replicated parameters.
pub(crate) const VALUES: usize = 3 * UNITS as usize + 1;
pub(crate) const REPLICATED: usize = VALUES - 1;

pub(crate) type Values = [u64; VALUES];

/// The numbers of these units among the values.
pub(crate) fn places(units: &BTreeMap<Axis, Units>) -> impl Iterator<Item = usize> + '_ {
    axes().into_iter().enumerate().flat_map(move |(index, axis)| {
        units
            .get(&axis)
            .into_iter()
            .flat_map(move |units| units.iter().map(move |unit| index * UNITS as usize + unit as usize))
    })
}

/// What a worker truly holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Memory {
    pub(crate) step: u64,
    /// `None`: not held.
    pub(crate) values: [Option<u64>; VALUES],
}

impl Default for Memory {
    fn default() -> Self {
        Self { step: 0, values: [None; VALUES] }
    }
}

impl Memory {
    pub(crate) fn is_empty(&self) -> bool {
        self.values.iter().all(Option::is_none)
    }

    pub(crate) fn digest(&self) -> String {
        format!("{:?}", self.values[REPLICATED])
    }

    /// As the worker reports it.
    pub(crate) fn units(&self) -> Arc<BTreeMap<Axis, Units>> {
        let mut held = BTreeMap::new();
        for (index, axis) in axes().into_iter().enumerate() {
            let mut units = Units::new();
            for unit in 0..UNITS {
                if self.values[index * UNITS as usize + unit as usize].is_some() {
                    units.insert(unit);
                }
            }
            if !units.is_empty() {
                held.insert(axis, units);
            }
        }
        Arc::new(held)
    }

    pub(crate) fn apply(&mut self, step: u64, gradients: &Values) {
        self.step = step;
        for (value, gradient) in self.values.iter_mut().zip(gradients) {
            *value = value.map(|value| applied(value, *gradient, step));
        }
    }
}

fn applied(value: u64, gradient: u64, step: u64) -> u64 {
    mix(value ^ mix(gradient ^ step))
}

/// From the job's seed, before the first step.
pub(crate) fn initial(seed: u64, place: usize) -> u64 {
    mix(0x5eed ^ seed ^ ((place as u64) << 32))
}

/// Summed over these samples. Each sample's random stream is a function of seed, step, sample and unit only (RNG).
pub(crate) fn gradients(seed: u64, step: u64, samples: &[Range<u64>]) -> Values {
    let mut sums = [0u64; VALUES];
    let of_step = mix(seed) ^ step.wrapping_mul(0x1_0001);
    for sample in samples.iter().cloned().flatten() {
        for (place, sum) in sums.iter_mut().enumerate() {
            let stream = mix(of_step ^ (sample << 20) ^ ((place as u64) << 52));
            *sum = sum.wrapping_add(stream);
        }
    }
    sums
}

/// An undisturbed run of a job with this seed, as far as it was asked for.
#[derive(Debug, Clone)]
pub(crate) struct Truth {
    seed: u64,
    steps: Vec<Values>,
}

impl Truth {
    pub(crate) fn new(seed: u64) -> Self {
        let mut start = [0; VALUES];
        for (place, value) in start.iter_mut().enumerate() {
            *value = initial(seed, place);
        }
        Self { seed, steps: vec![start] }
    }

    pub(crate) fn at(&mut self, step: u64) -> &Values {
        while self.steps.len() as u64 <= step {
            let next = self.steps.len() as u64;
            #[allow(clippy::single_range_in_vec_init, reason = "the whole batch is one range")]
            let sums = gradients(self.seed, next, &[(next - 1) * BATCH..next * BATCH]);
            let mut values = self.steps[next as usize - 1];
            for (value, sum) in values.iter_mut().zip(sums) {
                *value = applied(*value, sum, next);
            }
            self.steps.push(values);
        }
        &self.steps[step as usize]
    }
}
