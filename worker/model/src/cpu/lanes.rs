//! Sixteen numbers side by side, in the registers of each instruction set.
#![allow(unsafe_code)]

use crate::Real;

/// How many numbers.
pub(crate) const LANES: usize = 16;

/// Sixteen numbers.
///
/// Compilers do not find the one good order of a matrix product's inner loops by themselves; these types leave them no
/// choice. The functions may be called only where the instruction set is enabled.
pub trait Lanes<T>: Copy {
    fn all(x: T) -> Self;
    fn load(from: &[T; LANES]) -> Self;
    fn store(self, to: &mut [T; LANES]);
    fn add(self, other: Self) -> Self;
    fn subtract(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    /// `self + x * other`, rounded once if the instruction set can.
    fn add_product(self, x: T, other: Self) -> Self;
    /// Says that what lies there is wanted soon; any address will do.
    fn prefetch(_: *const T) {}
}

/// What every machine has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plain<T, const FUSED: bool>([T; LANES]);

impl<T: Real, const FUSED: bool> Plain<T, FUSED> {
    #[inline(always)]
    fn with(mut self, other: Self, operation: impl Fn(T, T) -> T) -> Self {
        for (x, y) in self.0.iter_mut().zip(other.0) {
            *x = operation(*x, y);
        }
        self
    }
}

impl<T: Real, const FUSED: bool> Lanes<T> for Plain<T, FUSED> {
    #[inline(always)]
    fn all(x: T) -> Self {
        Self([x; LANES])
    }

    #[inline(always)]
    fn load(from: &[T; LANES]) -> Self {
        Self(*from)
    }

    #[inline(always)]
    fn store(self, to: &mut [T; LANES]) {
        *to = self.0;
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.with(other, T::add)
    }

    #[inline(always)]
    fn subtract(self, other: Self) -> Self {
        self.with(other, T::sub)
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        self.with(other, T::mul)
    }

    #[inline(always)]
    fn add_product(self, x: T, other: Self) -> Self {
        self.with(other, |sum, y| if FUSED { x.mul_add(y, sum) } else { sum + x * y })
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    use super::{LANES, Lanes};
    use std::arch::x86_64::*;

    macro_rules! lanes {
        (
            $name:ident: $count:literal x $register:ident of $float:ident,
            $splat:ident, $load:ident, $store:ident, $add:ident, $sub:ident, $mul:ident, $fma:ident
        ) => {
            #[derive(Debug, Clone, Copy)]
            pub struct $name([$register; $count]);

            // SAFETY (all of them): the trait's functions are called only where the instruction set is enabled, and what
            // is loaded and stored are the parts of an array of sixteen.
            impl Lanes<$float> for $name {
                #[inline(always)]
                fn all(x: $float) -> Self {
                    Self([unsafe { $splat(x) }; $count])
                }

                #[inline(always)]
                fn load(from: &[$float; LANES]) -> Self {
                    let mut out = [unsafe { $splat(0.0) }; $count];
                    for part in 0..$count {
                        out[part] = unsafe { $load(from.as_ptr().add(part * LANES / $count)) };
                    }
                    Self(out)
                }

                #[inline(always)]
                fn store(self, to: &mut [$float; LANES]) {
                    for part in 0..$count {
                        unsafe { $store(to.as_mut_ptr().add(part * LANES / $count), self.0[part]) };
                    }
                }

                #[inline(always)]
                fn add(mut self, other: Self) -> Self {
                    for part in 0..$count {
                        self.0[part] = unsafe { $add(self.0[part], other.0[part]) };
                    }
                    self
                }

                #[inline(always)]
                fn subtract(mut self, other: Self) -> Self {
                    for part in 0..$count {
                        self.0[part] = unsafe { $sub(self.0[part], other.0[part]) };
                    }
                    self
                }

                #[inline(always)]
                fn multiply(mut self, other: Self) -> Self {
                    for part in 0..$count {
                        self.0[part] = unsafe { $mul(self.0[part], other.0[part]) };
                    }
                    self
                }

                #[inline(always)]
                fn add_product(mut self, x: $float, other: Self) -> Self {
                    let x = unsafe { $splat(x) };
                    for part in 0..$count {
                        self.0[part] = unsafe { $fma(x, other.0[part], self.0[part]) };
                    }
                    self
                }

                #[inline(always)]
                fn prefetch(at: *const $float) {
                    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
                }
            }
        };
    }

    lanes!(
        F32Avx512: 1 x __m512 of f32,
        _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_add_ps, _mm512_sub_ps, _mm512_mul_ps, _mm512_fmadd_ps
    );
    lanes!(
        F32Avx2: 2 x __m256 of f32,
        _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_sub_ps, _mm256_mul_ps, _mm256_fmadd_ps
    );
    lanes!(
        F64Avx512: 2 x __m512d of f64,
        _mm512_set1_pd, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_add_pd, _mm512_sub_pd, _mm512_mul_pd, _mm512_fmadd_pd
    );
    lanes!(
        F64Avx2: 4 x __m256d of f64,
        _mm256_set1_pd, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_add_pd, _mm256_sub_pd, _mm256_mul_pd, _mm256_fmadd_pd
    );
}
