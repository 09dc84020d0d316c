//! `reknit`: the operator's tool.

mod admin;
mod bench;
mod commands;
mod demo;
mod failure;
mod files;
mod local;
mod output;
mod plan;
mod process;
mod table;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use failure::Failure;
use output::Format;
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

/// Runs and watches training jobs that outlive their GPUs.
///
/// Exit status: 0 done, 1 failed, 2 a plan lacks units that no live GPU holds, 64 wrong usage or configuration, 69 no daemon answers.
#[derive(Debug, Parser)]
#[command(name = "reknit", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// See a job lose two GPUs and take them back, on a cluster of this machine's processes.
    Demo(demo::DemoArgs),
    /// Submit, show and stop jobs.
    #[command(subcommand)]
    Job(commands::job::JobCommand),
    /// Look at checkpoints: which there are, whether they are whole; export the weights for other tools.
    #[command(subcommand)]
    Checkpoint(commands::checkpoint::CheckpointCommand),
    /// Plan what would happen to a job that loses GPUs, without touching a cluster.
    Plan(plan::PlanArgs),
    /// Measure Reknit itself.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Show which daemon leads.
    #[command(subcommand)]
    Daemon(commands::daemon::DaemonCommand),
    /// Show nodes and their GPUs; quiesce, resume and probe a node.
    #[command(subcommand)]
    Node(commands::node::NodeCommand),
    /// Show a GPU; take GPUs out and let them in again; limit their power.
    #[command(subcommand)]
    Gpu(commands::gpu::GpuCommand),
    /// What failed in a job, when, where, and how long the recovery took; with --id, each phase of it, what it cost and
    /// what to do.
    Incidents(commands::incidents::IncidentsArgs),
    /// What happens, as it happens, until Ctrl-C. Times are UTC; in JSON microseconds since 1970.
    Events {
        /// All jobs when not given.
        job: Option<String>,
        /// Only these, such as `health,incident`; all when not given.
        #[arg(long, value_enum, value_delimiter = ',', value_name = "KIND,...")]
        kind: Vec<commands::events::Kind>,
        #[command(flatten)]
        remote: Remote,
    },
    /// Become another program that ends when its parent does.
    #[command(hide = true)]
    Launch {
        #[arg(long)]
        parent: u32,
        program: OsString,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

/// Which daemon to ask, and how to answer.
#[derive(Debug, clap::Args)]
struct Remote {
    /// Several are separated by commas; the one that leads is found.
    #[arg(long, env = "REKNIT_DAEMON", default_value = "http://127.0.0.1:7400", value_name = "URL")]
    daemon: String,
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => error.exit(),
        Err(error) => {
            // `reknit` alone: what it can do.
            if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
                let _ = error.print();
            } else {
                tell(&one_line(&error));
            }
            return ExitCode::from(64);
        }
    };
    if let Command::Launch { parent, program, args } = &cli.command {
        let error = process::launch(*parent, program, args);
        tell(&format!("{} could not be started: {error}", program.display()));
        return ExitCode::FAILURE;
    }
    reknit_client::outlive_full_files();
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            tell(&failure.to_string());
            ExitCode::from(failure.exit_status())
        }
    }
}

/// What is wrong and what was perhaps meant, without the usage that follows.
fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let told: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
    told.join(" ").trim_start_matches("error: ").replace(" tip: ", "; ")
}

/// To stderr, as one line: names of files and nodes may hold line ends and orders to the terminal, these are written as
/// escapes. Nobody may be there to read it: the exit status tells all the same.
fn tell(text: &str) {
    let mut line = String::from("reknit: ");
    for c in text.chars() {
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line.push('\n');
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// On the main thread alone: a child's death signal is tied to the thread that started it.
fn run(command: Command) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(Failure::failed("no runtime"))?;
    runtime.block_on(async {
        match command {
            Command::Demo(args) => demo::run(&args).await,
            Command::Job(command) => commands::job::run(command).await,
            Command::Checkpoint(command) => commands::checkpoint::run(&command),
            Command::Plan(args) => plan::run(&args),
            Command::Bench(command) => bench::run(&command).await,
            Command::Daemon(command) => commands::daemon::run(command).await,
            Command::Node(command) => commands::node::run(command).await,
            Command::Gpu(command) => commands::gpu::run(command).await,
            Command::Incidents(args) => commands::incidents::run(&args).await,
            Command::Events { job, kind, remote } => commands::events::watch(job, &kind, &remote).await,
            // It never comes here: it needs no runtime.
            Command::Launch { .. } => Ok(()),
        }
    })
}
