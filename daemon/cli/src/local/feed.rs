//! What happens in a cluster, as it happens, and what ends that.

use super::cluster::Cluster;
use crate::admin::{Admin, refused};
use crate::failure::Failure;
use reknit_proto::v1::{JobEvent, WatchEventsRequest};
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout};
use tonic::Streaming;

/// From the end of a connection to the end of the process that held it.
const DEATH_LIMIT: Duration = Duration::from_secs(1);

/// The events of all jobs from its opening on.
#[derive(Debug)]
pub(crate) struct Feed {
    events: Streaming<JobEvent>,
    deadline: Instant,
}

#[derive(Debug)]
pub(crate) enum Woken {
    Event(Box<JobEvent>),
    /// The time that was allowed is over.
    Stalled,
}

impl Feed {
    /// `limit`: see [`Feed::allow`].
    pub(crate) async fn open(admin: &mut Admin, limit: Duration) -> Result<Self, Failure> {
        let watch = WatchEventsRequest { job: String::new() };
        let events = admin.watch_events(watch).await.map_err(refused)?.into_inner();
        Ok(Self { events, deadline: Instant::now() + limit })
    }

    /// From now on, until it is allowed again, no more time than this.
    pub(crate) fn allow(&mut self, limit: Duration) {
        self.deadline = Instant::now() + limit;
    }

    /// Nothing is lost when the future is dropped.
    ///
    /// # Errors
    /// The daemon or an agent has ended, or the daemon says no more.
    pub(crate) async fn next(&mut self, cluster: &mut Cluster) -> Result<Woken, Failure> {
        let why = tokio::select! {
            event = self.events.message() => match event {
                Ok(Some(event)) => return Ok(Woken::Event(Box::new(event))),
                Ok(None) => "the daemon ended the stream".to_owned(),
                Err(status) => status.message().to_owned(),
            },
            () = cluster.death() => "a process of the cluster ended".to_owned(),
            () = sleep_until(self.deadline) => return Ok(Woken::Stalled),
        };
        // A daemon that died is seen here first, and says more about itself.
        let _ = timeout(DEATH_LIMIT, cluster.death()).await;
        let death = cluster.death_now();
        Err(death.unwrap_or_else(|| Failure::Failed(format!("the daemon's events ended: {why}"))))
    }
}
