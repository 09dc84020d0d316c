//! The session with the daemon: opened, and opened again for as long as the agent lives.

use crate::{outbox, workers};
use reknit_client::{Daemons, Dialer, Ended};
use reknit_proto::v1::agent_client::AgentClient;
use reknit_proto::v1::agent_order::Order;
use reknit_proto::v1::{AgentOrder, AgentReport};
use std::convert::Infallible;
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;

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

/// Runs until nobody listens. `reopen` ends the present session so that the hello is said again.
pub(crate) async fn keep(daemons: Daemons, news: mpsc::Sender<SessionNews>, reopen: &Notify) {
    let mut dialer = Dialer::new(daemons);
    loop {
        let reopened = async {
            reopen.notified().await;
            Ended::Here("the daemon does not keep up with the reports".to_owned())
        };
        let ended = tokio::select! {
            ended = serve(&mut dialer, &news) => match ended {
                Ok(never) => match never {},
                Err(ended) => ended,
            },
            ended = reopened => ended,
        };
        if news.send(SessionNews::Closed).await.is_err() {
            return;
        }
        dialer.retry(&ended).await;
    }
}

async fn serve(dialer: &mut Dialer, news: &mpsc::Sender<SessionNews>) -> Result<Infallible, Ended> {
    let channel = dialer.connect().await?;
    let (reports, queued) = mpsc::channel(QUEUED_REPORTS);
    news.send(SessionNews::Opening(reports)).await.map_err(|_| Ended::Over)?;
    let mut client = AgentClient::new(channel);
    let (welcome, mut orders) = dialer.open(client.session(ReceiverStream::new(queued))).await?;
    tell(news, welcome).await?;
    // The connection's own keep-alive judges whether the daemon is there.
    while let Some(order) = orders.message().await? {
        tell(news, order).await?;
    }
    Err(Ended::Closed)
}

async fn tell(news: &mpsc::Sender<SessionNews>, order: AgentOrder) -> Result<(), Ended> {
    match order.order {
        Some(order) => news.send(SessionNews::Order(order)).await.map_err(|_| Ended::Over),
        // An order of a newer daemon.
        None => Ok(()),
    }
}
