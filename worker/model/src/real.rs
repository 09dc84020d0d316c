//! The numbers the model computes with.

use crate::cpu;
use crate::cpu::gemm::Gemm;
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

/// A floating-point type the model can be trained in: `f32`, or `f64` for tests that must tell rounding from mistakes.
pub trait Real:
    Gemm
    + bytemuck::Pod
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

    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    /// The larger; a NaN gives way to a number.
    fn max(self, other: Self) -> Self;
}

macro_rules! real {
    ($float:ident, $exp:path) => {
        impl Real for $float {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $float::NEG_INFINITY;

            #[inline]
            fn from_f64(value: f64) -> Self {
                value as Self
            }

            #[inline]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }

            #[inline]
            fn exp(self) -> Self {
                $exp(self)
            }

            #[inline]
            fn ln(self) -> Self {
                self.ln()
            }

            #[inline]
            fn sqrt(self) -> Self {
                self.sqrt()
            }

            #[inline]
            fn max(self, other: Self) -> Self {
                self.max(other)
            }
        }
    };
}

real!(f32, cpu::exp::exp);
real!(f64, f64::exp);
