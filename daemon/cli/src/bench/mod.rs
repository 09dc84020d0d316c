//! `reknit bench`: how fast Reknit's own decisions are.

mod planner;

use crate::failure::Failure;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum BenchCommand {
    /// Time the plan after the loss of one GPU, and the look ahead to the next losses.
    Planner(planner::PlannerArgs),
}

pub(crate) fn run(command: &BenchCommand) -> Result<(), Failure> {
    match command {
        BenchCommand::Planner(args) => planner::run(args),
    }
}
