//! `reknit demo`: a cluster on this machine trains, loses a GPU in two ways, and gets each back.

mod data;
mod job;
mod script;
mod summary;
mod train;
mod verify;
mod view;

use crate::failure::Failure;
use crate::local::{Cluster, Ground, Interrupts, Record, on_cluster};
use crate::output::{Format, bytes_text};
use data::Chosen;
use reknit_layout::JobSpec;
use script::Script;
use summary::Summary;
use view::{Target, View};

#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    #[arg(long, default_value_t = 120, help = format!("How many steps to train, at least {}", Script::LEAST_STEPS))]
    steps: u64,
    /// A line per step and event, for logs.
    #[arg(long)]
    plain: bool,
    /// Also run the same job without faults and compare the loss of every step.
    #[arg(long)]
    verify: bool,
    /// `json`: the summary as one line on stdout, everything else on stderr.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    #[arg(long, num_args = 1.., value_name = "FILES", help = format!(
        "Files, folders or patterns to train on, at least {} KiB in all. Default: the Rust sources in cargo's registry \
         folder", data::LEAST_BYTES >> 10
    ))]
    data: Vec<String>,
    /// Of the model's first weights and the order of samples.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub(crate) async fn run(args: &DemoArgs) -> Result<(), Failure> {
    let data = choose_data(args)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let spec = job::spec(&data, args.steps, args.seed, cores);
    let mut interrupts = Interrupts::listen()?;
    let target = match args.format {
        Format::Table => Target::Stdout,
        Format::Json => Target::Stderr,
    };
    let mut view = View::new(target, args.plain);
    let result = both_runs(args, &data, &spec, &mut interrupts, &mut view).await;
    view.end();
    let (record, parity) = result?;
    report(args, &record, parity, &mut view)
}

/// All that can be refused is refused before anything starts.
fn choose_data(args: &DemoArgs) -> Result<Chosen, Failure> {
    if args.steps < Script::LEAST_STEPS {
        return Err(Failure::Usage(format!(
            "--steps {}: the faults need {} steps to happen and heal; give at least that many",
            args.steps,
            Script::LEAST_STEPS
        )));
    }
    let chosen = if args.data.is_empty() { data::default() } else { data::named(&args.data) };
    chosen.map_err(Failure::usage)
}

/// The run with faults and, if wanted, the one without; their largest relative difference in loss.
async fn both_runs(
    args: &DemoArgs,
    data: &Chosen,
    spec: &JobSpec,
    interrupts: &mut Interrupts,
    view: &mut View,
) -> Result<(Record, Option<f64>), Failure> {
    view.begin(
        if args.verify { "run 1 of 2: with faults" } else { "" },
        &format!(
            "{} steps on {} of text, 2 nodes of 4 GPUs; two GPUs will fail",
            args.steps,
            bytes_text(data.bytes)
        ),
        args.steps,
    );
    let record = one_run(spec, Some(Script::new(args.steps)), interrupts, view).await?;
    if !args.verify {
        return Ok((record, None));
    }
    view.begin(
        "run 2 of 2: without",
        "run 2 of 2: the same job without faults, to compare every step's loss",
        args.steps,
    );
    let without = one_run(spec, None, interrupts, view).await?;
    let parity = verify::parity(&record.losses(), &without.losses());
    Ok((record, Some(parity)))
}

/// Starts a cluster, trains on it and ends it, whatever happens.
async fn one_run(
    spec: &JobSpec,
    script: Option<Script>,
    interrupts: &mut Interrupts,
    view: &mut View,
) -> Result<Record, Failure> {
    let ground =
        Ground { nodes: job::REPLICAS, gpus: job::TENSOR, rejoin_hold: Script::rejoin_hold(spec.run.steps) };
    let mut said = Vec::new();
    let work = async |cluster: &mut Cluster| train::run(cluster, spec, script, view).await;
    let result = on_cluster(ground, interrupts, work, |line| said.push(line.to_owned())).await;
    said.iter().for_each(|line| view.note(line));
    result
}

fn report(args: &DemoArgs, record: &Record, parity: Option<f64>, view: &mut View) -> Result<(), Failure> {
    let summary = Summary::of(record, parity);
    let problems = summary.problems(record, args.steps);
    view.text("");
    for line in summary.lines(record) {
        view.text(&line);
    }
    if args.format == Format::Json {
        let json = serde_json::to_string(&summary).map_err(Failure::failed("the summary"))?;
        println!("{json}");
    }
    if !problems.is_empty() {
        return Err(Failure::Failed(format!("the demo went wrong: {}", problems.join("; "))));
    }
    view.text("");
    view.text("Both faults healed. No sample was lost or repeated, no state was rolled back.");
    if parity.is_none() {
        view.text("`reknit demo --verify` compares every step's loss with a run without faults.");
    }
    view.text("docs/recovery.md explains each phase; `reknit --help` lists the commands.");
    Ok(())
}
