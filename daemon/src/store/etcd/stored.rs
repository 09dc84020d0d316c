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

/// Who leads, as far as etcd says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leader {
    /// At this address.
    At(String),
    Nobody,
    /// Why etcd did not say.
    Unknown(String),
}

/// The store's contents and who leads, read without leading.
pub struct Stored {
    pub connection: Connection,
    client: Client,
    leader: Mutex<Option<(Instant, Leader)>>,
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

    pub async fn leader(&self) -> Leader {
        let mut known = self.leader.lock().await;
        match &*known {
            Some((asked, leader)) if asked.elapsed() < FRESH => return leader.clone(),
            Some(_) | None => {}
        }
        let answer = election::candidates(&self.connection, &mut self.client.kv_client()).await;
        let leader =
            match answer.map(|candidates| candidates.first().map(|kv| kv.value_str().map(str::to_owned))) {
                Ok(Some(Ok(address))) => Leader::At(address),
                Ok(Some(Err(_))) => Leader::Unknown("its address in etcd is not text".to_owned()),
                Ok(None) => Leader::Nobody,
                Err(error) => Leader::Unknown(self.connection.place.problem(&error).to_string()),
            };
        *known = Some((Instant::now(), leader.clone()));
        leader
    }
}
