//! Opens a session with the daemon that leads, again and again.

use crate::{Daemons, Next, leader, root_cause};
use reknit_proto::v1;
use std::collections::BTreeMap;
use std::future::Future;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::Channel;
use tonic::{Code, Response, Status, Streaming};
use tracing::{info, warn};

/// From the connection to the daemon's first order.
const WELCOME: Duration = Duration::from_secs(3);
/// Once each daemon was tried: doubled each time.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What a session begins with, from the daemon.
pub trait Opening {
    /// The number of the leadership that orders. `None` for an order that no session begins with.
    fn term(&self) -> Option<u64>;
}

impl Opening for v1::AgentOrder {
    fn term(&self) -> Option<u64> {
        use v1::agent_order::Order;
        match self.order.as_ref()? {
            Order::Welcome(welcome) => Some(welcome.term),
            Order::Spawn(_)
            | Order::Fence(_)
            | Order::HealthAck(_)
            | Order::Quiesce(_)
            | Order::EndQuiesce(_)
            | Order::SetPowerLimit(_)
            | Order::ProbeNow(_)
            | Order::ReleaseGpu(_) => None,
        }
    }
}

impl Opening for v1::WorkerOrder {
    fn term(&self) -> Option<u64> {
        use v1::worker_order::Order;
        match self.order.as_ref()? {
            Order::Welcome(welcome) => Some(welcome.term),
            // Its job is not known: there is nothing to welcome it with.
            Order::Stop(stop) => Some(stop.term),
            Order::CloseEpoch(_)
            | Order::Pause(_)
            | Order::Join(_)
            | Order::Prepare(_)
            | Order::Resume(_) => None,
        }
    }
}

/// Why a session ended, or did not begin.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    #[error("cannot connect: {}", root_cause(.0))]
    Connect(#[from] tonic::transport::Error),
    #[error("{}", .0.message())]
    Status(#[from] Status),
    #[error("the daemon did not answer the hello")]
    NoWelcome,
    #[error("the daemon gave an order before it said which leadership orders; is it another version?")]
    NotWelcome,
    #[error("it does not know that it leads no more")]
    Stale,
    #[error("the daemon ended the session")]
    Closed,
    /// This side ended it: why.
    #[error("{0}")]
    Here(String),
    /// This side wants no session any more.
    #[error("over")]
    Over,
}

/// Which daemon to dial now, how long to wait, and what was said about it. One session at a time.
#[derive(Debug)]
pub struct Dialer {
    daemons: Daemons,
    pause: Duration,
    /// Why the last session with each daemon ended: the same is not said twice.
    told: BTreeMap<String, String>,
    welcomed: Option<Instant>,
}

impl Dialer {
    #[must_use]
    pub fn new(daemons: Daemons) -> Self {
        Self { daemons, pause: PAUSE, told: BTreeMap::new(), welcomed: None }
    }

    /// # Errors
    /// When the daemon to try now cannot be reached.
    pub async fn connect(&self) -> Result<Channel, Ended> {
        Ok(self.daemons.endpoint().connect().await?)
    }

    /// `opens` sends the hello. Gives back the daemon's first order, and all that follow.
    ///
    /// # Errors
    /// When the daemon refuses or does not answer in time; when its first order does not say which leadership orders;
    /// and when a later leadership was seen before. Nothing that it ordered is to be obeyed then.
    pub async fn open<O: Opening>(
        &mut self,
        opens: impl Future<Output = Result<Response<Streaming<O>>, Status>>,
    ) -> Result<(O, Streaming<O>), Ended> {
        let opened = async {
            let mut orders = opens.await?.into_inner();
            let first = orders.message().await?.ok_or(Ended::Closed)?;
            Ok::<_, Ended>((first, orders))
        };
        let (first, orders) = timeout(WELCOME, opened).await.map_err(|_| Ended::NoWelcome)??;
        let term = first.term().ok_or(Ended::NotWelcome)?;
        if !self.daemons.welcomed(term) {
            return Err(Ended::Stale);
        }
        info!(daemon = self.daemons.address(), term, "session with the daemon open");
        self.welcomed = Some(Instant::now());
        Ok((first, orders))
    }

    /// Says why, unless it was said before; chooses the daemon to try next, and waits when each was tried.
    pub async fn retry(&mut self, ended: &Ended) {
        // One that ends at once will end at once again, such as that of a second agent under one name.
        if self.welcomed.take().is_some_and(|since| since.elapsed() > LONGEST_PAUSE) {
            self.pause = PAUSE;
            self.told.clear();
        }
        let daemon = self.daemons.address().to_owned();
        let why = ended.to_string();
        if self.is_news(&daemon, &why) {
            warn!(daemon, why, "no session with the daemon; trying again");
        }
        if ended.is_the_leaders_word() {
            // The others would only point to it.
            return sleep(LONGEST_PAUSE).await;
        }
        match self.daemons.failed(ended.status().and_then(leader)) {
            Next::AtOnce => {}
            Next::AfterAPause => {
                sleep(self.pause).await;
                self.pause = (self.pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    fn is_news(&mut self, daemon: &str, why: &str) -> bool {
        self.told.insert(daemon.to_owned(), why.to_owned()).as_deref() != Some(why)
    }
}

impl Ended {
    /// What the daemon said.
    fn status(&self) -> Option<&Status> {
        match self {
            Self::Status(status) => Some(status),
            Self::Connect(_)
            | Self::NoWelcome
            | Self::NotWelcome
            | Self::Stale
            | Self::Closed
            | Self::Here(_)
            | Self::Over => None,
        }
    }

    /// The daemon that leads wants none of this, such as a second agent under one name: the same again would be refused again,
    /// until something else changes.
    fn is_the_leaders_word(&self) -> bool {
        self.status()
            .is_some_and(|status| matches!(status.code(), Code::AlreadyExists | Code::InvalidArgument))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_each_daemon_is_said_once() {
        let mut dialer = Dialer::new("http://a:1,http://b:2".parse().unwrap());
        let mut said = Vec::new();
        for round in 0..3 {
            for daemon in ["http://a:1", "http://b:2"] {
                let why = format!("cannot connect to {daemon}");
                said.push((round, dialer.is_news(daemon, &why)));
            }
        }
        assert_eq!(said, [(0, true), (0, true), (1, false), (1, false), (2, false), (2, false)]);
        assert!(dialer.is_news("http://b:2", "it is in stand-by"), "something else is wrong");
    }

    #[tokio::test]
    async fn whom_the_leader_refuses_asks_it_again_after_the_longest_pause_and_nobody_else() {
        let mut dialer = Dialer::new("http://a:1,http://b:2,http://c:3".parse().unwrap());
        dialer.retry(&Ended::Closed).await;
        let refused = Ended::Status(Status::already_exists("another agent is connected"));
        let began = Instant::now();
        dialer.retry(&refused).await;
        assert!(began.elapsed() >= LONGEST_PAUSE);
        assert_eq!(dialer.daemons.address(), "http://b:2");
        dialer.retry(&Ended::Closed).await;
        assert_eq!(dialer.daemons.address(), "http://c:3", "it leads no more");
    }
}
