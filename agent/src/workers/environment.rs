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

/// Settings of the C library's allocator. Blocks above 640 KiB go back to the system when they are freed, also after the
/// first: a worker's state changes at each reshard, and the library would keep what the old one took. Products pack matrices
/// into smaller ones, which come and go all the time: they stay. The largest are made of huge pages, where a first touch
/// costs a quarter.
const MALLOC: &str =
    "glibc.malloc.mmap_threshold=655360:glibc.malloc.trim_threshold=1310720:glibc.malloc.hugetlb=1";

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
        ("GLIBC_TUNABLES", MALLOC.to_owned()),
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
