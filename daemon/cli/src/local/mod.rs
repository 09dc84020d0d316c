//! A real cluster on this machine for as long as a command runs: what `reknit demo` and `reknit bench recovery` share.

mod cluster;
mod feed;
mod interrupt;
mod phases;
mod record;

pub(crate) use cluster::{Cluster, Ground, Programs};
pub(crate) use feed::{Feed, Woken};
pub(crate) use interrupt::Interrupts;
pub(crate) use phases::Phases;
pub(crate) use record::{Fault, FaultKind, Moment, Record, Standing, degrees_text, median};

use crate::failure::Failure;
use std::time::{SystemTime, UNIX_EPOCH};

/// Makes a cluster, runs `work` on it and ends it, whatever happens. `note` gets what a failed run has to say.
pub(crate) async fn on_cluster<T>(
    ground: Ground,
    interrupts: &mut Interrupts,
    work: impl AsyncFnOnce(&mut Cluster) -> Result<T, Failure>,
    mut note: impl FnMut(&str),
) -> Result<T, Failure> {
    let mut cluster = Cluster::new(Programs::find()?, ground)?;
    let result = tokio::select! {
        result = work(&mut cluster) => result,
        failure = interrupts.next() => Err(failure),
    };
    if let Err(Failure::Failed(_)) = &result {
        cluster.last_words(5).iter().for_each(|line| note(line));
    }
    let hurried = tokio::select! {
        () = cluster.stop() => false,
        _ = interrupts.next() => true,
    };
    if hurried {
        cluster.kill();
    }
    match result {
        Err(Failure::Failed(problem)) => {
            let logs = cluster.keep_logs();
            Err(Failure::Failed(format!("{problem}; logs are in {}", logs.display())))
        }
        result => result,
    }
}

/// Microseconds since the Unix epoch, as in the daemon's incidents.
pub(crate) fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_micros() as u64
}
