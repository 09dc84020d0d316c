//! `reknit bench`: how fast Reknit is, and what it takes.

mod daemon;
mod job;
mod plane;
mod planner;
mod recovery;
mod spread;
mod train;

use crate::failure::Failure;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum BenchCommand {
    /// Time the plan after the loss of one GPU, and the look ahead to the next losses.
    Planner(planner::PlannerArgs),
    /// Put thousands of simulated agents and workers on a real daemon on one core, and kill a worker.
    Daemon(daemon::DaemonArgs),
    /// Train on a cluster of this machine's processes, kill workers again and again, and time each recovery.
    Recovery(recovery::RecoveryArgs),
    /// Time the trainer alone: tokens a second for two shapes of model.
    Train(train::TrainArgs),
    /// Time exchanges between ranks of this machine over each transport, beside plain copies.
    Plane(plane::PlaneArgs),
}

pub(crate) async fn run(command: &BenchCommand) -> Result<(), Failure> {
    match command {
        BenchCommand::Planner(args) => planner::run(args),
        BenchCommand::Daemon(args) => daemon::run(args).await,
        BenchCommand::Recovery(args) => recovery::run(args).await,
        BenchCommand::Train(args) => train::run(args),
        BenchCommand::Plane(args) => plane::run(args),
    }
}
