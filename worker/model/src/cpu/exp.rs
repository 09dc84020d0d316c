//! The exponential in single precision, so that loops over it become vector code and its bits depend on no C library.

use std::f32::consts::LOG2_E;

/// Below, the result would be subnormal; above, it would overflow. Between them, the power of two below is a normal number.
const LOWEST: f32 = -87.3;
const HIGHEST: f32 = 88.0;

/// ln 2 in two parts; the first has so few bits that its product with the power is exact.
const LN_2_HIGH: f32 = 355.0 / 512.0;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// Adding and taking away this rounds to the nearest whole number, which then sits in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// `e^x` to 2 units in the last place; outside `-87.3..88` that of the nearer end. A NaN stays one.
///
/// `e^x = 2^n * e^r` with `r = x - n ln 2` in `-0.35..0.35`, and `e^r` by its Taylor polynomial of degree 7.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = if x < LOWEST { LOWEST } else { x };
    let x = if x > HIGHEST { HIGHEST } else { x };
    let shifted = x * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut tail = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        tail = tail * r + coefficient;
    }
    let power = shifted.to_bits().wrapping_add(127) << 23;
    (r * r * tail + r + 1.0) * f32::from_bits(power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn within_two_units_in_the_last_place() {
        let mut worst = 0.0_f64;
        for i in -87_200..=88_000 {
            let x = i as f32 * 1e-3 + 1e-5;
            if !(LOWEST..=HIGHEST).contains(&x) {
                continue;
            }
            let exact = f64::from(x).exp();
            let unit = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
            worst = worst.max((f64::from(exp(x)) - exact).abs() / unit);
        }
        assert!(worst < 2.0, "{worst} units");
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn ends() {
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::NEG_INFINITY) > 0.0 && exp(-1e9) < 2e-38);
        assert!(exp(f32::INFINITY).is_finite() && exp(1e9) > 1e38);
    }
}
