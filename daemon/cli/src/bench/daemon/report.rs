//! The figures.

use super::ms;
use crate::output::bytes_text;
use crate::table::Table;
use serde::Serialize;
use std::time::Duration;

/// How a time is spread over many, in milliseconds.
#[derive(Debug, Default, Serialize)]
pub(super) struct Percentiles {
    p50: f64,
    p99: f64,
    max: f64,
}

impl Percentiles {
    pub(super) fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |share: f64| {
            let index = (times.len() as f64 * share).ceil() as usize;
            times.get(index.saturating_sub(1)).copied().map_or(0.0, ms)
        };
        Self { p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }

    fn cells(&self) -> [String; 3] {
        [self.p50, self.p99, self.max].map(|time| format!("{time:.1} ms"))
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Load {
    pub(super) agent_reports_per_s: f64,
    pub(super) worker_reports_per_s: f64,
    /// 1: the whole core.
    pub(super) core_share: f64,
    /// From a small question to the daemon's loop to its answer.
    pub(super) wait_ms: Percentiles,
}

/// Times since the fault, or since the first worker was asked to pause.
#[derive(Debug, Serialize)]
pub(super) struct Recovery {
    /// Workers that were told to stop.
    pub(super) halted: usize,
    pub(super) halt_ms: Percentiles,
    pub(super) prepared_ms: Percentiles,
    /// Of one order to prepare, on average.
    pub(super) prepare_bytes: u64,
    pub(super) resumed_ms: Percentiles,
    /// Since the first resumed.
    pub(super) resume_fan_out_ms: Percentiles,
    pub(super) wait_ms: Percentiles,
}

#[derive(Debug, Serialize)]
pub(super) struct Measured {
    pub(super) resting: bool,
    pub(super) agents: u32,
    pub(super) workers: u32,
    pub(super) connections: u32,
    /// From the job's submission until every worker trains.
    pub(super) started_ms: f64,
    pub(super) load: Load,
    /// With all agents connected and no job.
    pub(super) idle_bytes: u64,
    pub(super) rss_bytes: u64,
    pub(super) peak_bytes: u64,
    pub(super) loss: Option<Recovery>,
    pub(super) returns: Option<Recovery>,
}

impl Measured {
    pub(super) fn lines(&self) -> Vec<String> {
        let load = &self.load;
        let mut lines = vec![
            format!(
                "{} agents and {} workers on {} connections, reknitd on one core",
                self.agents, self.workers, self.connections
            ),
            format!(
                "load     {} reports/s of agents, {} of workers: {:.1} % of the core",
                load.agent_reports_per_s,
                load.worker_reports_per_s,
                load.core_share * 100.0
            ),
            format!(
                "memory   {} with agents alone, {} now, {} at most",
                bytes_text(self.idle_bytes),
                bytes_text(self.rss_bytes),
                bytes_text(self.peak_bytes)
            ),
            format!("start    all workers train {:.0} ms after the job came", self.started_ms),
        ];
        let mut table = Table::new(["", "P50", "P99", "MAX"]);
        let mut row = |name: String, spread: &Percentiles| {
            let [p50, p99, max] = spread.cells();
            table.row([name, p50, p99, max]);
        };
        row("answer of the loop".to_owned(), &load.wait_ms);
        for (what, recovery) in [("loss", &self.loss), ("return", &self.returns)] {
            let Some(recovery) = recovery else { continue };
            row(format!("{what}: told to stop"), &recovery.halt_ms);
            row(format!("{what}: told to prepare"), &recovery.prepared_ms);
            row(format!("{what}: told to resume"), &recovery.resumed_ms);
            row(format!("{what}: resume after the first"), &recovery.resume_fan_out_ms);
            row(format!("{what}: answer of the loop"), &recovery.wait_ms);
        }
        lines.extend(table.lines());
        for (what, recovery) in [("loss", &self.loss), ("return", &self.returns)] {
            if let Some(recovery) = recovery {
                let bytes = bytes_text(recovery.prepare_bytes);
                lines.push(format!(
                    "{what}: {} workers halted; an order to prepare has {bytes}",
                    recovery.halted
                ));
            }
        }
        lines
    }
}
