//! Who leads: whoever wrote the oldest of the candidates' keys, for as long as that key is there and its lease lives.
//!
//! The same keys as those of etcd's own election, whose call is not used: it lasts as long as another daemon leads, and
//! when the token it was begun with has ended it sees nothing any more.

use super::connection::{CANNOT_LEAD, Connection};
use crate::store::StoreError;
use etcd_client::{
    Compare, CompareOp, GetOptions, KeyValue, KvClient, PutOptions, SortOrder, SortTarget, Txn, TxnOp,
};
use std::time::Duration;
use tokio::time::sleep;

pub(super) const ELECTION: &str = "leader";
/// Between two looks at who leads.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Clone)]
pub(super) struct Leadership {
    pub(super) lease: i64,
    pub(super) key: Vec<u8>,
    /// At which the key was written: once.
    pub(super) revision: i64,
}

impl Leadership {
    pub(super) fn is_held_by(&self, kv: &KeyValue) -> bool {
        kv.mod_revision() == self.revision
    }
}

/// Returns when the key under `lease` is the oldest, or etcd refuses it.
pub(super) async fn campaign(
    connection: &Connection,
    client: &mut KvClient,
    address: &str,
    lease: i64,
) -> Result<Leadership, StoreError> {
    let key = format!("{}{ELECTION}/{lease:x}", connection.prefix);
    tracing::info!(key, "waiting to lead");
    loop {
        let is_own = |candidate: &KeyValue| candidate.key() == key.as_bytes();
        let looked = async {
            let found = candidates(connection, client).await?;
            if found.iter().any(is_own) {
                return Ok(found);
            }
            // At first, and when somebody deleted the key.
            stand(client, &key, address, lease).await?;
            candidates(connection, client).await
        };
        match looked.await {
            Ok(found) => {
                if let Some(leader) = found.first().filter(|leader| is_own(leader)) {
                    let revision = leader.mod_revision();
                    tracing::info!(key, revision, "leading");
                    return Ok(Leadership { lease, key: key.into_bytes(), revision });
                }
            }
            Err(error) => match connection.place.problem(&error) {
                refused @ StoreError::Refused { .. } => return Err(refused),
                problem => connection.complain(CANNOT_LEAD, &problem),
            },
        }
        sleep(PAUSE).await;
    }
}

/// Makes the candidate's key, unless an earlier try whose answer was lost has. One that lost its lease is made anew.
async fn stand(
    client: &mut KvClient,
    key: &str,
    address: &str,
    lease: i64,
) -> Result<(), etcd_client::Error> {
    let put = TxnOp::put(key, address, Some(PutOptions::new().with_lease(lease)));
    let absent = Compare::lease(key, CompareOp::Equal, 0);
    client.txn(Txn::new().when([absent]).and_then([put])).await.map(drop)
}

/// The candidates' keys with their addresses, oldest first: that is the leader's. A key without a lease is no candidate's: it would
/// lead for ever.
pub(super) async fn candidates(
    connection: &Connection,
    client: &mut KvClient,
) -> Result<Vec<KeyValue>, etcd_client::Error> {
    let oldest_first = GetOptions::new().with_prefix().with_sort(SortTarget::Mod, SortOrder::Ascend);
    let mut answer = client.get(format!("{}{ELECTION}/", connection.prefix), Some(oldest_first)).await?;
    Ok(answer.take_kvs().into_iter().filter(|kv| kv.lease() != 0).collect())
}
