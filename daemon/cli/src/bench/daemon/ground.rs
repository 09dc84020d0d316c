//! What the bench stands on: files, cores, connections, the daemon itself.

use crate::failure::Failure;
use crate::process::Child;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::ffi::OsString;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint, Uri};

/// Connections that are opened at the same time.
pub(super) const OPENING: u32 = 200;
/// Files beside the connections.
const SPARE_FILES: u64 = 128;

/// Both ends of every connection are files: here, and in the daemon, which inherits the limit.
pub(super) fn allow_files(connections: u64) -> Result<(), Failure> {
    let needed = connections + SPARE_FILES;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    if limit.maximum.is_some_and(|maximum| maximum < needed) {
        return Err(Failure::Usage(format!(
            "{connections} connections need {needed} open files and {} are allowed: raise the hard limit (`ulimit -Hn`), or \
             use a larger --share or fewer --agents",
            limit.maximum.unwrap_or_default()
        )));
    }
    let raised = Rlimit { current: Some(needed), maximum: limit.maximum };
    setrlimit(Resource::Nofile, raised).map_err(Failure::failed("the limit of open files"))
}

/// Connections for the workers, a few opened at the same time: more than wait in the queue of a listening socket would
/// be refused.
pub(super) async fn connect(daemon: &Uri, connections: u32) -> Result<Vec<Channel>, Failure> {
    let mut channels = Vec::new();
    while channels.len() < connections as usize {
        let now = (connections as usize - channels.len()).min(OPENING as usize);
        let opening = (0..now).map(|_| {
            let daemon = daemon.clone();
            async move { Endpoint::from(daemon).connect().await }
        });
        for channel in opening.collect::<JoinSet<_>>().join_all().await {
            channels.push(channel.map_err(Failure::failed("a connection for workers"))?);
        }
    }
    Ok(channels)
}

/// On the first core that is allowed to us; afterwards we keep to the others, if there are any.
pub(super) fn start_daemon(dir: &TempDir) -> Result<Child, Failure> {
    let own = std::env::current_exe().map_err(Failure::failed("where this program lies is unknown"))?;
    let program = own.with_file_name("reknitd");
    if !program.is_file() {
        return Err(Failure::Usage(format!("{} is missing: build it with `make build`", program.display())));
    }
    let path = |name: &str| dir.path().join(name).into_os_string();
    let args: Vec<OsString> = vec![
        "--listen".into(),
        "127.0.0.1:0".into(),
        "--state-dir".into(),
        path("daemon"),
        "--ready-file".into(),
        path("ready"),
    ];
    let allowed = sched_getaffinity(None).map_err(Failure::failed("the cores that may be used"))?;
    let mut first = CpuSet::new();
    let mut others = allowed;
    if let Some(core) = (0..CpuSet::MAX_CPU).find(|core| allowed.is_set(*core)) {
        first.set(core);
        others.unset(core);
    }
    // A child keeps to the cores of the thread that starts it.
    let pin = |cores: &CpuSet| sched_setaffinity(None, cores).map_err(Failure::failed("a core of its own"));
    pin(&first)?;
    let log = dir.path().join("daemon.log");
    let child = Child::start("reknitd", &program, &args, &[("RUST_LOG", "info".into())], &log);
    pin(if others.count() > 0 { &others } else { &allowed })?;
    child.map_err(Failure::failed("reknitd does not start"))
}
