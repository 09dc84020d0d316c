//! What the daemon's process costs, from outside, and how long its loop lets a caller wait.

use crate::failure::Failure;
use reknit_proto::v1::GetJobRequest;
use reknit_proto::v1::admin_client::AdminClient;
use std::fs;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// Between two askings.
const ASK: Duration = Duration::from_millis(50);

/// Time on a core of all of its threads.
pub(super) fn cpu_time(pid: u32) -> Result<Duration, Failure> {
    let read = || -> std::io::Result<u64> {
        let mut sum = 0;
        for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
            // A thread may have ended since.
            let text = fs::read_to_string(thread?.path().join("schedstat")).unwrap_or_default();
            sum += text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
        }
        Ok(sum)
    };
    read().map(Duration::from_nanos).map_err(Failure::failed("the daemon's CPU time"))
}

/// A value of /proc/PID/status in bytes, such as `VmRSS`.
pub(super) fn memory(pid: u32, name: &str) -> Result<u64, Failure> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"));
    let text = text.map_err(Failure::failed("the daemon's memory"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| Failure::Failed(format!("/proc/{pid}/status has no {name}")))
}

/// Asks the daemon's loop something small again and again: the answer waits for every report that came before.
#[derive(Debug)]
pub(super) struct Asker {
    waits: Arc<Mutex<Vec<Duration>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Asker {
    pub(super) fn start(channel: Channel) -> Self {
        let waits = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&waits);
        let task = tokio::spawn(async move {
            let mut admin = AdminClient::new(channel);
            loop {
                let start = Instant::now();
                // There is no such job: the loop says so.
                let _ = admin.get_job(GetJobRequest { name: "none".to_owned() }).await;
                seen.lock().unwrap_or_else(PoisonError::into_inner).push(start.elapsed());
                tokio::time::sleep(ASK).await;
            }
        });
        Self { waits, task }
    }

    /// How long the answers took since the last call.
    pub(super) fn take(&self) -> Vec<Duration> {
        std::mem::take(&mut self.waits.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.task.abort();
    }
}
