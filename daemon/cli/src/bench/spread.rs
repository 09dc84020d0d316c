//! How a measure is spread over many.

use crate::local::median;
use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Spread {
    pub(super) min: f64,
    pub(super) median: f64,
    pub(super) max: f64,
}

impl Spread {
    /// To three digits. `None` of nothing.
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let round = |value: f64| (value * 1e3).round() / 1e3;
        let min = values.iter().copied().reduce(f64::min)?;
        let max = values.iter().copied().reduce(f64::max)?;
        Some(Self { min: round(min), median: round(median(values)?), max: round(max) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_an_even_number_is_between() {
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]), Some(Spread { min: 1.0, median: 2.5, max: 4.0 }));
        assert_eq!(Spread::of(&[]), None);
    }
}
