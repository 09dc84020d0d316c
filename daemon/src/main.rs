//! The coordinator.

use reknitd::config::{ConfigError, Flags, LogFormat};
use reknitd::{Config, Failure, serve};
use std::io::IsTerminal;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

const THREADS: usize = 2;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("reknitd: {failure}");
            ExitCode::from(failure.exit_code())
        }
    }
}

fn run() -> Result<(), Failure> {
    let flags = Flags::parse_or_refuse()?;
    let config = Config::from_flags(&flags)?;
    if flags.print_config {
        config.read_topology()?;
        print!("{}", config.to_toml()?);
        return Ok(());
    }
    log_to_stderr(config.log)?;
    // Every agent and worker has a connection.
    reknit_client::allow_files();
    reknit_client::outlive_full_files();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // One for the loop, one for the streams: more only cost memory.
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .map_err(|error| Failure::Internal(format!("the kernel gives no threads: {error}")))?;
    let ended = runtime.block_on(async {
        let stop = stop_signal().map_err(|error| Failure::Internal(error.to_string()))?;
        serve::serve(config, stop).await
    });
    // What is left are cut-off calls.
    runtime.shutdown_background();
    ended
}

/// Resolves on SIGTERM or SIGINT. They are caught from the call on.
fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// `RUST_LOG` chooses what; `info` by default.
fn log_to_stderr(format: LogFormat) -> Result<(), ConfigError> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(text) => EnvFilter::try_new(text)
            .map_err(|error| ConfigError { place: "RUST_LOG".to_owned(), problem: error.to_string() })?,
        Err(_) => EnvFilter::new("info"),
    };
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        // It would panic on a full disk.
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Human => log.init(),
        LogFormat::Json => log.json().init(),
    }
    Ok(())
}
