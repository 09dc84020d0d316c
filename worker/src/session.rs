//! The session with the daemon: carries orders and reports, and is opened again for as long as the worker lives.
//!
//! Training does not need it between changes: while it is down, the training thread goes on.

use crate::abort::Aborts;
use crate::convert;
use crate::messages::{Order, Report, Timeouts};
use crate::status::Status;
use reknit_client::{Daemons, Next, leader};
use reknit_layout::{Epoch, NodeName, WorkerKey};
use reknit_plane::{AbortReason, Endpoint};
use reknit_proto::v1::worker_client::WorkerClient;
use reknit_proto::v1::{WorkerOrder, WorkerReport, worker_order};
use std::collections::VecDeque;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tracing::{debug, info, warn};

/// Reports kept while the daemon is away. Only committed steps are worth keeping: the next Hello tells the rest.
const KEPT_REPORTS: usize = 4096;
const PLAN_BYTES: usize = 64 << 20;
const RETRY: Duration = Duration::from_millis(20);
const RETRY_LIMIT: Duration = Duration::from_secs(1);
/// From the connection to the daemon's welcome.
const WELCOME: Duration = Duration::from_secs(3);

/// Reports on their way to the daemon. Pushing never blocks training; beyond [`KEPT_REPORTS`] the oldest go.
#[derive(Debug, Default)]
pub struct Outbox {
    reports: Mutex<VecDeque<Report>>,
    filled: Notify,
}

impl Outbox {
    pub fn push(&self, report: Report) {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        if reports.len() == KEPT_REPORTS {
            reports.pop_front();
        }
        reports.push_back(report);
        drop(reports);
        self.filled.notify_one();
    }

    fn pop(&self) -> Option<Report> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Before a Hello: forgets what the Hello will tell.
    fn keep_committed_steps(&self) {
        self.reports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|report| matches!(report, Report::Committed(_)));
    }
}

/// Who talks to which daemon.
#[derive(Debug)]
pub struct Session {
    pub daemons: Daemons,
    pub job: String,
    pub worker: WorkerKey,
    pub node: NodeName,
    pub endpoint: Endpoint,
    pub status: Arc<Status>,
    pub aborts: Arc<Aborts>,
    pub outbox: Arc<Outbox>,
    pub orders: SyncSender<Order>,
}

#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error(transparent)]
    Transport(#[from] tonic::transport::Error),
    #[error("{}", .0.message())]
    Status(#[from] tonic::Status),
    #[error("the daemon ended the session")]
    Ended,
    #[error("the daemon did not answer the hello")]
    NoWelcome,
    #[error("it does not know that it leads no more")]
    Stale,
    #[error("the training thread does not take orders")]
    Stuck,
    #[error("an order cannot be understood: {0}")]
    Convert(#[from] convert::ConvertError),
    /// The training thread is gone: the process is about to end.
    #[error("the worker is ending")]
    Over,
}

impl SessionError {
    /// Where the daemon says that the leader is.
    fn leader(&self) -> Option<&str> {
        match self {
            Self::Status(status) => leader(status),
            Self::Transport(_)
            | Self::Ended
            | Self::NoWelcome
            | Self::Stale
            | Self::Stuck
            | Self::Convert(_)
            | Self::Over => None,
        }
    }
}

impl Session {
    /// Serves until the training thread ends.
    pub async fn run(self) {
        let mut daemons = self.daemons.clone();
        let mut wait = RETRY;
        loop {
            let mut welcomed = false;
            let error = match self.serve(&mut daemons, &mut welcomed).await {
                Ok(never) => match never {},
                Err(SessionError::Over) => return,
                Err(error) => error,
            };
            warn!(daemon = daemons.address(), %error, "no session with the daemon; training goes on");
            if welcomed {
                wait = RETRY;
            }
            match daemons.failed(error.leader()) {
                Next::AtOnce => {}
                Next::AfterAPause => {
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(RETRY_LIMIT);
                }
            }
        }
    }

    async fn serve(
        &self,
        daemons: &mut Daemons,
        welcomed: &mut bool,
    ) -> Result<std::convert::Infallible, SessionError> {
        let channel = daemons.endpoint().connect().await?;
        let mut client = WorkerClient::new(channel).max_decoding_message_size(PLAN_BYTES);
        let (reports, stream) = mpsc::channel::<WorkerReport>(256);
        self.outbox.keep_committed_steps();
        let state = self.status.state();
        let hello =
            convert::hello(&self.job, &self.worker, &self.node, &self.endpoint, std::process::id(), &state);
        reports.try_send(hello).map_err(|_| SessionError::Ended)?;
        let welcome_by = Instant::now() + WELCOME;
        let opened = timeout_at(welcome_by, client.session(ReceiverStream::new(stream))).await;
        let mut orders = opened.map_err(|_| SessionError::NoWelcome)??.into_inner();
        info!(daemon = daemons.address(), "session open");

        let mut progress = tokio::time::interval(Duration::from_millis(100));
        progress.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        // An operation's wait is looked at when it has lasted for the stall time, twice that, and so on.
        let mut stall = Duration::from_secs(1);
        let mut look = Instant::now() + stall;
        loop {
            // A daemon that leads no more gets nothing that the next one should hear.
            while *welcomed && let Some(report) = self.outbox.pop() {
                let report = convert::report(&self.job, report);
                reports.send(report).await.map_err(|_| SessionError::Ended)?;
            }
            tokio::select! {
                order = orders.message() => {
                    let order = order?.ok_or(SessionError::Ended)?;
                    if let Some(worker_order::Order::Welcome(welcome)) = &order.order
                        && !daemons.welcomed(welcome.term)
                    {
                        return Err(SessionError::Stale);
                    }
                    if let Some(timeouts) = self.take(order)? {
                        *welcomed = true;
                        stall = timeouts.stall;
                        look = Instant::now() + stall;
                        progress = tokio::time::interval(timeouts.progress);
                        progress.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
                    }
                }
                () = self.outbox.filled.notified() => {}
                () = sleep_until(welcome_by), if !*welcomed => return Err(SessionError::NoWelcome),
                _ = progress.tick() => self.tell_progress(&reports).await?,
                () = sleep_until(look) => {
                    let waiting = self.status.pace().waiting().unwrap_or_default();
                    if waiting >= stall {
                        self.tell_progress(&reports).await?;
                    }
                    look = Instant::now() + until_multiple(waiting, stall);
                }
            }
        }
    }

    /// While training: a stuck worker tells whom it waits for.
    async fn tell_progress(&self, reports: &mpsc::Sender<WorkerReport>) -> Result<(), SessionError> {
        let Some((epoch, step, computed)) = self.status.trained() else { return Ok(()) };
        let activity = self.status.pace().activity();
        let report = convert::progress(&self.job, epoch, step, computed, &activity);
        reports.send(report).await.map_err(|_| SessionError::Ended)
    }

    /// Acts at once on what must reach a training thread that sits in a collective, then hands the order over.
    /// Returns the timeouts that come with a welcome.
    fn take(&self, order: WorkerOrder) -> Result<Option<Timeouts>, SessionError> {
        let order = convert::order(order)?;
        debug!(?order, "order");
        let mut welcome = None;
        match &order {
            Order::Welcome { timeouts, .. } => welcome = Some(*timeouts),
            Order::CloseEpoch { epoch, .. } => self.aborts.close(*epoch, AbortReason::EpochClosed),
            Order::Pause { epoch } => self.status.ask_pause(*epoch),
            Order::Stop { .. } => self.aborts.close(Epoch(u64::MAX), AbortReason::Leaving),
            Order::Prepare(_) | Order::Resume { .. } => {}
        }
        self.orders.try_send(order).map_err(|error| match error {
            TrySendError::Full(_) => SessionError::Stuck,
            TrySendError::Disconnected(_) => SessionError::Over,
        })?;
        Ok(welcome)
    }
}

/// The time left until the wait is the next whole multiple of `stall`.
fn until_multiple(waiting: Duration, stall: Duration) -> Duration {
    let over = waiting.as_micros() % stall.as_micros().max(1);
    stall.saturating_sub(Duration::from_micros(over as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_looked_at_when_it_is_a_multiple_of_the_stall_time() {
        let left = |waiting| until_multiple(Duration::from_millis(waiting), Duration::from_millis(250));
        let looks = [0, 1, 249, 250, 251, 700].map(|waiting| left(waiting).as_millis());
        assert_eq!(looks, [250, 249, 1, 250, 249, 50]);
    }
}
