//! The embedded store: it survives SIGKILL, and refuses what it cannot trust without touching it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use redb::{Database, TableDefinition};
use reknit_engine::JobRecord;
use reknit_layout::JobSpec;
use reknitd::store::{Embedded, Snapshot, Store, StoreError};
use std::path::Path;
use support::{Daemon, job_names, submit};
use tokio::sync::Mutex;

/// One test at a time: a child that another test is just starting would hold a copy of the lock for a moment.
static ALONE: Mutex<()> = Mutex::const_new(());

fn record(name: &str) -> JobRecord {
    JobRecord::new(JobSpec::parse(&support::job_file(name), "job").unwrap())
}

async fn filled(dir: &Path) -> Snapshot {
    let store = Embedded::open(dir).await.unwrap();
    for number in 0..20 {
        store.put_job(&record(&format!("job{number:02}"))).await.unwrap();
    }
    store.load().await.unwrap()
}

/// The daemon's status and last line, and that it left the file as it was.
fn refusal(dir: &Path) -> (i32, String) {
    let file = dir.join("reknitd.redb");
    let before = std::fs::read(&file).unwrap();
    let arguments = ["--listen", "127.0.0.1:0", "--state-dir", dir.to_str().unwrap()];
    let refused = Daemon::spawn(&arguments).exit();
    assert_eq!(std::fs::read(&file).unwrap(), before, "the file was changed");
    refused
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_time_it_keeps_every_job_it_confirmed() {
    let _alone = ALONE.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let mut confirmed = Vec::new();
    for round in 0..10 {
        let daemon = Daemon::embedded(dir.path());
        let mut admin = daemon.admin().await;
        assert_eq!(job_names(&mut admin).await, confirmed);
        let name = format!("job{round}");
        submit(&mut admin, &name).await;
        confirmed.push(name);
        daemon.kill();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_truncated_file_is_refused() {
    let _alone = ALONE.lock().await;
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path()).await;
    let file = dir.path().join("reknitd.redb");
    let whole = std::fs::read(&file).unwrap();
    for length in [0, 1, 100, 4096, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&file, &whole[..length]).unwrap();
        let (status, last) = refusal(dir.path());
        assert_eq!(status, 65, "{length} bytes: {last}");
        assert!(last.contains("is damaged") && last.contains("reknitd.redb"), "{last}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_file_is_refused() {
    let _alone = ALONE.lock().await;
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path()).await;
    let database = Database::open(dir.path().join("reknitd.redb")).unwrap();
    let transaction = database.begin_write().unwrap();
    let meta: TableDefinition<'_, &str, u32> = TableDefinition::new("meta");
    transaction.open_table(meta).unwrap().insert("format", 99).unwrap();
    transaction.commit().unwrap();
    drop(database);
    let (status, last) = refusal(dir.path());
    assert_eq!(status, 65);
    assert!(last.contains("newer reknitd (format 99"), "{last}");
}

/// Damage anywhere is found or does no harm: never a wrong record, never a changed file.
#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_byte_never_becomes_a_wrong_record() {
    let _alone = ALONE.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let truth = filled(dir.path()).await;
    let file = dir.path().join("reknitd.redb");
    let whole = std::fs::read(&file).unwrap();
    let (mut found, mut harmless) = (0, 0);
    // A prime stride visits headers, tree pages, values and free space alike.
    for at in (0..whole.len()).step_by(4099).chain((0..320).step_by(7)) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x55;
        std::fs::write(&file, &damaged).unwrap();
        match Embedded::open(dir.path()).await {
            Ok(store) => {
                harmless += 1;
                assert_eq!(store.load().await.unwrap(), truth, "byte {at}");
            }
            Err(StoreError::Corrupt { .. }) => {
                found += 1;
                assert_eq!(std::fs::read(&file).unwrap(), damaged, "byte {at}");
            }
            Err(other) => panic!("byte {at}: {other}"),
        }
    }
    println!("{found} damages found, {harmless} harmless, in {} bytes", whole.len());
    assert!(found > 10);
}
