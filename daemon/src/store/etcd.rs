//! In etcd, for several daemons: one leads, the others wait for its lease to end.

mod complaints;
mod connection;
mod election;
mod lease;
mod problem;
mod stored;

pub use connection::{CANNOT_LEAD, Connection};
pub use stored::{Leader, Stored};

use super::record::encode_job;
use super::value::encode;
use super::{FORMAT, Snapshot, Store, StoreError, next_term};
use async_trait::async_trait;
use election::{ELECTION, Leadership, campaign};
use etcd_client::{
    Compare, CompareOp, GetOptions, KvClient, LeaseClient, Txn, TxnOp, TxnOpResponse, TxnResponse,
};
use lease::{Keeper, Validity};
use problem::is_too_large;
use reknit_engine::{Incident, JobRecord};
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, sleep, timeout_at};

const RETRY_WAIT: Duration = Duration::from_millis(50);
/// The loop waits for its writes, deaf to stops and to the end of its leadership: not for longer, however long the lease.
const WRITE_LIMIT: Duration = Duration::from_secs(3);
const FORMAT_KEY: &str = "format";
const TERM_KEY: &str = "term";
const REMEDY: &str = "restore etcd from a snapshot, or give another --etcd-prefix to start with no jobs";
const FOREIGN: &str = "delete it, or give --etcd-prefix a prefix that nothing else uses";

/// Keys under the prefix: `format`, `term`, `jobs/NAME`, `incidents/JOB/ID`, `leader/LEASE`.
///
/// Every write is one transaction that holds only if this daemon still leads (the leader key has the revision it
/// was made at) and the key is as this daemon last saw it. So an old leader is fenced even when it does not know.
#[derive(Debug)]
pub struct Etcd {
    connection: Connection,
    leader: Leadership,
    validity: watch::Receiver<Validity>,
    keeper: Keeper,
    /// Begun by the first load.
    term: OnceLock<u64>,
    kept: Mutex<Kept>,
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
    /// Returns when this daemon leads, which may be never. `address`: where its clients find it then.
    pub async fn open(connection: &Connection, address: &str) -> Result<Self, StoreError> {
        let client = connection.prompt().await?;
        let mut granted = Instant::now();
        let lease = connection.ask(|| {
            granted = Instant::now();
            let (mut leases, seconds) = (client.lease_client(), connection.lease_time.as_secs() as i64);
            async move { leases.grant(seconds, None).await }
        });
        let lease = lease.await?.id();
        let (keeper, validity) = Keeper::start(connection.clone(), lease, granted)?;
        // Everything is read at once at the start.
        let mut kv = client.kv_client().max_decoding_message_size(usize::MAX);
        let leader = tokio::select! {
            leader = campaign(connection, &mut kv, address, lease) => leader?,
            error = lost(validity.clone()) => return Err(error),
        };
        keeper.watch_key(&leader);
        let store = Self {
            connection: connection.clone(),
            leader,
            validity,
            keeper,
            term: OnceLock::new(),
            kept: Mutex::new(Kept { client: kv, leases: client.lease_client(), revisions: BTreeMap::new() }),
        };
        Ok(store)
    }

    /// Writes `key`, and removes `gone` with it.
    async fn put(&self, key: String, value: Vec<u8>, gone: Option<String>) -> Result<(), StoreError> {
        let mut kept = self.kept.lock().await;
        let expected = kept.revisions.get(&key).copied().unwrap_or(0);
        let prefix = &self.connection.prefix;
        let full = format!("{prefix}{key}");
        let write = TxnOp::put(full.clone(), value.clone(), None);
        let removal = gone.as_ref().map(|gone| TxnOp::delete(format!("{prefix}{gone}"), None));
        let transaction = Txn::new()
            .when([
                Compare::mod_revision(self.leader.key.clone(), CompareOp::Equal, self.leader.revision),
                Compare::mod_revision(full.clone(), CompareOp::Equal, expected),
            ])
            .and_then([write].into_iter().chain(removal).collect::<Vec<_>>())
            .or_else([TxnOp::get(self.leader.key.clone(), None), TxnOp::get(full.clone(), None)]);
        let limit = self.connection.lease_time.min(WRITE_LIMIT);
        let bytes = value.len();
        let response = self
            .commit(&mut kept.client, transaction, limit)
            .await?
            .ok_or_else(|| StoreError::TooLarge { place: self.connection.at(&key), bytes })?;
        let revision = if response.succeeded() {
            response.header().map_or(0, |header| header.revision())
        } else {
            self.explain(&response, &full, &value)?
        };
        kept.revisions.insert(key, revision);
        if let Some(gone) = gone {
            kept.revisions.remove(&gone);
        }
        Ok(())
    }

    /// Tries within the limit, each time for a third of it: one member may be silent. A try whose answer was lost may have
    /// been carried out: [`Self::explain`] sees that. `None` when etcd takes nothing that is so large.
    async fn commit(
        &self,
        client: &mut KvClient,
        transaction: Txn,
        limit: Duration,
    ) -> Result<Option<TxnResponse>, StoreError> {
        let connection = &self.connection;
        let deadline = Instant::now() + limit;
        let mut known = None;
        loop {
            let patience = deadline.min(Instant::now() + limit / 3);
            let problem = match timeout_at(patience, client.txn(transaction.clone())).await {
                Ok(Ok(response)) => return Ok(Some(response)),
                Ok(Err(error)) if is_too_large(&error) => return Ok(None),
                Ok(Err(error)) => connection.place.problem(&error),
                // The last try may have had no time for an answer: it tells nothing new.
                Err(_) if patience == deadline => known.take().unwrap_or_else(|| connection.place.silent()),
                Err(_) => connection.place.silent(),
            };
            connection.complain("a write failed", &problem);
            if Instant::now() + RETRY_WAIT >= deadline {
                return Err(problem);
            }
            known = Some(problem);
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
        let leads = found(0).is_some_and(|kv| self.leader.is_held_by(kv));
        match found(1) {
            _ if !leads => Err(StoreError::LeadershipLost {
                problem: format!("the leader key in {} is not ours any more", self.connection.place.name),
            }),
            Some(kv) if kv.value() == value => Ok(kv.mod_revision()),
            Some(_) | None => Err(StoreError::Conflict { place: key.to_owned() }),
        }
    }
}

#[async_trait]
impl Store for Etcd {
    async fn load(&self) -> Result<Snapshot, StoreError> {
        let mut kept = self.kept.lock().await;
        let found = read_snapshot(&self.connection, &kept.client).await?;
        kept.revisions = found.revisions;
        drop(kept);
        if found.format != Some(FORMAT) {
            // As every format has it.
            self.put(FORMAT_KEY.to_owned(), FORMAT.to_string().into_bytes(), None).await?;
        }
        if self.term.get().is_none() {
            let term = next_term(found.term, SystemTime::now());
            self.put(TERM_KEY.to_owned(), term.to_string().into_bytes(), None).await?;
            // The same from here on.
            let _ = self.term.set(term);
        }
        Ok(found.contents)
    }

    async fn put_job(&self, record: &JobRecord) -> Result<(), StoreError> {
        let key = format!("jobs/{}", record.name);
        let value = encode_job(record).map_err(|problem| self.connection.corrupt(&key, problem))?;
        self.put(key, value, None).await
    }

    async fn put_incident(&self, incident: &Incident) -> Result<(), StoreError> {
        let key = |id| format!("incidents/{}/{id:020}", incident.job);
        let own = key(incident.id);
        let value = encode(incident).map_err(|problem| self.connection.corrupt(&own, problem))?;
        self.put(own, value, incident.replaces().map(key)).await
    }

    fn term(&self) -> u64 {
        self.term.get().copied().unwrap_or(0)
    }

    fn leads(&self) -> bool {
        self.keeper.confirmed(Instant::now())
    }

    async fn leadership_lost(&self) -> StoreError {
        lost(self.validity.clone()).await
    }

    async fn release(&self) {
        self.keeper.stop();
        let mut kept = self.kept.lock().await;
        if let Err(error) = kept.leases.revoke(self.leader.lease).await {
            tracing::warn!(place = self.connection.place.name, %error, "the lease was not given back; it ends by itself");
        }
    }
}

async fn lost(mut validity: watch::Receiver<Validity>) -> StoreError {
    let problem = match validity.wait_for(|now| *now != Validity::Valid).await {
        Ok(validity) => validity.to_string(),
        Err(_) => "the lease is not kept alive any more".to_owned(),
    };
    StoreError::LeadershipLost { problem }
}

/// Everything under the prefix, by one read.
struct Found {
    contents: Snapshot,
    /// Of each key, without the prefix.
    revisions: BTreeMap<String, i64>,
    /// `None` when there is nothing yet.
    format: Option<u32>,
    /// Of the last leadership; 0 before the first.
    term: u64,
}

async fn read_snapshot(connection: &Connection, client: &KvClient) -> Result<Found, StoreError> {
    let prefix = connection.prefix.as_str();
    let response = connection.ask(|| {
        let mut client = client.clone();
        async move { client.get(prefix, Some(GetOptions::new().with_prefix())).await }
    });
    let mut response = response.await?;
    let mut entries = Vec::new();
    for kv in response.take_kvs() {
        let full = String::from_utf8_lossy(kv.key()).into_owned();
        let key = full.strip_prefix(prefix).unwrap_or(&full).to_owned();
        entries.push((key, kv));
    }
    let number = |wanted: &str, problem: &str| {
        let entry = entries.iter().find(|(key, _)| key == wanted);
        let number = entry.map(|(key, kv)| {
            let number = kv.value_str().ok().and_then(|text| text.parse::<u64>().ok());
            let number = number.filter(|number| *number > 0);
            number.ok_or_else(|| connection.corrupt(key, problem.to_owned()))
        });
        number.transpose()
    };
    let no_format = "it is no format number";
    let format = number(FORMAT_KEY, no_format)?.map(u32::try_from).transpose();
    let format = format.map_err(|_| connection.corrupt(FORMAT_KEY, no_format.to_owned()))?;
    // What a newer daemon wrote is not looked at.
    if let Some(found) = format.filter(|format| *format > FORMAT) {
        return Err(StoreError::Newer { place: connection.at(""), found, remedy: REMEDY });
    }
    let term = number(TERM_KEY, "it is no number of a leadership")?.unwrap_or(0);
    let mut found = Found { contents: Snapshot::default(), revisions: BTreeMap::new(), format, term };
    for (key, kv) in entries {
        let foreign = || StoreError::Foreign { place: connection.at(&key), remedy: FOREIGN };
        let added = match key.split_once('/') {
            Some((ELECTION, _)) => continue,
            None if key == FORMAT_KEY || key == TERM_KEY => Ok(()),
            Some(("jobs", job)) => found.contents.add_job(job, kv.value()),
            Some(("incidents", rest)) => {
                let (job, id) = rest.split_once('/').ok_or_else(foreign)?;
                let id = id.parse().map_err(|_| foreign())?;
                found.contents.add_incident(job, id, kv.value())
            }
            Some(_) | None => return Err(foreign()),
        };
        added.map_err(|problem| connection.corrupt(&key, problem))?;
        found.revisions.insert(key, kv.mod_revision());
    }
    if format.is_none() && found.contents != Snapshot::default() {
        return Err(connection.corrupt("", "it has no format number".to_owned()));
    }
    Ok(found)
}
