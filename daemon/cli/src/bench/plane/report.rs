//! The figures.

use super::Way;
use super::copies::Copies;
use crate::output::bytes_text;
use crate::table::Table;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Exchange {
    /// f32, in place.
    AllReduce,
    /// Rank 0 receives what rank 1 sends.
    Receive,
    /// Each rank sends every rank an equal part of its data.
    AllToAll,
}

impl Exchange {
    pub(super) const ALL: [Exchange; 3] = [Exchange::AllReduce, Exchange::Receive, Exchange::AllToAll];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::Receive => "receive",
            Self::AllToAll => "all-to-all",
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Point {
    pub(super) transport: Way,
    pub(super) ranks: usize,
    pub(super) exchange: Exchange,
    /// What each rank sends, gets or reduces.
    pub(super) bytes: usize,
    pub(super) rounds: u64,
    pub(super) best_us: f64,
    pub(super) median_us: f64,
}

#[derive(Debug, Serialize)]
pub(super) struct Measured {
    pub(super) points: Vec<Point>,
    pub(super) copies: Vec<Copies>,
}

impl Measured {
    pub(super) fn lines(&self) -> Vec<String> {
        let mut table = Table::new([
            "EXCHANGE", "RANKS", "BYTES", "OVER", "BEST", "MEDIAN", "GB/S", "/ MEMCPY", "/ SOCKET",
        ]);
        for exchange in Exchange::ALL {
            for point in self.points.iter().filter(|point| point.exchange == exchange) {
                let copies = self.copies.iter().find(|copies| copies.bytes == point.bytes);
                let beside = |copy: fn(&Copies, Way) -> f64| {
                    let copy = copies.map(|copies| copy(copies, point.transport));
                    copy.map_or(String::new(), |copy| format!("{:.2}", copy / point.median_us))
                };
                table.row([
                    exchange.name().to_owned(),
                    point.ranks.to_string(),
                    bytes_text(point.bytes as u64),
                    point.transport.name().to_owned(),
                    micros(point.best_us),
                    micros(point.median_us),
                    format!("{:.2}", point.bytes as f64 / point.median_us / 1e3),
                    beside(|copies, _| copies.memcpy_us),
                    beside(|copies, way| match way {
                        Way::Shm | Way::Unix => copies.unix_us,
                        Way::Tcp => copies.tcp_us,
                    }),
                ]);
            }
        }
        let mut lines = table.lines();
        lines.push(String::new());
        let mut table = Table::new(["PLAIN COPY OF", "MEMCPY", "ALL RANKS AT ONCE", "UNIX SOCKET", "TCP"]);
        for copies in &self.copies {
            table.row([
                bytes_text(copies.bytes as u64),
                micros(copies.memcpy_us),
                micros(copies.memcpy_together_us),
                micros(copies.unix_us),
                micros(copies.tcp_us),
            ]);
        }
        lines.extend(table.lines());
        lines
    }
}

fn micros(time: f64) -> String {
    if time < 10_000.0 { format!("{time:.0} us") } else { format!("{:.1} ms", time / 1e3) }
}
