//! What the processor does: matrix products by a library, everything else by plain loops.

pub(crate) mod exp;
pub mod gemm;
pub(crate) mod kernels;
