//! The documented example.

/// A complete job file, as `reknit job example` prints it.
pub const EXAMPLE: &str = include_str!("example.toml");
