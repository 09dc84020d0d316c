//! The numbers the model computes with.

use crate::cpu;
use crate::cpu::gemm::Gemm;
use std::cell::RefCell;
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

/// A floating-point type the model can be trained in: `f32`, or `f64` for tests that must tell rounding from mistakes.
pub trait Real:
    bytemuck::Pod
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    /// The library's product.
    const GEMM: Gemm<Self>;

    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    /// The larger; a NaN gives way to a number.
    fn max(self, other: Self) -> Self;
    /// The nearest number that bf16 has; of two the even one. Values beyond `f32`'s last bit are rounded to `f32` first.
    fn to_bf16(self) -> Self;
    /// Calls with a buffer of this thread, which holds what the last call left in it.
    fn with_buffer<R>(body: impl FnOnce(&mut Vec<Self>) -> R) -> R;
}

macro_rules! real {
    ($float:ident, $exp:path, $gemm:path) => {
        impl Real for $float {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $float::NEG_INFINITY;
            const GEMM: Gemm<Self> = $gemm;

            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value as Self
            }

            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }

            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }

            #[inline(always)]
            fn ln(self) -> Self {
                self.ln()
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                self.sqrt()
            }

            #[inline(always)]
            fn max(self, other: Self) -> Self {
                self.max(other)
            }

            #[inline(always)]
            fn to_bf16(self) -> Self {
                Self::from(to_bf16(self as f32))
            }

            fn with_buffer<R>(body: impl FnOnce(&mut Vec<Self>) -> R) -> R {
                thread_local!(static BUFFER: RefCell<Vec<$float>> = RefCell::default());
                BUFFER.with_borrow_mut(body)
            }
        }
    };
}

real!(f32, cpu::exp::exp, matrixmultiply::sgemm);
real!(f64, f64::exp, matrixmultiply::dgemm);

/// A bf16 is the upper half of an `f32`. Rounding may carry into the exponent, up to infinity, as it should; a NaN stays one.
#[inline(always)]
fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    if x.is_nan() { x } else { f32::from_bits(rounded) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_the_nearest_and_of_two_the_even_one() {
        let step = 2.0_f32.powi(-7);
        for (x, expected) in [
            (1.0, 1.0),
            (1.0 + 0.49 * step, 1.0),
            (1.0 + 0.5 * step, 1.0),
            (1.0 + 0.51 * step, 1.0 + step),
            (1.0 + 1.5 * step, 1.0 + 2.0 * step),
            (-1.0 - 0.51 * step, -1.0 - step),
            (2.0 - 0.01 * step, 2.0),
            (0.0, 0.0),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
        ] {
            assert_eq!(Real::to_bf16(x), expected, "{x}");
            assert_eq!(Real::to_bf16(f64::from(x)), f64::from(expected), "{x}");
        }
        assert!(Real::to_bf16(f32::NAN).is_nan() && Real::to_bf16(f32::from_bits(0x7f80_0001)).is_nan());
        assert!(Real::to_bf16(-0.0_f32).is_sign_negative());
    }
}
