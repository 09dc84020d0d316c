//! `reknit bench`: how fast Reknit decides, and what it takes.

mod daemon;
mod planner;

use crate::failure::Failure;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum BenchCommand {
    /// Time the plan after the loss of one GPU, and the look ahead to the next losses.
    Planner(planner::PlannerArgs),
    /// Put thousands of simulated agents and workers on a real daemon on one core, and kill a worker.
    Daemon(daemon::DaemonArgs),
}

pub(crate) async fn run(command: &BenchCommand) -> Result<(), Failure> {
    match command {
        BenchCommand::Planner(args) => planner::run(args),
        BenchCommand::Daemon(args) => daemon::run(args).await,
    }
}
