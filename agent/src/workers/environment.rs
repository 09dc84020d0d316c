//! What a worker finds in its environment. Pure.
//!
//! The agent's own environment may hold what is nobody else's business: credentials, the service manager's sockets,
//! its own settings. So a worker gets what is listed here, and nothing else.

use super::{WorkerId, WorkerSpec};
use std::ffi::{OsStr, OsString};

/// Marks a worker and all that it starts: the number of the spawn, which no other spawn has.
pub(super) const SPAWN: &str = "REKNIT_SPAWN";

const NAMES: [&str; 13] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "TZ",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "REKNIT_CACHE_DIR",
    "LD_LIBRARY_PATH",
    "RUST_LOG",
    "RUST_BACKTRACE",
];

/// Of the libraries that a worker uses.
const PREFIXES: [&str; 9] = ["LC_", "CUDA_", "NVIDIA_", "NCCL_", "UCX_", "FI_", "OMP_", "OPENBLAS_", "MKL_"];

/// The worker's whole environment.
pub(super) fn of_worker(
    own: impl Iterator<Item = (OsString, OsString)>,
    spec: &WorkerSpec,
    worker: &WorkerId,
    index: u32,
    spawn: &str,
) -> Vec<(OsString, OsString)> {
    let context = [
        // By UUID: indices change with the GPUs that are there.
        ("CUDA_VISIBLE_DEVICES", worker.key.gpu.0.clone()),
        ("REKNIT_NODE", spec.node.clone()),
        ("REKNIT_JOB", worker.job.clone()),
        ("REKNIT_GPU_INDEX", index.to_string()),
        ("REKNIT_WORKER", format!("{}/{}/{}", worker.job, worker.key.gpu, worker.key.incarnation)),
        // Large blocks go back to the system when they are freed, also after the first: a worker makes its state anew at
        // each reshard, and the C library would keep what the old one took. Products pack matrices
        // into smaller ones, which come and go all the time: they stay.
        ("MALLOC_MMAP_THRESHOLD_", (640 << 10).to_string()),
        ("MALLOC_TRIM_THRESHOLD_", (1280 << 10).to_string()),
        (SPAWN, spawn.to_owned()),
    ];
    let inherited = own.filter(|(name, _)| is_passed_on(name) && name != "CUDA_VISIBLE_DEVICES");
    inherited.chain(context.into_iter().map(|(name, value)| (name.into(), value.into()))).collect()
}

fn is_passed_on(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else {
        return false;
    };
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_the_agents_own_is_passed_on() {
        for own in [
            "REKNIT_SIMDRIVER_STATE",
            "REKNIT_DAEMON",
            "REKNIT_STATE_DIR",
            "NOTIFY_SOCKET",
            "WATCHDOG_USEC",
            "LISTEN_FDS",
            "CREDENTIALS_DIRECTORY",
            "INVOCATION_ID",
            "AWS_SECRET_ACCESS_KEY",
            "LD_PRELOAD",
            "PATHOLOGY",
        ] {
            assert!(!is_passed_on(OsStr::new(own)), "{own}");
        }
        for wanted in ["PATH", "LD_LIBRARY_PATH", "RUST_LOG", "NCCL_DEBUG", "CUDA_CACHE_PATH", "LC_ALL"] {
            assert!(is_passed_on(OsStr::new(wanted)), "{wanted}");
        }
    }
}
