//! Sessions with daemons of different terms, over real connections.

#![allow(clippy::unwrap_used)]

use reknit_client::{Dialer, Ended};
use reknit_proto::v1;
use reknit_proto::v1::worker_client::WorkerClient;
use reknit_proto::v1::worker_order::Order;
use reknit_proto::v1::worker_server::{Worker, WorkerServer};
use tokio::net::TcpListener;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

/// Says one thing to whoever opens a session, and no more.
struct Says(Option<Order>);

#[tonic::async_trait]
impl Worker for Says {
    type SessionStream = ReceiverStream<Result<v1::WorkerOrder, Status>>;

    async fn session(
        &self,
        _: Request<Streaming<v1::WorkerReport>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (orders, queued) = tokio::sync::mpsc::channel(1);
        if let Some(order) = self.0.clone() {
            orders.send(Ok(v1::WorkerOrder { order: Some(order) })).await.unwrap();
        }
        Ok(Response::new(ReceiverStream::new(queued)))
    }
}

/// Its address.
async fn daemon(says: Option<Order>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = WorkerServer::new(Says(says));
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    format!("http://{address}")
}

/// The order that each session began with, or why there was none.
async fn sessions(daemons: &[Option<Order>]) -> Vec<Result<Order, String>> {
    let mut addresses = Vec::new();
    for says in daemons {
        addresses.push(daemon(says.clone()).await);
    }
    let mut dialer = Dialer::new(addresses.join(",").parse().unwrap());
    let mut sessions = Vec::new();
    for _ in daemons {
        let mut client = WorkerClient::new(dialer.connect().await.unwrap());
        let opened = dialer.open(client.session(tokio_stream::empty())).await;
        let ended = match opened {
            Ok((first, _orders)) => {
                sessions.push(Ok(first.order.unwrap()));
                Ended::Closed
            }
            Err(ended) => {
                sessions.push(Err(ended.to_string()));
                ended
            }
        };
        dialer.retry(&ended).await;
    }
    sessions
}

fn welcome(term: u64) -> Order {
    Order::Welcome(v1::WorkerWelcome { term, ..v1::WorkerWelcome::default() })
}

fn stop(term: u64) -> Order {
    Order::Stop(v1::Stop { term, ..v1::Stop::default() })
}

const STALE: &str = "it does not know that it leads no more";

#[tokio::test]
async fn an_older_leadership_is_left_and_a_later_one_followed() {
    let opened = sessions(&[Some(welcome(7)), Some(welcome(6)), Some(welcome(7)), Some(welcome(8))]).await;
    assert_eq!(opened, [Ok(welcome(7)), Err(STALE.to_owned()), Ok(welcome(7)), Ok(welcome(8))]);
}

#[tokio::test]
async fn an_old_leader_stops_nobody_that_has_met_a_later_one() {
    let opened = sessions(&[Some(welcome(7)), Some(stop(6)), Some(stop(7)), Some(welcome(6))]).await;
    assert_eq!(opened, [Ok(welcome(7)), Err(STALE.to_owned()), Ok(stop(7)), Err(STALE.to_owned())]);
}

#[tokio::test]
async fn nothing_is_obeyed_before_the_welcome() {
    let orders = [
        Order::CloseEpoch(v1::CloseEpoch { epoch: 9, ..v1::CloseEpoch::default() }),
        Order::Pause(v1::Pause { epoch: 9 }),
        Order::Prepare(v1::Prepare { epoch: 9, ..v1::Prepare::default() }),
        Order::Resume(v1::Resume { epoch: 9 }),
    ];
    for opened in sessions(&orders.map(Some)).await {
        assert!(opened.as_ref().is_err_and(|why| why.contains("before it said which")), "{opened:?}");
    }
    assert_eq!(sessions(&[None]).await, [Err("the daemon ended the session".to_owned())]);
}
