//! A simulated `libnvidia-ml.so.1`.
//!
//! Built as a shared library it answers NVML's C interface from one JSON control file, so that an
//! unmodified NVML client sees GPUs on a machine that has none, and a test or a demo can make one
//! of them fail. The environment variable `REKNIT_SIMDRIVER_STATE` names the file; [`state::State`]
//! is its schema and `docs/simdriver.md` its manual. The file is replaced, never edited in place, and every call answers from its
//! newest content.
//!
//! Built as a Rust library it gives tests and the `reknit-simdriver` tool the control file alone.

mod abi;
mod calls;
mod driver;
mod event_set;
mod ffi;
pub mod state;

#[doc(hidden)]
pub use abi::table as abi_table;
