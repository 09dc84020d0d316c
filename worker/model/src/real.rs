//! The numbers the model computes with.

use crate::cpu;
use crate::cpu::gemm::Packs;
use crate::cpu::lanes::Lanes;
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
    /// The registers of two instruction sets.
    #[cfg(target_arch = "x86_64")]
    type Avx512: Lanes<Self>;
    #[cfg(target_arch = "x86_64")]
    type Avx2: Lanes<Self>;

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
    /// `self * factor + term`, rounded once.
    fn mul_add(self, factor: Self, term: Self) -> Self;
    /// Calls with this thread's buffers for packed matrices.
    fn with_packs<R>(body: impl FnOnce(&mut Packs<Self>) -> R) -> R;
}

macro_rules! real {
    ($float:ident, $exp:path, $avx512:ident, $avx2:ident) => {
        impl Real for $float {
            #[cfg(target_arch = "x86_64")]
            type Avx512 = cpu::lanes::x86::$avx512;
            #[cfg(target_arch = "x86_64")]
            type Avx2 = cpu::lanes::x86::$avx2;

            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $float::NEG_INFINITY;

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
            fn mul_add(self, factor: Self, term: Self) -> Self {
                self.mul_add(factor, term)
            }

            fn with_packs<R>(body: impl FnOnce(&mut Packs<Self>) -> R) -> R {
                thread_local!(static PACKS: RefCell<Packs<$float>> = RefCell::default());
                PACKS.with_borrow_mut(body)
            }
        }
    };
}

real!(f32, cpu::exp::exp, F32Avx512, F32Avx2);
real!(f64, f64::exp, F64Avx512, F64Avx2);
