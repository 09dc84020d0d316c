//! One file in the state directory, for a single daemon.

use super::record::encode_job;
use super::value::encode;
use super::{FORMAT, Snapshot, Store, StoreError, next_term};
use async_trait::async_trait;
use redb::backends::InMemoryBackend;
use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, StorageBackend, StorageError, TableDefinition,
};
use reknit_engine::{Incident, JobRecord};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

const META: TableDefinition<'_, &str, u32> = TableDefinition::new("meta");
const JOBS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("jobs");
const INCIDENTS: TableDefinition<'_, (&str, u64), &[u8]> = TableDefinition::new("incidents");
const FORMAT_KEY: &str = "format";
/// The last one that began.
const TERM: TableDefinition<'_, (), u64> = TableDefinition::new("term");
/// The state of many jobs is a few megabytes.
const CACHE_BYTES: usize = 4 << 20;
const REMEDY: &str = "restore it from a copy, or move it away to start with no jobs";

/// `reknitd.redb`, with `reknitd.lock` beside it: who holds the lock is the only daemon that writes.
#[derive(Debug)]
pub struct Embedded {
    path: PathBuf,
    database: Arc<Database>,
    term: u64,
    /// Freed by the kernel when the process ends, however it ends.
    _lock: File,
}

impl Embedded {
    /// Takes the lock, checks what is there without touching it, and opens it. Makes an empty one if there is none.
    pub async fn open(state_dir: &Path) -> Result<Self, StoreError> {
        let dir = state_dir.to_owned();
        let place = dir.join("reknitd.redb").display().to_string();
        match tokio::task::spawn_blocking(move || Self::open_blocking(&dir)).await {
            Ok(opened) => opened,
            // redb may panic on a file that something else wrote to.
            Err(panic) => Err(StoreError::Corrupt { place, problem: panic.to_string(), remedy: REMEDY }),
        }
    }

    fn open_blocking(state_dir: &Path) -> Result<Self, StoreError> {
        fs::create_dir_all(state_dir).map_err(io_at(state_dir))?;
        let lock_path = state_dir.join("reknitd.lock");
        let lock = File::create(&lock_path).map_err(io_at(&lock_path))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => StoreError::InUse { place: state_dir.display().to_string() },
            TryLockError::Error(source) => io_at(&lock_path)(source),
        })?;
        let path = state_dir.join("reknitd.redb");
        match fs::read(&path) {
            Ok(bytes) => {
                read_all(&path, &verified_copy(&path, &bytes)?)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => create(&path)?,
            Err(error) => return Err(io_at(&path)(error)),
        }
        let database =
            Database::builder().set_cache_size(CACHE_BYTES).open(&path).map_err(not_opened(&path))?;
        let term = begin(&database).map_err(|error| io_at(&path)(io::Error::other(error)))?;
        Ok(Self { path, database: Arc::new(database), term, _lock: lock })
    }

    /// One durable transaction, off the runtime's threads.
    async fn commit(
        &self,
        write: impl FnOnce(&redb::WriteTransaction) -> Result<(), redb::Error> + Send + 'static,
    ) -> Result<(), StoreError> {
        let (database, path) = (self.database.clone(), self.path.clone());
        let task = tokio::task::spawn_blocking(move || {
            let transaction = database.begin_write()?;
            write(&transaction)?;
            Ok(transaction.commit()?)
        });
        let done = task.await.map_err(|panic| panic.to_string());
        done.and_then(|done: Result<(), redb::Error>| done.map_err(|error| error.to_string())).map_err(
            |problem| StoreError::Io { place: path.display().to_string(), source: io::Error::other(problem) },
        )
    }
}

#[async_trait]
impl Store for Embedded {
    async fn load(&self) -> Result<Snapshot, StoreError> {
        let (database, path) = (self.database.clone(), self.path.clone());
        let task = tokio::task::spawn_blocking(move || read_all(&path, &database));
        task.await.map_err(corrupt(&self.path))?
    }

    async fn put_job(&self, record: &JobRecord) -> Result<(), StoreError> {
        let (name, value) = (record.name.0.clone(), encode_job(record).map_err(corrupt(&self.path))?);
        self.commit(move |transaction| {
            let mut jobs = transaction.open_table(JOBS)?;
            jobs.insert(name.as_str(), value.as_slice())?;
            Ok(())
        })
        .await
    }

    async fn put_incident(&self, incident: &Incident) -> Result<(), StoreError> {
        let (job, id) = (incident.job.0.clone(), incident.id);
        let (value, replaced) = (encode(incident).map_err(corrupt(&self.path))?, incident.replaces());
        self.commit(move |transaction| {
            let mut incidents = transaction.open_table(INCIDENTS)?;
            incidents.insert((job.as_str(), id), value.as_slice())?;
            if let Some(replaced) = replaced {
                incidents.remove((job.as_str(), replaced))?;
            }
            Ok(())
        })
        .await
    }

    fn term(&self) -> u64 {
        self.term
    }

    /// The lock is held for as long as the process lives.
    fn leads(&self) -> bool {
        true
    }

    async fn leadership_lost(&self) -> StoreError {
        std::future::pending().await
    }

    async fn release(&self) {}
}

/// A new term, in the present format: what is written from now on is of it.
fn begin(database: &Database) -> Result<u64, redb::Error> {
    let transaction = database.begin_write()?;
    transaction.open_table(META)?.insert(FORMAT_KEY, FORMAT)?;
    let term = {
        let mut terms = transaction.open_table(TERM)?;
        let last = terms.get(())?.map_or(0, |last| last.value());
        let term = next_term(last, SystemTime::now());
        terms.insert((), term)?;
        term
    };
    transaction.commit()?;
    Ok(term)
}

/// The whole file, checked page by page in memory: a damaged file is found without writing to it, where
/// opening it in place would repair and so overwrite it.
fn verified_copy(path: &Path, bytes: &[u8]) -> Result<Database, StoreError> {
    if bytes.is_empty() {
        return Err(corrupt(path)("it is empty"));
    }
    let copy = InMemoryBackend::new();
    let filled = copy.set_len(bytes.len() as u64).and_then(|()| copy.write(0, bytes));
    filled.map_err(|error| corrupt(path)(format!("{error:?}")))?;
    let mut builder = Database::builder();
    builder
        .set_cache_size(CACHE_BYTES)
        .set_check_integrity_on_open(true)
        .create_with_backend(copy)
        .map_err(corrupt(path))
}

/// Whole or not at all: written beside its place and then renamed.
fn create(path: &Path) -> Result<(), StoreError> {
    let fresh = path.with_extension("new");
    match fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io_at(&fresh)(error)),
        Ok(()) | Err(_) => {}
    }
    let write = || -> Result<(), redb::Error> {
        let database = Database::create(&fresh)?;
        let transaction = database.begin_write()?;
        transaction.open_table(META)?.insert(FORMAT_KEY, FORMAT)?;
        transaction.open_table(JOBS)?;
        transaction.open_table(INCIDENTS)?;
        transaction.commit()?;
        Ok(())
    };
    write().map_err(|error| io_at(&fresh)(io::Error::other(error)))?;
    fs::rename(&fresh, path).map_err(io_at(path))?;
    let dir = path.parent().unwrap_or(Path::new("."));
    let synced = File::open(dir).and_then(|dir| dir.sync_all());
    synced.map_err(io_at(dir))
}

/// As the tables give it, with the keys.
#[derive(Default)]
struct Raw {
    format: Option<u32>,
    jobs: Vec<(String, Vec<u8>)>,
    incidents: Vec<(String, u64, Vec<u8>)>,
}

fn read_raw(database: &Database) -> Result<Raw, redb::Error> {
    let transaction = database.begin_read()?;
    let format = transaction.open_table(META)?.get(FORMAT_KEY)?;
    let mut raw = Raw { format: format.map(|value| value.value()), ..Raw::default() };
    if raw.format.is_some_and(|format| format > FORMAT) {
        return Ok(raw);
    }
    for entry in transaction.open_table(JOBS)?.iter()? {
        let (key, value) = entry?;
        raw.jobs.push((key.value().to_owned(), value.value().to_vec()));
    }
    for entry in transaction.open_table(INCIDENTS)?.iter()? {
        let (key, value) = entry?;
        let (job, id) = key.value();
        raw.incidents.push((job.to_owned(), id, value.value().to_vec()));
    }
    Ok(raw)
}

fn read_all(path: &Path, database: &Database) -> Result<Snapshot, StoreError> {
    let raw = read_raw(database).map_err(corrupt(path))?;
    match raw.format {
        None => return Err(corrupt(path)("it has no format number")),
        Some(0) => return Err(corrupt(path)("there is no format 0")),
        Some(found) if found > FORMAT => {
            let place = path.display().to_string();
            return Err(StoreError::Newer { place, found, remedy: REMEDY });
        }
        Some(_) => {}
    }
    let mut found = Snapshot::default();
    for (job, value) in &raw.jobs {
        let added = found.add_job(job, value);
        added.map_err(|problem| corrupt(path)(format!("under job `{job}`: {problem}")))?;
    }
    for (job, id, value) in &raw.incidents {
        let added = found.add_incident(job, *id, value);
        added.map_err(|problem| corrupt(path)(format!("under incident {id} of job `{job}`: {problem}")))?;
    }
    Ok(found)
}

/// Once its contents were found good.
fn not_opened(path: &Path) -> impl FnOnce(DatabaseError) -> StoreError {
    let path = path.to_owned();
    move |error| match error {
        DatabaseError::DatabaseAlreadyOpen => StoreError::InUse { place: path.display().to_string() },
        DatabaseError::Storage(StorageError::Io(source)) => io_at(&path)(source),
        other => corrupt(&path)(other),
    }
}

fn io_at(path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let place = path.display().to_string();
    move |source| StoreError::Io { place, source }
}

fn corrupt<E: ToString>(path: &Path) -> impl FnOnce(E) -> StoreError {
    let place = path.display().to_string();
    move |problem| StoreError::Corrupt { place, problem: problem.to_string(), remedy: REMEDY }
}
