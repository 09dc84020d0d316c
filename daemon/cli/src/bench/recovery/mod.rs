//! `reknit bench recovery`: a real job on a real cluster of this machine loses a worker, again and again.
//!
//! Each loss is another worker, at another moment of the step. Times are taken here, on one clock: from just before the
//! signal to the arrival of the first step that the new layout committed. Samples are counted from the committed steps.

mod figures;
mod job;
mod stand_in;
mod trial;

use crate::failure::Failure;
use crate::local::{Cluster, Ground, Interrupts, on_cluster};
use crate::output::{Format, Progress, print_lines};
use figures::Figures;
use std::time::Duration;
use trial::Trial;

/// Longer than a recovery, as the daemon's own default is: a new process that starts amid one takes cores from it, where all
/// share the same few.
const REJOIN_HOLD: Duration = Duration::from_millis(500);
const REPEATS: u32 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
enum Blow {
    /// SIGKILL: the process is gone.
    Kill,
    /// SIGSTOP: the process stays and does nothing.
    Stop,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RecoveryArgs {
    /// Replicas, each on a node of its own.
    #[arg(long, value_name = "D", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=8))]
    data: u32,
    /// Workers of a replica.
    #[arg(long, value_name = "T", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8))]
    tensor: u32,
    /// About how many parameters the model has, such as `10m`.
    #[arg(long, value_name = "N", default_value = "10m", value_parser = job::params)]
    params: u64,
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000), help = format!(
        "How many workers to lose, one after another. Default: {REPEATS}, and 1 with --leave"
    ))]
    repeats: Option<u32>,
    /// What a worker is lost by.
    #[arg(long, value_enum, default_value_t = Blow::Kill)]
    signal: Blow,
    /// The lost worker never returns, and neither do its cores: how much of the throughput goes on without it?
    #[arg(long)]
    leave: bool,
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

impl RecoveryArgs {
    fn repeats(&self) -> u32 {
        self.repeats.unwrap_or(if self.leave { 1 } else { REPEATS })
    }
}

pub(crate) async fn run(args: &RecoveryArgs) -> Result<(), Failure> {
    if args.leave && args.repeats() != 1 {
        return Err(Failure::Usage(
            "--leave: one worker leaves for good; give --repeats 1 or none".to_owned(),
        ));
    }
    let folder = tempfile::tempdir().map_err(Failure::failed("no temporary folder could be made"))?;
    let spec = job::spec(args, &job::text(folder.path())?)?;
    let mut interrupts = Interrupts::listen()?;
    let progress = Progress::default();
    let hold = if args.leave { Duration::from_secs(24 * 3600) } else { REJOIN_HOLD };
    let ground = Ground { nodes: args.data, gpus: args.tensor, rejoin_hold: hold };
    let work = async |cluster: &mut Cluster| {
        let trial = Trial::start(cluster, &spec, args.signal, &progress).await?;
        if args.leave { trial.leave().await } else { trial.losses(args.repeats()).await }
    };
    let seen = on_cluster(ground, &mut interrupts, work, |line| progress.note(line)).await?;
    let figures = Figures::of(&spec, args.signal, &seen)?;
    drop(progress);
    match args.format {
        Format::Json => {
            let json = serde_json::to_string(&figures).map_err(Failure::failed("the figures as JSON"))?;
            print_lines(&[json])?;
        }
        Format::Table => print_lines(&figures.lines())?,
    }
    let problems = figures.problems();
    if problems.is_empty() { Ok(()) } else { Err(Failure::Failed(problems.join("; "))) }
}
