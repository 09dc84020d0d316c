//! Keeps the lease that leadership hangs on.

use etcd_client::{LeaseClient, LeaseKeepAliveStream, LeaseKeeper};
use std::fmt;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

const RETRY_WAIT: Duration = Duration::from_millis(100);

/// Whether this daemon may still believe that it leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Validity {
    Valid,
    /// etcd said that the lease has ended.
    Ended,
    /// etcd did not confirm it in time, so it may have ended.
    Unconfirmed,
}

impl fmt::Display for Validity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Valid => "the lease is valid",
            Self::Ended => "the lease has ended",
            Self::Unconfirmed => "etcd did not confirm the lease in time",
        })
    }
}

/// Runs until the lease may have ended, and says so. Each confirmation counts from when it was asked for: the
/// lease may end later than believed here, never earlier.
pub(super) async fn keep_lease(
    mut client: LeaseClient,
    lease: i64,
    lease_time: Duration,
    granted: Instant,
    told: watch::Sender<Validity>,
) {
    let mut valid_until = granted + lease_time;
    let mut stream = None;
    let verdict = loop {
        let asked = Instant::now();
        let patience = valid_until.min(asked + lease_time / 3);
        let answer = timeout_at(patience, confirm(&mut client, lease, &mut stream)).await;
        match answer {
            // A process that was stopped may read an old answer first.
            _ if Instant::now() >= valid_until => break Validity::Unconfirmed,
            Ok(Ok(true)) => {
                valid_until = asked + lease_time;
                sleep(lease_time / 3).await;
            }
            Ok(Ok(false)) => break Validity::Ended,
            Ok(Err(error)) => {
                tracing::warn!(%error, "the lease was not confirmed; trying again");
                stream = None;
                sleep(RETRY_WAIT).await;
            }
            // One member may be silent: the next try opens a new stream, to another if need be.
            Err(_) => stream = None,
        }
    };
    // Nobody listens when the store is gone already.
    let _ = told.send(verdict);
}

/// Asks once, over a stream that is opened again when it breaks. False: there is no such lease any more.
async fn confirm(
    client: &mut LeaseClient,
    lease: i64,
    stream: &mut Option<(LeaseKeeper, LeaseKeepAliveStream)>,
) -> Result<bool, etcd_client::Error> {
    let (keeper, answers) = match stream {
        Some(open) => open,
        None => stream.insert(client.keep_alive(lease).await?),
    };
    keeper.keep_alive().await?;
    match answers.message().await? {
        Some(answer) => Ok(answer.ttl() > 0),
        None => Err(etcd_client::Error::LeaseKeepAliveError("the stream ended".to_owned())),
    }
}
