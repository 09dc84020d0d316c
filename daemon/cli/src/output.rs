//! Answers as text for people or as JSON for programs.

use crate::failure::Failure;
use crate::table::Table;
use std::io::{IsTerminal, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// For people.
    #[value(alias = "text")]
    Table,
    /// For programs.
    Json,
}

impl Format {
    /// Prints one value, or a list, as one of both.
    pub(crate) fn print(self, json: &serde_json::Value, table: &Table) -> Result<(), Failure> {
        match self {
            Self::Table => print_lines(&table.lines()),
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

/// One line on stderr that is written over and over, if somebody sees it. It is gone when this is dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    seen: bool,
}

impl Default for Progress {
    fn default() -> Self {
        Self { seen: std::io::stderr().is_terminal() }
    }
}

impl Progress {
    pub(crate) fn show(&self, text: &str) {
        if self.seen {
            let _ = write!(std::io::stderr(), "\r\x1b[K{text}");
        }
    }

    /// A line that stays, whoever sees it.
    pub(crate) fn note(&self, text: &str) {
        self.show("");
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.show("");
    }
}

/// A dash for what there is none of.
pub(crate) fn or_none(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

/// `2026-11-30T03:13:18.123Z` for microseconds since the Unix epoch.
pub(crate) fn time_text(us: u64) -> String {
    humantime::format_rfc3339_millis(time(us)).to_string()
}

/// `2026-11-30T03:13:18Z`
pub(crate) fn second_text(us: u64) -> String {
    humantime::format_rfc3339_seconds(time(us)).to_string()
}

fn time(us: u64) -> SystemTime {
    // Years are written with four digits.
    const LATEST: u64 = 253_402_300_799_999_999;
    UNIX_EPOCH + Duration::from_micros(us.min(LATEST))
}

/// `7.0 MiB`: powers of 1024, as a topology's `memory_gib`.
pub(crate) fn bytes_text(bytes: u64) -> String {
    const LARGER: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut amount = bytes as f64 / 1024.0;
    let mut unit = 0;
    // What would be written as 1024.0 is one of the next.
    while amount >= 1023.95 && unit + 1 < LARGER.len() {
        amount /= 1024.0;
        unit += 1;
    }
    format!("{amount:.1} {}", LARGER[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_in_utc() {
        assert_eq!(time_text(1_796_008_398_123_456), "2026-11-30T03:13:18.123Z");
        assert_eq!([0, u64::MAX].map(time_text), ["1970-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z"]);
    }

    #[test]
    fn amounts_of_bytes() {
        let texts = [0, 1023, 1024, 1_048_524, 1_048_525, 7_372_800, 80 << 30].map(bytes_text);
        assert_eq!(texts, ["0 B", "1023 B", "1.0 KiB", "1023.9 KiB", "1.0 MiB", "7.0 MiB", "80.0 GiB"]);
        assert_eq!(bytes_text(u64::MAX), "16.0 EiB");
    }
}
