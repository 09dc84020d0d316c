//! `reknit-agent`: one per node. Watches the GPUs through NVML, runs the workers, and tells the daemon.

mod agent;
mod check;
mod clock;
mod config;
mod convert;
mod files;
mod health;
mod kernel_log;
mod node_health;
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
use policy::command::PolicyCommandError;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

// From sysexits.h.
const EX_USAGE: u8 = 64;
const EX_DATAERR: u8 = 65;
const EX_OSERR: u8 = 71;
const EX_IOERR: u8 = 74;

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
            start_logging(arguments.log, if arguments.quiet { "error" } else { "info" });
            probe::run(&arguments)
        }
        (Some(Command::Policy(arguments)), _) => match policy::command::run(arguments) {
            Ok(text) => print(&text, ExitCode::SUCCESS),
            Err(PolicyCommandError::Told(text)) => print(&text, ExitCode::from(EX_DATAERR)),
            Err(e) => {
                eprintln!("reknit-agent: {e}");
                ExitCode::from(EX_DATAERR)
            }
        },
        (Some(Command::Check(arguments)), _) => look(arguments),
        (None, arguments) => run(arguments),
    }
}

fn run(arguments: RunArguments) -> ExitCode {
    start_logging(arguments.log, "info");
    let config = match arguments.check() {
        Ok(config) => config,
        Err(e) => {
            eprintln!("reknit-agent: {e}");
            return ExitCode::from(EX_USAGE);
        }
    };
    // The workers have the same limit, whose data may be many files.
    reknit_client::allow_files();
    reknit_client::outlive_full_files();
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
                AgentError::Policy(_) => EX_DATAERR,
                AgentError::Workers(_) | AgentError::Signals(_) | AgentError::KernelLog(_) => EX_OSERR,
            })
        }
    }
}

/// The answer of a command that only tells.
fn print(text: &str, code: ExitCode) -> ExitCode {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("reknit-agent: stdout: {e}");
            ExitCode::from(EX_IOERR)
        }
        Ok(()) | Err(_) => code,
    }
}

fn look(arguments: check::CheckArguments) -> ExitCode {
    // What is found is the answer, not the log.
    start_logging(LogFormat::Human, "error");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let findings =
        runtime.map_err(check::CheckError::from).and_then(|runtime| runtime.block_on(check::look(arguments)));
    match findings {
        Ok(findings) => print(&findings.text(), ExitCode::from(findings.exit_code())),
        Err(e) => {
            eprintln!("reknit-agent: {e}");
            ExitCode::from(match e {
                check::CheckError::Policy(_) => EX_DATAERR,
                check::CheckError::Start(_) => EX_OSERR,
            })
        }
    }
}

fn start_logging(format: LogFormat, level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
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
