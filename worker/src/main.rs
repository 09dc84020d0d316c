//! One rank of a training job.

use clap::Parser;
use reknit_model::Team;
use reknit_plane::Plane;
use reknit_plane::host::HostPlane;
use reknit_worker::abort::Aborts;
use reknit_worker::ahead::Summons;
use reknit_worker::config::{Config, LogFormat};
use reknit_worker::control::{self, Desk};
use reknit_worker::rank::RankError;
use reknit_worker::session::{Outbox, Session};
use reknit_worker::status::Status;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;

// From sysexits.h, so that the daemon and people can tell why a worker left.
const EX_USAGE: u8 = 64;
const EX_NOINPUT: u8 = 66;
const EX_UNAVAILABLE: u8 = 69;
const EX_SOFTWARE: u8 = 70;

/// Orders waiting for the training thread; the daemon never has more than a few outstanding.
const QUEUED_ORDERS: usize = 64;

fn main() -> ExitCode {
    let config = match Config::try_parse() {
        Ok(config) => config,
        Err(error) => {
            let usage = error.use_stderr();
            let _ = error.print();
            return if usage { EX_USAGE.into() } else { ExitCode::SUCCESS };
        }
    };
    start_logging(config.log);
    // The data's files stay open, and every peer is a socket.
    reknit_client::allow_files();
    reknit_client::outlive_full_files();
    let plane = match HostPlane::new(&config.node, &config.data_ip.to_string()) {
        Ok(plane) => Arc::new(plane),
        Err(error) => {
            last_words(&format!("the data plane cannot listen: {error}"));
            return EX_UNAVAILABLE.into();
        }
    };
    match serve(&config, plane) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            last_words(&error.to_string());
            match error {
                RankError::Corpus(_) => EX_NOINPUT.into(),
                RankError::Refused(_) => EX_UNAVAILABLE.into(),
                RankError::Plane(_)
                | RankError::Reshard(_)
                | RankError::Arrival(_)
                | RankError::Shard(_)
                | RankError::Load(_)
                | RankError::Batch(_) => EX_SOFTWARE.into(),
            }
        }
    }
}

/// Why it leaves, in one plain line and as its last: the agent passes it on. A full disk must not change the exit status.
fn last_words(why: &str) {
    let _ = writeln!(std::io::stderr(), "reknit-worker: {why}");
}

/// The session runs on a thread of its own, so that a step never delays it; training runs here.
fn serve(config: &Config, plane: Arc<HostPlane>) -> Result<(), RankError> {
    let status = Arc::new(Status::default());
    let outbox = Arc::new(Outbox::default());
    let aborts = Arc::new(Aborts::new(Arc::<HostPlane>::clone(&plane)));
    let summons = Arc::new(Summons::default());
    let (orders, inbox) = std::sync::mpsc::sync_channel(QUEUED_ORDERS);
    let session = Session {
        daemons: config.daemons.clone(),
        job: config.job.clone(),
        worker: config.worker(),
        node: config.node(),
        endpoint: plane.endpoint(),
        status: Arc::clone(&status),
        aborts: Arc::clone(&aborts),
        outbox: Arc::clone(&outbox),
        summons: Arc::clone(&summons),
        orders,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| RankError::Refused(format!("cannot start the session's runtime: {error}")))?;
    let serving = std::thread::Builder::new()
        .name("session".to_owned())
        .spawn(move || runtime.block_on(session.run()))
        .map_err(|error| RankError::Refused(format!("cannot start the session's thread: {error}")))?;
    let threads = Team::new(config.threads as usize).map_err(|error| {
        RankError::Refused(format!("the system gives no threads to compute with: {error}"))
    })?;
    let desk = Desk { worker: config.worker(), plane, aborts, status, outbox, threads, summons };
    let result = control::run(&desk, &inbox);
    // The process ends with this thread; the session's thread has nothing left to save.
    drop((inbox, serving));
    result
}

fn start_logging(format: LogFormat) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // It would panic on a full disk.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Human => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
}
