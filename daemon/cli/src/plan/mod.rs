//! `reknit plan`: what would happen to a job that loses GPUs, without touching a cluster.
//!
//! Read the files, seat the GPUs, take out what fails or drains, seat again, plan, look ahead, print.

mod answer;
mod args;
mod files;
mod json;
mod losses;
mod report;
mod runs;
mod shift;
mod state;
mod target;

pub(crate) use args::PlanArgs;
pub(crate) use state::{State, worker};
pub(crate) use target::Target;

use crate::failure::Failure;
use crate::output::{Format, print_lines};
use answer::Answer;
use losses::Losses;

pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    let job = files::job(&args.job)?;
    let topology = files::topology(args.topology.as_deref(), &job)?;
    let before = match &args.holdings {
        Some(file) => State::read(&job, &topology, file)?,
        None => State::nominal(&job, &topology)?,
    };
    let losses = Losses::find(args, &job, &topology, &before.seats)?;
    let answer = Answer::find(&job, &topology, args.mode, &before, &losses)?;
    match (args.format, &answer.too_few) {
        (Format::Json, _) => print_lines(&[json::plan(&answer, args.contingency)?])?,
        (Format::Table, None) => print_lines(&report::lines(&answer))?,
        // There is no more to say than why.
        (Format::Table, Some(_)) => {}
    }
    match &answer.too_few {
        _ if !answer.missing.is_empty() => Err(Failure::Unrecoverable(report::unrecoverable(&answer))),
        Some(why) => Err(Failure::Failed(why.clone())),
        None => Ok(()),
    }
}
