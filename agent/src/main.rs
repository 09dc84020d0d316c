//! `reknit-agent`: one per node. Watches the GPUs through NVML, runs the workers, and tells the daemon.

mod agent;
mod clock;
mod config;
mod convert;
mod files;
mod health;
#[allow(dead_code, reason = "the agent does not start it yet")]
mod kernel_log;
mod outbox;
mod policy;
mod power;
mod probe;
mod probe_keeper;
mod requests;
mod session;
mod sight;
mod spool;
mod workers;

use agent::AgentError;
use clap::Parser;
use config::{Arguments, Command, LogFormat, RunArguments};
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

// From sysexits.h.
const EX_USAGE: u8 = 64;
const EX_DATAERR: u8 = 65;
const EX_UNAVAILABLE: u8 = 69;
const EX_SOFTWARE: u8 = 70;
const EX_OSERR: u8 = 71;

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(e) if !e.use_stderr() => e.exit(),
        Err(e) => {
            eprintln!("reknit-agent: {}", one_line(&e));
            return ExitCode::from(EX_USAGE);
        }
    };
    match (arguments.command, arguments.run) {
        (Some(Command::Probe(arguments)), _) => {
            start_logging(arguments.log);
            probe::run(&arguments)
        }
        (Some(Command::Policy(arguments)), _) => match policy::command::run(arguments) {
            Ok(text) => {
                let _reader_went_away = io::stdout().lock().write_all(text.as_bytes());
                ExitCode::SUCCESS
            }
            Err(e) => {
                eprintln!("reknit-agent: {e}");
                ExitCode::from(EX_DATAERR)
            }
        },
        (None, Some(arguments)) => run(arguments),
        (None, None) => {
            eprintln!("reknit-agent: give --daemon and --node; --help tells more");
            ExitCode::from(EX_USAGE)
        }
    }
}

fn run(arguments: RunArguments) -> ExitCode {
    start_logging(arguments.log);
    let config = match arguments.check() {
        Ok(config) => config,
        Err(e) => {
            eprintln!("reknit-agent: {e}");
            return ExitCode::from(EX_USAGE);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(agent::run(config)),
        Err(e) => {
            eprintln!("reknit-agent: cannot start: {e}");
            return ExitCode::from(EX_OSERR);
        }
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("reknit-agent: {e}");
            ExitCode::from(match e {
                AgentError::Library { .. } => EX_UNAVAILABLE,
                AgentError::Policy(_) => EX_SOFTWARE,
                AgentError::Workers(_) | AgentError::Signals(_) => EX_OSERR,
            })
        }
    }
}

fn start_logging(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        // It would panic on a full disk.
        .log_internal_errors(false)
        .with_writer(io::stderr);
    match format {
        LogFormat::Human => log.init(),
        LogFormat::Json => log.json().init(),
    }
}

/// What is wrong, without the usage text that follows it.
fn one_line(e: &clap::Error) -> String {
    let text = e.to_string();
    let lines = text.lines().map(str::trim);
    let told: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
    told.join(" ")
}
