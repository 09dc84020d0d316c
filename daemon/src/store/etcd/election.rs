//! Who leads: whoever made the oldest of the candidates' keys, for as long as that key's lease lives.
//!
//! The same keys as those of etcd's own election, whose call is not used: it lasts as long as another daemon leads, and
//! when the token it was begun with has ended it sees nothing any more.

use super::connection::Connection;
use crate::store::StoreError;
use etcd_client::{
    Compare, CompareOp, GetOptions, KeyValue, KvClient, PutOptions, SortOrder, SortTarget, Txn, TxnOp,
};
use std::time::Duration;
use tokio::time::sleep;

pub(super) const ELECTION: &str = "leader";
/// Between two looks at who leads.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Leadership {
    pub(super) lease: i64,
    pub(super) key: Vec<u8>,
    /// At which the key was made.
    pub(super) revision: i64,
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
    let mut stands = false;
    loop {
        let looked = async {
            if !stands {
                stand(client, &key, address, lease).await?;
                stands = true;
            }
            leader(connection, client).await
        };
        match looked.await {
            Ok(Some(leader)) if leader.key() == key.as_bytes() => {
                let revision = leader.create_revision();
                tracing::info!(key, revision, "leading");
                return Ok(Leadership { lease, key: key.into_bytes(), revision });
            }
            Ok(_) => {}
            Err(error) => match connection.place.problem(&error) {
                refused @ StoreError::Refused { .. } => return Err(refused),
                problem => tracing::warn!(key, %problem, "cannot see who leads; trying again"),
            },
        }
        sleep(PAUSE).await;
    }
}

/// Makes the candidate's key, unless an earlier try whose answer was lost has.
async fn stand(
    client: &mut KvClient,
    key: &str,
    address: &str,
    lease: i64,
) -> Result<(), etcd_client::Error> {
    let put = TxnOp::put(key, address, Some(PutOptions::new().with_lease(lease)));
    let absent = Compare::create_revision(key, CompareOp::Equal, 0);
    client.txn(Txn::new().when([absent]).and_then([put])).await.map(drop)
}

/// The leader's key, with its address.
pub(super) async fn leader(
    connection: &Connection,
    client: &mut KvClient,
) -> Result<Option<KeyValue>, etcd_client::Error> {
    let oldest =
        GetOptions::new().with_prefix().with_sort(SortTarget::Create, SortOrder::Ascend).with_limit(1);
    let candidates = format!("{}{ELECTION}/", connection.prefix);
    let mut answer = client.get(candidates, Some(oldest)).await?;
    Ok(answer.take_kvs().pop())
}
