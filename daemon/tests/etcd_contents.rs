//! What a daemon finds in etcd and cannot trust: it says so and leaves it as it is.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use etcd_client::{Client, DeleteOptions};
use reknit_proto::v1;
use rustix::process::Signal;
use support::etcd::{EtcdServer, PREFIX, contents};
use support::{Daemon, job_names, submit};

/// What must be said, beside where.
struct Refused<'a> {
    status: i32,
    words: &'a [&'a str],
}

const DAMAGED: &[&str] =
    &["is damaged", "nothing was changed", "restore etcd from a snapshot", "--etcd-prefix"];

/// With a job in it, and nobody leading.
async fn filled() -> (EtcdServer, Client) {
    let etcd = EtcdServer::start().await;
    let mut daemon = etcd.daemon();
    daemon.wait_until_serving();
    submit(&mut daemon.admin().await, "one").await;
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.exit().0, 0);
    let client = etcd.client().await.unwrap();
    (etcd, client)
}

async fn put(client: &mut Client, key: &str, value: impl Into<Vec<u8>>) {
    client.put(format!("{PREFIX}{key}"), value, None).await.unwrap();
}

async fn get(client: &mut Client, key: &str) -> Vec<u8> {
    client.get(format!("{PREFIX}{key}"), None).await.unwrap().kvs()[0].value().to_vec()
}

/// A daemon that starts ends at once: etcd's revision says that it has written nothing, not even to lead.
async fn refused(etcd: &EtcdServer, client: &mut Client, place: &str, wanted: &Refused<'_>) {
    let before = contents(client).await;
    let (status, last) = etcd.daemon().exit();
    println!("{status}: {last}");
    assert_eq!(status, wanted.status, "{last}");
    assert!(last.starts_with("reknitd: ") && last.contains(place), "`{place}` is not in {last}");
    for words in wanted.words {
        assert!(last.contains(words), "`{words}` is not in {last}");
    }
    assert_eq!(contents(client).await, before, "something was written");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_trusted_is_named_and_left_alone() {
    let (etcd, mut client) = filled().await;
    let whole = get(&mut client, "jobs/one").await;
    let damaged = |word| Refused { status: 65, words: [DAMAGED, &[word]].concat().leak() };
    let truncated = &whole[..whole.len() / 2];
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for value in [truncated, &flipped, b"", b"garbage", b"{\"name\": 3}", &[0x1f, 0x8b]] {
        put(&mut client, "jobs/one", value).await;
        refused(&etcd, &mut client, "/reknit/jobs/one", &damaged("")).await;
    }
    put(&mut client, "jobs/one", whole.clone()).await;

    for (key, value, place, wanted) in [
        ("jobs/two", whole.clone(), "/reknit/jobs/two", damaged("of job `one`")),
        ("incidents/one/7", whole.clone(), "/reknit/incidents/one/7", damaged("")),
        ("incidents/one/seven", Vec::new(), "incidents/one/seven", foreign()),
        ("other/jobs/one", whole.clone(), "/reknit/other/jobs/one", foreign()),
        ("note", b"to whom it may concern".to_vec(), "/reknit/note", foreign()),
    ] {
        put(&mut client, key, value).await;
        refused(&etcd, &mut client, place, &wanted).await;
        client.delete(format!("{PREFIX}{key}"), None).await.unwrap();
    }

    let newer = ["newer reknitd (format 99", "nothing was changed", "run the newer version", "--etcd-prefix"];
    for (format, wanted) in [
        ("99", Refused { status: 65, words: &newer }),
        ("0", damaged("no format number")),
        ("two", damaged("no format number")),
    ] {
        put(&mut client, "format", format).await;
        // What is of a newer format is not looked at.
        put(&mut client, "jobs/one", "written by tomorrow's daemon").await;
        refused(&etcd, &mut client, PREFIX, &wanted).await;
        put(&mut client, "jobs/one", whole.clone()).await;
    }
    client.delete(format!("{PREFIX}format"), None).await.unwrap();
    refused(&etcd, &mut client, PREFIX, &damaged("no format number")).await;

    put(&mut client, "format", "2").await;
    put(&mut client, "term", "seven").await;
    refused(&etcd, &mut client, "/reknit/term", &damaged("no number of a leadership")).await;
    client.delete(format!("{PREFIX}term"), None).await.unwrap();
    let mut daemon = etcd.daemon();
    daemon.wait_until_serving();
    assert_eq!(job_names(&mut daemon.admin().await).await, ["one"]);
}

fn foreign() -> Refused<'static> {
    Refused { status: 65, words: &["nothing that reknitd wrote", "delete it", "--etcd-prefix"] }
}

/// Damage that comes while one daemon leads and another stands by.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_tells_of_damage_and_does_not_lead_over_it() {
    let etcd = EtcdServer::start().await;
    let mut client = etcd.client().await.unwrap();
    let mut first = etcd.daemon();
    first.wait_until_serving();
    submit(&mut first.admin().await, "one").await;
    let mut second = etcd.daemon();
    second.wait_until_standing_by();
    put(&mut client, "jobs/one", "garbage").await;

    let mut waiting = second.admin().await;
    let told = waiting.get_job(v1::GetJobRequest { name: "one".to_owned() }).await.unwrap_err();
    assert_eq!(told.code(), tonic::Code::Unavailable);
    assert!(told.message().contains("/reknit/jobs/one") && told.message().contains("is damaged"), "{told}");
    drop(waiting);
    // The leader has all it needs in memory.
    assert_eq!(job_names(&mut first.admin().await).await, ["one"]);

    let term = get(&mut client, "term").await;
    first.kill();
    let (status, last) = second.exit();
    assert_eq!(status, 65, "{last}");
    assert!(last.contains("/reknit/jobs/one") && last.contains("is damaged"), "{last}");
    let (keys, _) = contents(&mut client).await;
    let keys = keys.iter().map(|(key, value, _)| (key.as_str(), value.as_slice()));
    let leaders: Vec<_> = keys.clone().filter(|(key, _)| key.contains("/leader/")).collect();
    assert_eq!(leaders, [], "its lease was not given back");
    let wanted =
        [("/reknit/format", b"2".as_slice()), ("/reknit/jobs/one", b"garbage"), ("/reknit/term", &term)];
    assert_eq!(keys.collect::<Vec<_>>(), wanted, "something was written");
}

/// Format 1 had its records plain.
#[tokio::test(flavor = "multi_thread")]
async fn what_format_1_wrote_is_read_and_written_anew_as_it_changes() {
    let (etcd, mut client) = filled().await;
    let packed = get(&mut client, "jobs/one").await;
    let written = flate2::bufread::GzDecoder::new(packed.as_slice());
    let written: serde_json::Value = serde_json::from_reader(written).unwrap();
    let plain = written["record"].to_string();
    client.delete(PREFIX, Some(DeleteOptions::new().with_prefix())).await.unwrap();
    put(&mut client, "format", "1").await;
    put(&mut client, "jobs/one", plain.as_bytes()).await;

    let mut daemon = etcd.daemon();
    daemon.wait_until_serving();
    let mut admin = daemon.admin().await;
    assert_eq!(job_names(&mut admin).await, ["one"]);
    assert_eq!(get(&mut client, "format").await, b"2", "an older daemon is not refused");
    assert_eq!(get(&mut client, "jobs/one").await, plain.as_bytes());
    admin.stop_job(v1::StopJobRequest { name: "one".to_owned() }).await.unwrap();
    assert_eq!(get(&mut client, "jobs/one").await[..2], [0x1f, 0x8b]);
    drop(admin);
    daemon.kill();
    let mut again = etcd.daemon();
    again.wait_until_serving();
    assert_eq!(job_names(&mut again.admin().await).await, ["one"]);
    Daemon::kill(again);
}
