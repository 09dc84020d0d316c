//! The same loops compiled for several instruction sets; the machine's best one runs.

/// Instruction sets worth a version of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What every machine of the target has.
    Plain,
}

impl Isa {
    #[inline]
    pub(crate) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            // The standard library remembers what it found. All that `AVX512` below enables was there from the first
            // servers with AVX-512 on.
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("fma")
            {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Plain
    }
}

/// Defines generic functions, each in a version for every instruction set. None of them contracts a product and a sum,
/// so all versions compute the same bits.
macro_rules! versions {
    ($(
        $(#[$attribute:meta])*
        $vis:vis fn $name:ident<$t:ident>($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block
    )*) => {$(
        $(#[$attribute])*
        $vis fn $name<$t: $crate::Real>($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            fn plain<$t: $crate::Real>($($argument: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
            fn avx512<$t: $crate::Real>($($argument: $type),*) $(-> $result)? {
                plain($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2<$t: $crate::Real>($($argument: $type),*) $(-> $result)? {
                plain($($argument),*)
            }

            match $crate::cpu::isa::Isa::best() {
                // SAFETY: `Isa::best` found what the version needs.
                #[cfg(target_arch = "x86_64")]
                #[allow(unsafe_code)]
                $crate::cpu::isa::Isa::Avx512 => unsafe { avx512($($argument),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                #[allow(unsafe_code)]
                $crate::cpu::isa::Isa::Avx2 => unsafe { avx2($($argument),*) },
                $crate::cpu::isa::Isa::Plain => plain($($argument),*),
            }
        }
    )*};
}

pub(crate) use versions;
