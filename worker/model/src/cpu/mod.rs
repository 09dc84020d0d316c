//! What the processor does. Loops come in a version for each instruction set ([`isa`]); the team's threads share them out.

pub(crate) mod exp;
pub(crate) mod gemm;
pub(crate) mod isa;
pub(crate) mod kernels;
pub(crate) mod lanes;
pub(crate) mod view;
