//! The command line and what follows from it.

use crate::check::CheckArguments;
use crate::policy::command::PolicyArguments;
use crate::probe::ProbeArguments;
use crate::workers::{JOURNAL, LogTo, WorkerSpec, connect_journal};
use clap::{Args, Parser, Subcommand, ValueEnum};
use reknit_client::{BadAddress, Daemons};
use std::ffi::OsString;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// For the state folder's lock.
const LOCK_LIMIT: Duration = Duration::from_secs(1);

/// Watches this node's GPUs and runs the workers on them.
#[derive(Debug, Parser)]
#[command(name = "reknit-agent", version)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) run: RunArguments,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// The process that loads NVML; the agent starts it.
    #[command(hide = true)]
    Probe(ProbeArguments),
    /// Look at this node's GPUs for some seconds. Exits with 0 when all are healthy, 1 when something is drained
    /// or predicted, 2 when something is fatal, 3 when nothing can be seen.
    Check(CheckArguments),
    /// Check a policy file, or explain what would happen.
    Policy(PolicyArguments),
}

#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    /// The daemon's address, such as http://127.0.0.1:7400; several, separated by commas, where there are several daemons.
    #[arg(long, env = "REKNIT_DAEMON")]
    daemon: Option<String>,
    /// This node's name.
    #[arg(long, env = "REKNIT_NODE")]
    node: Option<String>,
    /// NVIDIA's management library, or the simulated one.
    #[arg(long, env = "REKNIT_NVML_LIBRARY", default_value = "libnvidia-ml.so.1")]
    nvml_library: PathBuf,
    /// What must outlive the agent: the running workers, the GPUs seen.
    #[arg(long, env = "REKNIT_STATE_DIR", default_value = "/var/lib/reknit/agent")]
    state_dir: PathBuf,
    /// The address of this node at which its workers listen for those of other nodes.
    #[arg(long, env = "REKNIT_DATA_IP", default_value = "127.0.0.1")]
    data_ip: IpAddr,
    /// Threads that each worker computes with on the CPU: at most the node's cores divided by its GPUs.
    #[arg(long, env = "REKNIT_WORKER_THREADS", default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    worker_threads: u32,
    /// The worker program. By default reknit-worker beside this program.
    #[arg(long, env = "REKNIT_WORKER_BINARY")]
    worker_binary: Option<PathBuf>,
    /// Where workers write: files in the state folder's `logs` (the newest 20 of each GPU are kept), the journal, or the
    /// agent's own output. Only with files does the daemon learn a failed worker's last line.
    #[arg(long, env = "REKNIT_WORKER_LOGS", value_enum, default_value = "files")]
    worker_logs: WorkerLogs,
    /// How a GPU's signals are judged, as TOML. By default the built-in policy.
    #[arg(long, env = "REKNIT_POLICY", value_name = "FILE")]
    policy: Option<PathBuf>,
    /// The kernel's log, which tells of XIDs what NVML does not.
    #[arg(long, env = "REKNIT_KMSG", value_name = "PATH", default_value = "/dev/kmsg")]
    kmsg: PathBuf,
    /// How often each GPU is read; what changes slowly, every tenth time.
    #[arg(long, env = "REKNIT_PROBE_INTERVAL_MS", default_value = "1000", value_parser = clap::value_parser!(u64).range(10..=60_000))]
    probe_interval_ms: u64,
    /// Leave the workers running when the agent is told to stop, such as for an upgrade.
    #[arg(long, env = "REKNIT_KEEP_WORKERS", value_parser = clap::builder::FalseyValueParser::new())]
    keep_workers: bool,
    /// How the log is written, to standard error. RUST_LOG filters it.
    #[arg(long, env = "REKNIT_LOG", value_enum, default_value = "human")]
    pub(crate) log: LogFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WorkerLogs {
    Files,
    Journal,
    Inherit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Human,
    Json,
}

impl LogFormat {
    /// As the command line writes it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Human => "human",
            Self::Json => "json",
        }
    }
}

/// A checked configuration.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) daemons: Daemons,
    pub(crate) node: String,
    pub(crate) nvml_library: PathBuf,
    pub(crate) state_dir: PathBuf,
    pub(crate) policy: Option<PathBuf>,
    pub(crate) kmsg: PathBuf,
    pub(crate) probe_interval: Duration,
    pub(crate) keep_workers: bool,
    pub(crate) log: LogFormat,
    pub(crate) worker: WorkerSpec,
    /// Held for as long as the agent runs, so that no other uses the state folder.
    pub(crate) _lock: fs::File,
}

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("{0} is missing: give --daemon and --node; --help tells more")]
    Missing(&'static str),
    #[error("--daemon: {0}")]
    Daemon(#[from] BadAddress),
    #[error("`{0}` is no node name: use letters, digits, `.`, `-` and `_`")]
    Node(String),
    #[error("cannot use the state folder {path}: {source}; give another with --state-dir")]
    StateDir { path: PathBuf, source: std::io::Error },
    #[error("another agent uses the state folder {0}: stop it, or give another with --state-dir")]
    StateDirTaken(PathBuf),
    #[error("there is no worker program at {0}: give its path with --worker-binary")]
    WorkerBinary(PathBuf),
    #[error(
        "there is no journal at {JOURNAL} ({0}): is journald running? write --worker-logs files, or inherit"
    )]
    Journal(std::io::Error),
    #[error("workers of other nodes cannot reach {0}: give one of this node's own addresses with --data-ip")]
    DataIp(IpAddr),
}

impl RunArguments {
    /// The variables that stand for arguments. They are the agent's own, and would confuse its probe.
    pub(crate) fn variables() -> Vec<OsString> {
        let command = Self::augment_args(clap::Command::new("reknit-agent"));
        command.get_arguments().filter_map(|argument| argument.get_env()).map(OsString::from).collect()
    }

    pub(crate) fn check(self) -> Result<Config, ConfigError> {
        let address = self.daemon.ok_or(ConfigError::Missing("--daemon"))?;
        let node = self.node.ok_or(ConfigError::Missing("--node"))?;
        let daemons: Daemons = address.parse()?;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if node.is_empty() || !node.chars().all(plain) {
            return Err(ConfigError::Node(node));
        }
        let binary = match self.worker_binary {
            Some(binary) => binary,
            None => std::env::current_exe().unwrap_or_default().with_file_name("reknit-worker"),
        };
        if !binary.is_file() {
            return Err(ConfigError::WorkerBinary(binary));
        }
        if self.data_ip.is_unspecified() {
            return Err(ConfigError::DataIp(self.data_ip));
        }
        let logs = self.state_dir.join("logs");
        let log_to = match self.worker_logs {
            WorkerLogs::Files => LogTo::Folder(logs.clone()),
            WorkerLogs::Journal => {
                connect_journal(Path::new(JOURNAL)).map_err(ConfigError::Journal)?;
                LogTo::Journal(JOURNAL.into())
            }
            WorkerLogs::Inherit => LogTo::Inherit,
        };
        let lock = lock(&self.state_dir, &logs)?;
        Ok(Config {
            nvml_library: self.nvml_library,
            state_dir: self.state_dir,
            policy: self.policy,
            kmsg: self.kmsg,
            probe_interval: Duration::from_millis(self.probe_interval_ms),
            keep_workers: self.keep_workers,
            log: self.log,
            worker: WorkerSpec {
                binary,
                daemons: daemons.to_string(),
                node: node.clone(),
                data_ip: self.data_ip,
                threads: self.worker_threads,
                logs: log_to,
            },
            daemons,
            node,
            _lock: lock,
        })
    }
}

/// Waits a little: a worker that an agent was starting when it died holds the lock with it, until it has become the
/// worker, and is found by this agent then.
fn lock(state_dir: &Path, logs: &Path) -> Result<fs::File, ConfigError> {
    let failed = |source| ConfigError::StateDir { path: state_dir.to_owned(), source };
    fs::create_dir_all(logs).map_err(failed)?;
    let lock = fs::File::create(state_dir.join("lock")).map_err(failed)?;
    let (tell, locked) = mpsc::channel();
    // It stays where it waits if the lock is never free; the agent ends then.
    thread::spawn(move || {
        let result = lock.lock().map(|()| lock);
        let _nobody_waits = tell.send(result);
    });
    match locked.recv_timeout(LOCK_LIMIT) {
        Ok(result) => result.map_err(failed),
        Err(_) => Err(ConfigError::StateDirTaken(state_dir.to_owned())),
    }
}
