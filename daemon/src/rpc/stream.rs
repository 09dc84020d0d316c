//! What the streams of agents and workers have in common.

use super::HELLO_TIMEOUT;
use super::convert::BadMessage;
use crate::input::{Input, Inputs, Said};
use crate::sessions::{Peer, StreamEnd};
use std::time::Duration;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

pub(super) type Orders<O> = ReceiverStream<Result<O, Status>>;

/// The first message of a stream.
pub(super) async fn first<M>(inbound: &mut Streaming<M>) -> Result<M, Status> {
    match timeout(HELLO_TIMEOUT, inbound.message()).await {
        Ok(Ok(Some(message))) => Ok(message),
        Ok(Ok(None)) => Err(Status::invalid_argument("the stream ended before Hello")),
        Ok(Err(status)) => Err(status),
        Err(_) => Err(Status::deadline_exceeded("no Hello came")),
    }
}

pub(super) async fn tell(inputs: &Inputs, input: Input) -> Result<(), Status> {
    let told = inputs.tell(input).await;
    told.then_some(()).ok_or_else(|| Status::unavailable("the daemon is stopping"))
}

/// Hands over what the peer says, in order, until the stream ends, the loop drops the session, the peer says
/// something that makes no sense, or it is silent for longer than `silence`.
///
/// Gives back the stream of orders; the pump itself runs on.
pub(super) fn pump<M, O>(
    inbound: Streaming<M>,
    end: StreamEnd<O>,
    inputs: Inputs,
    peer: Peer,
    silence: Option<Duration>,
    translate: impl Fn(M) -> Result<Said, BadMessage> + Send + 'static,
) -> Orders<O>
where
    M: Send + 'static,
    O: Send + 'static,
{
    let StreamEnd { id, orders, mut dropped, failure } = end;
    // Workers come by the thousand, and the phases of their jobs tell enough.
    match &peer {
        Peer::Agent(_) => tracing::info!(%peer, "connected"),
        Peer::Worker(..) => tracing::debug!(%peer, "connected"),
    }
    tokio::spawn(async move {
        let mut inbound = inbound;
        let refusal = loop {
            let message = tokio::select! {
                _ = &mut dropped => {
                    tracing::info!(%peer, "session ended here");
                    return;
                }
                message = next(&mut inbound, silence) => message,
            };
            let said = match message {
                Ok(Some(message)) => translate(message),
                Ok(None) => break None,
                Err(status) => break Some(status),
            };
            let input = match said {
                Ok(said) => Input::Said { peer: peer.clone(), session: id, said },
                Err(bad) => break Some(Status::invalid_argument(bad.to_string())),
            };
            if !inputs.tell(input).await {
                return;
            }
        };
        match (&refusal, &peer) {
            (Some(status), _) => tracing::warn!(%peer, reason = status.message(), "disconnected"),
            (None, Peer::Agent(_)) => tracing::info!(%peer, "disconnected"),
            (None, Peer::Worker(..)) => tracing::debug!(%peer, "disconnected"),
        }
        if let (Some(status), Some(orders)) = (refusal, failure.upgrade()) {
            // When there is no room, the peer learns no more than that the stream ended.
            let _ = orders.try_send(Err(status));
        }
        inputs.tell(Input::Closed { peer, session: id }).await;
    });
    ReceiverStream::new(orders)
}

async fn next<M>(inbound: &mut Streaming<M>, silence: Option<Duration>) -> Result<Option<M>, Status> {
    match silence {
        None => inbound.message().await,
        Some(limit) => match timeout(limit, inbound.message()).await {
            Ok(message) => message,
            Err(_) => Err(Status::deadline_exceeded(format!("nothing was heard for {limit:?}"))),
        },
    }
}
