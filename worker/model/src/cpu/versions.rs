//! Loops compiled for several instruction sets; the machine's best version runs.

/// Defines generic functions, each in a version for every instruction set that is worth one. None of them contracts a product
/// and a sum, so all versions compute the same bits.
macro_rules! versions {
    ($(
        $(#[$attribute:meta])*
        $vis:vis fn $name:ident<$t:ident>($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block
    )*) => {$(
        $(#[$attribute])*
        // The other sets of the first version came with the first servers that had AVX-512.
        #[multiversion::multiversion(targets(
            "x86_64+avx512f+avx512vl+avx512dq+avx512bw+avx2+fma",
            "x86_64+avx2+fma"
        ))]
        $vis fn $name<$t: $crate::Real>($($argument: $type),*) $(-> $result)? $body
    )*};
}

pub(crate) use versions;
