//! What the processor does. Loops come in a version for each instruction set ([`versions`]); the team's threads share them out.

pub(crate) mod exp;
pub(crate) mod gemm;
pub(crate) mod kernels;
pub(crate) mod versions;
pub(crate) mod view;
