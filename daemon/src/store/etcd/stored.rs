//! What a daemon in stand-by may see.

use super::connection::Connection;
use super::{election, read_snapshot};
use crate::store::{Snapshot, StoreError};
use etcd_client::Client;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// For so long a leader's address is not asked for again: every agent of a large cluster may ask at once.
const FRESH: Duration = Duration::from_millis(100);

/// The store's contents and who leads, read without leading.
pub struct Stored {
    pub connection: Connection,
    client: Client,
    leader: Mutex<Option<(Instant, Option<String>)>>,
}

impl std::fmt::Debug for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stored").field("connection", &self.connection).finish_non_exhaustive()
    }
}

impl Stored {
    pub async fn new(connection: Connection) -> Result<Self, StoreError> {
        let client = connection.prompt().await?;
        Ok(Self { connection, client, leader: Mutex::new(None) })
    }

    pub async fn snapshot(&self) -> Result<Snapshot, StoreError> {
        let client = self.client.kv_client().max_decoding_message_size(usize::MAX);
        Ok(read_snapshot(&self.connection, &client).await?.contents)
    }

    /// The leader's address. `None` when nobody leads or etcd does not say.
    pub async fn leader(&self) -> Option<String> {
        let mut known = self.leader.lock().await;
        match &*known {
            Some((asked, leader)) if asked.elapsed() < FRESH => return leader.clone(),
            Some(_) | None => {}
        }
        let answer = election::candidates(&self.connection, &mut self.client.kv_client()).await;
        let leader = answer.unwrap_or_default().first().and_then(|kv| kv.value_str().ok().map(str::to_owned));
        *known = Some((Instant::now(), leader.clone()));
        leader
    }
}
