//! The session with the daemon: opened, and opened again for as long as the agent lives.

use crate::{outbox, workers};
use reknit_client::{Daemons, Next, leader, root_cause};
use reknit_proto::v1::agent_client::AgentClient;
use reknit_proto::v1::agent_order::Order;
use reknit_proto::v1::{AgentOrder, AgentReport};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};
use tracing::{info, warn};

/// From the opened stream to the daemon's welcome.
const WELCOME: Duration = Duration::from_secs(3);
const RETRY: Duration = Duration::from_millis(50);
const RETRY_LIMIT: Duration = Duration::from_secs(1);
/// Reports waiting for the wire. A session that falls further behind is given up and opened anew, so the hello and all
/// that follows it must fit: a daemon that was away for long would never hear of this node again.
const QUEUED_REPORTS: usize = 1024 + outbox::KEPT + workers::ENDS_KEPT;

/// What the session tells.
#[derive(Debug)]
pub(crate) enum SessionNews {
    /// Reports go here from now on, the hello first.
    Opening(mpsc::Sender<AgentReport>),
    Order(Order),
    Closed,
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("cannot connect: {}", root_cause(.0))]
    Connect(#[from] tonic::transport::Error),
    #[error("{}", .0.message())]
    Status(#[from] Status),
    #[error("the daemon did not answer the hello")]
    NoWelcome,
    #[error("the daemon closed it")]
    Closed,
    #[error("it does not know that it leads no more")]
    Stale,
    #[error("the daemon does not keep up with the reports")]
    Reopened,
    #[error("the agent stops")]
    Stopping,
}

impl End {
    /// Where the daemon says that the leader is.
    fn leader(&self) -> Option<&str> {
        match self {
            Self::Status(status) => leader(status),
            Self::Connect(_)
            | Self::NoWelcome
            | Self::Closed
            | Self::Stale
            | Self::Reopened
            | Self::Stopping => None,
        }
    }
}

/// Runs until nobody listens. `reopen` ends the present session so that the hello is said again.
pub(crate) async fn keep(mut daemons: Daemons, news: mpsc::Sender<SessionNews>, reopen: &Notify) {
    let mut delay = RETRY;
    let mut told = String::new();
    loop {
        let mut welcomed = false;
        let began = Instant::now();
        let end = match run(&mut daemons, &news, reopen, &mut welcomed).await {
            Ok(never) => match never {},
            Err(end) => end,
        };
        // One that ends at once will end at once again, such as that of a second agent under one name.
        if welcomed && began.elapsed() > RETRY_LIMIT {
            delay = RETRY;
            told.clear();
        }
        let why = format!("{}: {end}", daemons.address());
        if why != told {
            warn!(why, "no session with the daemon; trying again");
            told = why;
        }
        if news.send(SessionNews::Closed).await.is_err() {
            return;
        }
        match daemons.failed(end.leader()) {
            Next::AtOnce => {}
            Next::AfterAPause => {
                sleep(delay).await;
                delay = (delay * 2).min(RETRY_LIMIT);
            }
        }
    }
}

async fn run(
    daemons: &mut Daemons,
    news: &mpsc::Sender<SessionNews>,
    reopen: &Notify,
    welcomed: &mut bool,
) -> Result<std::convert::Infallible, End> {
    let channel = daemons.endpoint().connect().await?;
    let (reports, queued) = mpsc::channel(QUEUED_REPORTS);
    let opening = SessionNews::Opening(reports);
    news.send(opening).await.map_err(|_| End::Stopping)?;
    let mut orders = timeout(WELCOME, open(channel, queued)).await.map_err(|_| End::NoWelcome)??;
    let mut patience = WELCOME;
    loop {
        let order = tokio::select! {
            order = timeout(patience, orders.message()) => order.map_err(|_| End::NoWelcome)??,
            () = reopen.notified() => return Err(End::Reopened),
        };
        let order = order.ok_or(End::Closed)?;
        let Some(order) = order.order else {
            // An order of a newer daemon.
            continue;
        };
        if let Order::Welcome(welcome) = &order {
            if !daemons.welcomed(welcome.term) {
                return Err(End::Stale);
            }
            info!(daemon = daemons.address(), term = welcome.term, "session with the daemon open");
            *welcomed = true;
            // From here on the connection's own keep-alive judges.
            patience = Duration::MAX;
        }
        let order = SessionNews::Order(order);
        news.send(order).await.map_err(|_| End::Stopping)?;
    }
}

async fn open(
    channel: Channel,
    queued: mpsc::Receiver<AgentReport>,
) -> Result<Streaming<AgentOrder>, Status> {
    let stream = ReceiverStream::new(queued);
    Ok(AgentClient::new(channel).session(stream).await?.into_inner())
}
