//! The embedded store: it survives SIGKILL, and refuses what it cannot trust without touching it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use redb::{Database, ReadableTable, TableDefinition};
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

/// As the refusal of a damaged file advises.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_was_moved_away_is_followed_by_a_higher_term() {
    let _alone = ALONE.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let mut last = 0;
    for round in 0..6 {
        let term = Embedded::open(dir.path()).await.unwrap().term();
        assert!(term > last, "round {round}: {term} after {last}");
        last = term;
        if round % 2 == 1 {
            std::fs::rename(dir.path().join("reknitd.redb"), dir.path().join("away")).unwrap();
        }
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

type Meta = TableDefinition<'static, &'static str, u32>;
type Jobs = TableDefinition<'static, &'static str, &'static [u8]>;
type Incidents = TableDefinition<'static, (&'static str, u64), &'static [u8]>;
const META: Meta = TableDefinition::new("meta");
const JOBS: Jobs = TableDefinition::new("jobs");
const INCIDENTS: Incidents = TableDefinition::new("incidents");

/// What another program wrote into the file, soundly.
fn edit(dir: &Path, change: impl FnOnce(&redb::WriteTransaction)) {
    let database = Database::open(dir.join("reknitd.redb")).unwrap();
    let transaction = database.begin_write().unwrap();
    change(&transaction);
    transaction.commit().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_file_is_refused() {
    let _alone = ALONE.lock().await;
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path()).await;
    edit(dir.path(), |write| {
        write.open_table(META).unwrap().insert("format", 99).unwrap();
        // Not looked at.
        write.open_table(JOBS).unwrap().insert("job00", b"written by tomorrow's daemon".as_slice()).unwrap();
    });
    let (status, last) = refusal(dir.path());
    assert_eq!(status, 65);
    assert!(last.contains("newer reknitd (format 99") && last.contains("run the newer version"), "{last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_trusted_is_named_and_left_alone() {
    let _alone = ALONE.lock().await;
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path()).await;
    let file = dir.path().join("reknitd.redb");
    let whole = std::fs::read(&file).unwrap();
    let mut packed = Vec::new();
    edit(dir.path(), |write| {
        packed = write.open_table(JOBS).unwrap().get("job07").unwrap().unwrap().value().to_vec();
    });
    let truncated = &packed[..packed.len() / 2];
    let job = |key, value| {
        let job = move |write: &redb::WriteTransaction| {
            write.open_table(JOBS).unwrap().insert(key, value).unwrap();
        };
        Box::new(job) as Box<dyn FnOnce(&redb::WriteTransaction) + '_>
    };
    let cases = [
        ("job `job07`", job("job07", truncated)),
        ("job `job07`", job("job07", b"garbage")),
        ("job `job07`", job("job07", b"")),
        ("job `job08`: it is the record of job `job07`", job("job08", &packed)),
        (
            "incident 7 of job `job07`",
            Box::new(|write: &redb::WriteTransaction| {
                write.open_table(INCIDENTS).unwrap().insert(("job07", 7), packed.as_slice()).unwrap();
            }),
        ),
        (
            "no format 0",
            Box::new(|write: &redb::WriteTransaction| {
                write.open_table(META).unwrap().insert("format", 0).unwrap();
            }),
        ),
        (
            "no format number",
            Box::new(|write: &redb::WriteTransaction| {
                write.open_table(META).unwrap().remove("format").unwrap();
            }),
        ),
        (
            "meta",
            Box::new(|write: &redb::WriteTransaction| {
                assert!(write.delete_table(META).unwrap());
            }),
        ),
    ];
    for (words, change) in cases {
        std::fs::write(&file, &whole).unwrap();
        edit(dir.path(), change);
        let (status, last) = refusal(dir.path());
        println!("{status}: {last}");
        assert_eq!(status, 65, "{words}: {last}");
        assert!(last.contains("is damaged") && last.contains("restore it from a copy"), "{last}");
        assert!(last.contains(words) && last.contains(file.to_str().unwrap()), "`{words}` is not in {last}");
    }
    for garbage in ["garbage".repeat(10_000).as_bytes(), &[0; 8192]] {
        std::fs::write(&file, garbage).unwrap();
        let (status, last) = refusal(dir.path());
        assert_eq!(status, 65, "{last}");
        assert!(last.contains("is damaged"), "{last}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_cannot_be_written_or_is_held_is_not_called_damaged() {
    let _alone = ALONE.lock().await;
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path()).await;
    let file = dir.path().join("reknitd.redb");
    let held = Database::open(&file).unwrap();
    let (status, last) = refusal(dir.path());
    assert_eq!(status, 69, "{last}");
    assert!(last.contains("in use by another process") && last.contains("reknitd.redb"), "{last}");
    drop(held);

    let before = std::fs::read(&file).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
    // Root writes to it all the same, unless it has given up that privilege.
    let program = env!("CARGO_BIN_EXE_reknitd");
    let root = rustix::process::geteuid().is_root();
    let mut command = std::process::Command::new(if root { "setpriv" } else { program });
    if root {
        command.args(["--bounding-set=-dac_override", "--", program]);
    }
    command.args(["--listen", "127.0.0.1:0", "--state-dir", dir.path().to_str().unwrap()]);
    let output = command.output().unwrap();
    let last = String::from_utf8(output.stderr).unwrap();
    let last = last.lines().last().unwrap();
    assert_eq!(output.status.code(), Some(69), "{last}");
    assert!(last.contains("Permission denied") && last.contains("are writable"), "{last}");
    assert!(last.contains(file.to_str().unwrap()), "{last}");
    assert_eq!(std::fs::read(&file).unwrap(), before);
}

/// Format 1 had its records plain.
#[tokio::test(flavor = "multi_thread")]
async fn what_format_1_wrote_is_read() {
    let _alone = ALONE.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let truth = filled(dir.path()).await;
    edit(dir.path(), |write| {
        write.open_table(META).unwrap().insert("format", 1).unwrap();
        for record in &truth.jobs {
            let plain = serde_json::to_vec(record).unwrap();
            write.open_table(JOBS).unwrap().insert(record.name.0.as_str(), plain.as_slice()).unwrap();
        }
    });
    let store = Embedded::open(dir.path()).await.unwrap();
    assert_eq!(store.load().await.unwrap(), truth);
    store.put_job(&truth.jobs[3]).await.unwrap();
    assert_eq!(store.load().await.unwrap(), truth);
    drop(store);
    edit(dir.path(), |write| {
        let jobs = write.open_table(JOBS).unwrap();
        let first = |key| jobs.get(key).unwrap().unwrap().value()[0];
        assert_eq!((first("job02"), first("job03")), (b'{', 0x1f));
        let meta = write.open_table(META).unwrap();
        assert_eq!(meta.get("format").unwrap().unwrap().value(), 2, "an older daemon is not refused");
    });
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
