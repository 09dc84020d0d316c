//! In etcd, for several daemons: one leads, the others wait for its lease to end.

mod lease;

use super::{FORMAT, Snapshot, Store, StoreError, decode, encode};
use async_trait::async_trait;
use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, GetOptions, KeyValue, KvClient, LeaseClient, Txn, TxnOp,
    TxnOpResponse, TxnResponse,
};
use lease::{Validity, keep_lease};
use reknit_engine::{Incident, JobRecord};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout_at};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
const RETRY_WAIT: Duration = Duration::from_millis(50);

/// Keys under the prefix: `format`, `jobs/NAME`, `incidents/JOB/ID`, `leader/LEASE`.
///
/// Every write is one transaction that holds only if this daemon still leads (the leader key has the revision it
/// was made at) and the key is as this daemon last saw it. So an old leader is fenced even when it does not know.
#[derive(Debug)]
pub struct Etcd {
    place: String,
    prefix: String,
    leader: Leadership,
    validity: watch::Receiver<Validity>,
    lease_time: Duration,
    keeper: Keeper,
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Leadership {
    lease: i64,
    key: Vec<u8>,
    revision: i64,
}

/// The clients and the revision of each key as last seen. One lock: writes go one after the other.
struct Kept {
    client: KvClient,
    leases: LeaseClient,
    revisions: BTreeMap<String, i64>,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept").field("revisions", &self.revisions).finish_non_exhaustive()
    }
}

impl Etcd {
    /// Returns when this daemon leads, which may be never.
    pub async fn open(endpoints: &[String], prefix: &str, lease_time: Duration) -> Result<Self, StoreError> {
        let place = format!("etcd at {}", endpoints.join(","));
        let unreachable = |error: etcd_client::Error| StoreError::Unreachable {
            place: place.clone(),
            problem: error.to_string(),
        };
        let patient = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_keep_alive(Duration::from_secs(1), Duration::from_secs(2))
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        let prompt = patient.clone().with_timeout(CALL_TIMEOUT);
        let mut client = Client::connect(endpoints, Some(prompt)).await.map_err(unreachable)?;
        let granted = Instant::now();
        let lease = client.lease_grant(lease_time.as_secs() as i64, None).await.map_err(unreachable)?.id();
        let (told, validity) = watch::channel(Validity::Valid);
        let keeping = keep_lease(client.lease_client(), lease, lease_time, granted, told);
        let keeper = Keeper(tokio::spawn(keeping));
        // A campaign lasts as long as the other daemon leads: no deadline but the lease's own.
        let candidate = Client::connect(endpoints, Some(patient)).await.map_err(unreachable)?;
        let leader = tokio::select! {
            leader = campaign(candidate, format!("{prefix}leader"), lease) => leader,
            error = lost(validity.clone()) => return Err(error),
        };
        let store = Self {
            place,
            prefix: prefix.to_owned(),
            leader,
            validity,
            lease_time,
            keeper,
            kept: Mutex::new(Kept {
                // Everything is read at once at the start.
                client: client.kv_client().max_decoding_message_size(usize::MAX),
                leases: client.lease_client(),
                revisions: BTreeMap::new(),
            }),
        };
        Ok(store)
    }

    async fn put(&self, key: String, value: Vec<u8>) -> Result<(), StoreError> {
        let mut kept = self.kept.lock().await;
        let expected = kept.revisions.get(&key).copied().unwrap_or(0);
        let full = format!("{}{key}", self.prefix);
        let transaction = Txn::new()
            .when([
                Compare::create_revision(self.leader.key.clone(), CompareOp::Equal, self.leader.revision),
                Compare::mod_revision(full.clone(), CompareOp::Equal, expected),
            ])
            .and_then([TxnOp::put(full.clone(), value.clone(), None)])
            .or_else([TxnOp::get(self.leader.key.clone(), None), TxnOp::get(full.clone(), None)]);
        let deadline = Instant::now() + self.lease_time;
        let response = self.commit(&mut kept.client, transaction, deadline).await?;
        let revision = if response.succeeded() {
            response.header().map_or(0, |header| header.revision())
        } else {
            self.explain(&response, &full, &value)?
        };
        kept.revisions.insert(key, revision);
        Ok(())
    }

    /// Tries until the deadline. A try whose answer was lost may have been carried out: [`Self::explain`] sees that.
    async fn commit(
        &self,
        client: &mut KvClient,
        transaction: Txn,
        deadline: Instant,
    ) -> Result<TxnResponse, StoreError> {
        loop {
            let problem = match timeout_at(deadline, client.txn(transaction.clone())).await {
                Ok(Ok(response)) => return Ok(response),
                Ok(Err(error)) => error.to_string(),
                Err(_) => "no answer".to_owned(),
            };
            tracing::warn!(place = self.place, problem, "a write failed; trying again");
            if Instant::now() + RETRY_WAIT >= deadline {
                return Err(StoreError::Unreachable { place: self.place.clone(), problem });
            }
            sleep(RETRY_WAIT).await;
        }
    }

    /// Why a transaction did not hold; the key's revision if an earlier try of the same write did.
    fn explain(&self, response: &TxnResponse, key: &str, value: &[u8]) -> Result<i64, StoreError> {
        let answers = response.op_responses();
        let found = |index: usize| match answers.get(index) {
            Some(TxnOpResponse::Get(get)) => get.kvs().first(),
            Some(TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) | TxnOpResponse::Txn(_)) | None => None,
        };
        let leads = found(0).is_some_and(|kv| kv.create_revision() == self.leader.revision);
        match found(1) {
            _ if !leads => Err(StoreError::LeadershipLost {
                problem: format!("the leader key in {} is not ours any more", self.place),
            }),
            Some(kv) if kv.value() == value => Ok(kv.mod_revision()),
            Some(_) | None => Err(StoreError::Conflict { place: key.to_owned() }),
        }
    }

    async fn read_all(&self, kept: &mut Kept) -> Result<Vec<KeyValue>, StoreError> {
        let range = GetOptions::new().with_prefix();
        let response = kept.client.get(self.prefix.clone(), Some(range)).await;
        let mut response = response.map_err(|error| StoreError::Unreachable {
            place: self.place.clone(),
            problem: error.to_string(),
        })?;
        Ok(response.take_kvs())
    }
}

#[async_trait]
impl Store for Etcd {
    async fn load(&self) -> Result<Snapshot, StoreError> {
        let mut kept = self.kept.lock().await;
        let mut snapshot = Snapshot::default();
        let mut format = None;
        for kv in self.read_all(&mut kept).await? {
            let full = String::from_utf8_lossy(kv.key()).into_owned();
            let Some(key) = full.strip_prefix(&self.prefix) else {
                continue;
            };
            match key.split_once('/') {
                None if key == "format" => format = Some(decode::<u32>(&full, kv.value())?),
                Some(("jobs", _)) => snapshot.jobs.push(decode(&full, kv.value())?),
                Some(("incidents", _)) => snapshot.incidents.push(decode(&full, kv.value())?),
                Some(_) | None => continue,
            }
            kept.revisions.insert(key.to_owned(), kv.mod_revision());
        }
        drop(kept);
        let place = format!("{} under {}", self.place, self.prefix);
        match format {
            Some(found) if found > FORMAT => Err(StoreError::Newer { place, found }),
            Some(_) => Ok(snapshot),
            None if snapshot == Snapshot::default() => {
                let value = encode("format", &FORMAT)?;
                self.put("format".to_owned(), value).await?;
                Ok(snapshot)
            }
            None => Err(StoreError::Corrupt { place, problem: "it has no format number".to_owned() }),
        }
    }

    async fn put_job(&self, record: &JobRecord) -> Result<(), StoreError> {
        let key = format!("jobs/{}", record.name);
        let value = encode(&key, record)?;
        self.put(key, value).await
    }

    async fn put_incident(&self, incident: &Incident) -> Result<(), StoreError> {
        let key = format!("incidents/{}/{:020}", incident.job, incident.id);
        let value = encode(&key, incident)?;
        self.put(key, value).await
    }

    async fn leadership_lost(&self) -> StoreError {
        lost(self.validity.clone()).await
    }

    async fn release(&self) {
        self.keeper.0.abort();
        let mut kept = self.kept.lock().await;
        if let Err(error) = kept.leases.revoke(self.leader.lease).await {
            tracing::warn!(place = self.place, %error, "the lease was not given back; it ends by itself");
        }
    }
}

/// Keeps the lease until it is dropped.
#[derive(Debug)]
struct Keeper(JoinHandle<()>);

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn lost(mut validity: watch::Receiver<Validity>) -> StoreError {
    let problem = match validity.wait_for(|now| *now != Validity::Valid).await {
        Ok(validity) => validity.to_string(),
        Err(_) => "the lease is not kept alive any more".to_owned(),
    };
    StoreError::LeadershipLost { problem }
}

/// Asking again under the same lease is the same candidacy: a broken connection does not lose the place in line.
async fn campaign(mut client: Client, election: String, lease: i64) -> Leadership {
    loop {
        tracing::info!(election, "waiting to lead");
        match client.campaign(election.as_str(), "reknitd", lease).await {
            Ok(response) => {
                if let Some(leader) = response.leader() {
                    tracing::info!(election, revision = leader.rev(), "leading");
                    return Leadership { lease, key: leader.key().to_vec(), revision: leader.rev() };
                }
            }
            Err(error) => tracing::warn!(election, %error, "the campaign broke off; trying again"),
        }
        sleep(RETRY_WAIT).await;
    }
}
