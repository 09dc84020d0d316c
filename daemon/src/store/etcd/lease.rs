//! Keeps the lease that leadership hangs on.

use super::connection::Connection;
use super::election::Leadership;
use crate::store::StoreError;
use etcd_client::{Client, LeaseKeepAliveStream, LeaseKeeper};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
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
    /// Somebody deleted or overwrote the key that the leadership hangs on: another daemon leads, or may.
    KeyGone,
    /// etcd did not confirm it in time, so it may have ended.
    Unconfirmed,
}

impl fmt::Display for Validity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Valid => "the lease is valid",
            Self::Ended => "the lease has ended",
            Self::KeyGone => "somebody deleted or overwrote the leader's key in etcd",
            Self::Unconfirmed => "etcd did not confirm the lease in time",
        })
    }
}

/// Keeps a lease on a thread of its own, which nothing else can keep waiting, until it is stopped or dropped.
#[derive(Debug)]
pub(super) struct Keeper {
    confirmed: Arc<Confirmed>,
    /// Once this daemon leads.
    leadership: Arc<OnceLock<Leadership>>,
    stop: Notifier,
}

/// Until when etcd has confirmed the lease, and the leader's key with it.
#[derive(Debug)]
struct Confirmed {
    began: Instant,
    /// Since then.
    microseconds: AtomicU64,
}

impl Confirmed {
    fn until(&self) -> Instant {
        self.began + Duration::from_micros(self.microseconds.load(Ordering::Acquire))
    }

    fn set(&self, until: Instant) {
        let since = until.saturating_duration_since(self.began).as_micros();
        self.microseconds.store(since as u64, Ordering::Release);
    }
}

type Notifier = watch::Sender<bool>;

impl Keeper {
    /// `granted`: just before the lease was asked for.
    pub(super) fn start(
        connection: Connection,
        lease: i64,
        granted: Instant,
    ) -> Result<(Self, watch::Receiver<Validity>), StoreError> {
        let failed = |source| StoreError::Io { place: "the thread that keeps the lease".to_owned(), source };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let confirmed = Arc::new(Confirmed { began: granted, microseconds: AtomicU64::new(0) });
        confirmed.set(granted + connection.lease_time);
        let (told, validity) = watch::channel(Validity::Valid);
        let (stop, mut stopped) = watch::channel(false);
        let leadership = Arc::new(OnceLock::new());
        let (shared, key) = (confirmed.clone(), leadership.clone());
        let work = move || {
            runtime.block_on(async {
                tokio::select! {
                    () = keep_lease(&connection, lease, &key, &shared, told) => {}
                    // An error says that the keeper was dropped.
                    _ = stopped.wait_for(|stop| *stop) => {}
                }
            });
        };
        std::thread::Builder::new().name("lease".to_owned()).spawn(work).map_err(failed)?;
        Ok((Self { confirmed, leadership, stop }, validity))
    }

    /// From now on the lease alone is not enough: the leader's key must be there as it was made.
    pub(super) fn watch_key(&self, leadership: &Leadership) {
        // It is won once.
        let _ = self.leadership.set(leadership.clone());
    }

    pub(super) fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// The lease runs for sure: etcd has said so for this time.
    pub(super) fn confirmed(&self, now: Instant) -> bool {
        now < self.confirmed.until()
    }
}

/// Runs until the lease may have ended, and says so. Each confirmation counts from when it was asked for: the
/// lease may end later than believed here, never earlier.
async fn keep_lease(
    connection: &Connection,
    lease: i64,
    leadership: &OnceLock<Leadership>,
    confirmed: &Confirmed,
    told: watch::Sender<Validity>,
) {
    let lease_time = connection.lease_time;
    let mut valid_until = confirmed.until();
    let connected = timeout_at(valid_until, connection.patient()).await;
    let mut client = match connected.unwrap_or_else(|_| Err(connection.place.silent())) {
        Ok(client) => client,
        Err(error) => {
            tracing::error!(%error, "the lease cannot be kept");
            let _ = told.send(Validity::Unconfirmed);
            return;
        }
    };
    let mut stream = None;
    let verdict = loop {
        let asked = Instant::now();
        let patience = valid_until.min(asked + lease_time / 3);
        let answer = timeout_at(patience, confirm(&mut client, lease, leadership.get(), &mut stream)).await;
        match answer {
            // A process that was stopped may read an old answer first.
            _ if Instant::now() >= valid_until => break Validity::Unconfirmed,
            Ok(Ok(Validity::Valid)) => {
                valid_until = asked + lease_time;
                confirmed.set(valid_until);
                sleep(lease_time / 3).await;
            }
            Ok(Ok(ended)) => break ended,
            Ok(Err(error)) => {
                let problem = connection.place.problem(&error);
                connection.complain("the lease was not confirmed", &problem);
                stream = None;
                sleep(RETRY_WAIT).await;
            }
            // One member may be silent: the next try opens a new stream, to another if need be.
            Err(_) => stream = None,
        }
    };
    confirmed.set(confirmed.began);
    // Nobody listens when the store is gone already.
    let _ = told.send(verdict);
}

/// Asks once for the lease, over a stream that is opened again when it breaks, and then for the leader's key.
async fn confirm(
    client: &mut Client,
    lease: i64,
    leadership: Option<&Leadership>,
    stream: &mut Option<(LeaseKeeper, LeaseKeepAliveStream)>,
) -> Result<Validity, etcd_client::Error> {
    let (keeper, answers) = match stream {
        Some(open) => open,
        None => stream.insert(client.lease_keep_alive(lease).await?),
    };
    keeper.keep_alive().await?;
    match answers.message().await? {
        Some(answer) if answer.ttl() > 0 => {}
        Some(_) => return Ok(Validity::Ended),
        None => return Err(etcd_client::Error::LeaseKeepAliveError("the stream ended".to_owned())),
    }
    let Some(leader) = leadership else { return Ok(Validity::Valid) };
    let found = client.get(leader.key.clone(), None).await?;
    let holds = found.kvs().first().is_some_and(|kv| leader.is_held_by(kv));
    Ok(if holds { Validity::Valid } else { Validity::KeyGone })
}
