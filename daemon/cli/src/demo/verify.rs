//! Does training with faults learn the same as without?

use std::collections::BTreeMap;

/// The largest relative difference between the losses of the same step; infinite when one run lacks a step.
pub(crate) fn parity(with_faults: &BTreeMap<u64, f64>, without: &BTreeMap<u64, f64>) -> f64 {
    if !with_faults.keys().eq(without.keys()) {
        return f64::INFINITY;
    }
    let pairs = with_faults.values().zip(without.values());
    pairs
        .map(|(a, b)| relative(*a, *b))
        .fold(0.0, |most, next| if next.is_nan() { f64::INFINITY } else { next.max(most) })
}

fn relative(a: f64, b: f64) -> f64 {
    if a == b { 0.0 } else { (a - b).abs() / b.abs() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn losses(values: &[f64]) -> BTreeMap<u64, f64> {
        (1..).zip(values.iter().copied()).collect()
    }

    #[test]
    fn the_worst_step_counts() {
        assert_eq!(parity(&losses(&[4.0, 2.0]), &losses(&[4.0, 2.5])), 0.2);
        assert_eq!(parity(&losses(&[4.0, 2.0]), &losses(&[4.0, 2.0])), 0.0);
    }

    #[test]
    fn a_missing_step_or_a_loss_that_is_no_number_is_no_parity() {
        assert_eq!(parity(&losses(&[4.0]), &losses(&[4.0, 2.0])), f64::INFINITY);
        assert_eq!(parity(&losses(&[f64::NAN]), &losses(&[4.0])), f64::INFINITY);
    }
}
