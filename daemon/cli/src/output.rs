//! Answers as text for people or as JSON for programs.

use crate::failure::Failure;
use crate::table::Table;
use std::io::Write;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    Text,
    Json,
}

impl Format {
    /// Prints one value, or a list, as one of both.
    pub(crate) fn print(self, json: &serde_json::Value, table: &Table) -> Result<(), Failure> {
        match self {
            Self::Text => print_lines(&table.lines()),
            Self::Json => print_lines(&[json.to_string()]),
        }
    }
}

/// To stdout; a reader that went away is no failure.
pub(crate) fn print_lines(lines: &[String]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let written = lines.iter().try_for_each(|line| writeln!(out, "{line}")).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::Failed(format!("stdout: {error}")))
        }
        Err(_) | Ok(()) => Ok(()),
    }
}
