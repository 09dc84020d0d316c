//! The session with the daemon: carries orders and reports, and is opened again for as long as the worker lives.
//!
//! Training does not need it between changes: while it is down, the training thread goes on.

use crate::abort::Aborts;
use crate::ahead::Summons;
use crate::convert;
use crate::messages::{Order, Report, Timeouts};
use crate::status::Status;
use reknit_client::{Daemons, Dialer, Ended};
use reknit_layout::{CheckpointId, Epoch, NodeName, WorkerKey};
use reknit_plane::{AbortReason, Endpoint};
use reknit_proto::v1::worker_client::WorkerClient;
use reknit_proto::v1::{WorkerOrder, WorkerReport};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tracing::debug;

/// Reports kept while the daemon is away. Only committed steps are worth keeping: the next Hello tells the rest.
const KEPT_REPORTS: usize = 4096;
const PLAN_BYTES: usize = 64 << 20;

/// Reports on their way to the daemon. Pushing never blocks training; beyond [`KEPT_REPORTS`] the oldest go.
#[derive(Debug, Default)]
pub struct Outbox {
    reports: Mutex<VecDeque<Report>>,
    /// As last told: whoever is told of a session must hear it again.
    checkpoints: Mutex<(Vec<CheckpointId>, u64)>,
    filled: Notify,
}

impl Outbox {
    pub fn push(&self, report: Report) {
        if let Report::Checkpoints { ids, written_us } = &report {
            *self.checkpoints.lock().unwrap_or_else(PoisonError::into_inner) = (ids.clone(), *written_us);
        }
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        if reports.len() == KEPT_REPORTS {
            reports.pop_front();
        }
        reports.push_back(report);
        drop(reports);
        self.filled.notify_one();
    }

    /// The oldest of them.
    pub fn pop(&self) -> Option<Report> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Before a Hello: forgets what the Hello will tell. What it does not tell is said again.
    fn keep_committed_steps(&self) {
        let (ids, written_us) = self.checkpoints.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.retain(|report| matches!(report, Report::Committed(_)));
        if !ids.is_empty() {
            reports.push_back(Report::Checkpoints { ids, written_us });
        }
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
    pub summons: Arc<Summons>,
    pub orders: SyncSender<Order>,
}

impl Session {
    /// Serves until the training thread ends or the worker is told to stop.
    pub async fn run(self) {
        let mut dialer = Dialer::new(self.daemons.clone());
        for connection in 1.. {
            match self.serve(&mut dialer, connection).await {
                Ok(never) => match never {},
                Err(Ended::Over) => return,
                Err(ended) => dialer.retry(&ended).await,
            }
        }
    }

    async fn serve(&self, dialer: &mut Dialer, connection: u64) -> Result<Infallible, Ended> {
        let channel = dialer.connect().await?;
        let mut client = WorkerClient::new(channel).max_decoding_message_size(PLAN_BYTES);
        let (reports, stream) = mpsc::channel::<WorkerReport>(256);
        self.outbox.keep_committed_steps();
        let state = self.status.state();
        let Self { job, worker, node, endpoint, .. } = self;
        let hello = convert::hello(job, worker, node, endpoint, std::process::id(), connection, &state);
        reports.try_send(hello).map_err(|_| Ended::Closed)?;
        let (first, mut orders) = dialer.open(client.session(ReceiverStream::new(stream))).await?;
        // Without a welcome it is the order to stop.
        let Timeouts { progress, stall, .. } = self.take(first)?.ok_or(Ended::Over)?;

        // In whatever phase, so that the daemon knows that this worker says so.
        reports.send(convert::alive()).await.map_err(|_| Ended::Closed)?;
        let mut progress = interval(progress);
        progress.set_missed_tick_behavior(MissedTickBehavior::Skip);
        // An operation's wait is told of when it has lasted for the stall time, and then each time half of that has passed:
        // where a hang lies between two such times, it is seen soon.
        let pause = stall / 2;
        let mut look = Instant::now() + pause;
        loop {
            while let Some(report) = self.outbox.pop() {
                let report = convert::report(&self.job, report);
                reports.send(report).await.map_err(|_| Ended::Closed)?;
            }
            tokio::select! {
                order = orders.message() => {
                    self.take(order?.ok_or(Ended::Closed)?)?;
                }
                () = self.outbox.filled.notified() => {}
                _ = progress.tick() => self.tell(&reports).await?,
                () = sleep_until(look) => {
                    let waiting = self.status.pace().waiting().unwrap_or_default();
                    if waiting >= stall {
                        self.tell(&reports).await?;
                    }
                    look = Instant::now() + until_multiple(waiting, pause);
                }
            }
        }
    }

    /// Where training is, and for whom a stuck worker waits; else only that it lives.
    async fn tell(&self, reports: &mpsc::Sender<WorkerReport>) -> Result<(), Ended> {
        let report = self.status.trained().map_or_else(convert::alive, |(epoch, step, computed)| {
            convert::progress(&self.job, epoch, step, computed, &self.status.pace().activity())
        });
        reports.send(report).await.map_err(|_| Ended::Closed)
    }

    /// Acts at once on what must reach a training thread that sits in a collective, then hands the order over.
    /// Returns the timeouts that come with a welcome.
    fn take(&self, order: WorkerOrder) -> Result<Option<Timeouts>, Ended> {
        let order = convert::order(order)
            .map_err(|error| Ended::Here(format!("an order cannot be understood: {error}")))?;
        debug!(?order, "order");
        let mut welcome = None;
        match &order {
            Order::Welcome { timeouts, .. } => welcome = Some(*timeouts),
            Order::CloseEpoch { epoch, .. } => self.aborts.close(*epoch, AbortReason::EpochClosed),
            Order::Pause { epoch } => self.status.ask_pause(*epoch),
            Order::Stop { .. } => self.aborts.close(Epoch(u64::MAX), AbortReason::Leaving),
            Order::Join(prepare) => self.summons.call(Arc::clone(prepare)),
            Order::Prepare(_) | Order::Resume { .. } => {}
        }
        self.orders.try_send(order).map_err(|error| match error {
            TrySendError::Full(_) => Ended::Here("the training thread does not take orders".to_owned()),
            TrySendError::Disconnected(_) => Ended::Over,
        })?;
        Ok(welcome)
    }
}

/// The time left until the wait is the next whole multiple of `pause`.
fn until_multiple(waiting: Duration, pause: Duration) -> Duration {
    let over = waiting.as_micros() % pause.as_micros().max(1);
    pause.saturating_sub(Duration::from_micros(over as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_looked_at_when_it_is_a_multiple_of_the_pause() {
        let left = |waiting| until_multiple(Duration::from_millis(waiting), Duration::from_millis(250));
        let looks = [0, 1, 249, 250, 251, 700].map(|waiting| left(waiting).as_millis());
        assert_eq!(looks, [250, 249, 1, 250, 249, 50]);
    }
}
