//! Leadership and fencing over a real etcd, which Debian's etcd-server provides.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use reknit_proto::v1;
use reknit_proto::v1::daemon::Role;
use rustix::process::Signal;
use std::time::{Duration, Instant};
use support::etcd::{EtcdServer, free_url};
use support::{Daemon, job_names, submit};

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_over_when_the_leader_is_killed_and_at_once_when_it_stops() {
    let etcd = EtcdServer::start().await;
    let mut first = etcd.daemon();
    first.wait_until_serving();
    submit(&mut first.admin().await, "one").await;
    let mut second = etcd.daemon();
    second.wait_until_standing_by();
    let leader = format!("http://{}", first.address);
    let mut waiting = second.admin().await;
    assert_eq!(job_names(&mut waiting).await, ["one"], "read from the store");
    let stored = waiting.get_job(v1::GetJobRequest { name: "one".to_owned() }).await.unwrap().into_inner();
    assert_eq!(stored.phase, "Pending");
    assert_eq!((stored.live, stored.committed_step, stored.last_loss), (false, None, None));
    let refused = waiting.list_nodes(v1::ListNodesRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable);
    assert!(refused.message().contains(&leader), "{refused}");
    assert_eq!(reknit_client::leader(&refused), Some(leader.as_str()));
    let view = waiting.get_daemon(v1::GetDaemonRequest {}).await.unwrap().into_inner();
    assert_eq!((view.role(), view.leader, view.term), (Role::StandBy, leader, 0));
    drop(waiting);

    let killed = Instant::now();
    first.kill();
    second.wait_until_serving();
    println!("killed leader replaced after {:?}", killed.elapsed());
    let mut admin = second.admin().await;
    assert_eq!(job_names(&mut admin).await, ["one"]);
    submit(&mut admin, "two").await;
    let view = admin.get_daemon(v1::GetDaemonRequest {}).await.unwrap().into_inner();
    assert_eq!((view.role(), &view.leader), (Role::Leading, &view.address));
    assert!(view.term > 0);
    drop(admin);

    let mut third = etcd.daemon();
    third.wait_for_log("waiting to lead");
    let stopped = Instant::now();
    second.signal(Signal::TERM);
    assert_eq!(second.exit().0, 0);
    third.wait_until_serving();
    let waited = stopped.elapsed();
    println!("stopped leader replaced after {waited:?}");
    assert!(waited < Duration::from_secs(1), "its lease was not given back: {waited:?}");
    assert_eq!(job_names(&mut third.admin().await).await, ["one", "two"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_slept_through_its_lease_writes_nothing_and_stands_by() {
    let etcd = EtcdServer::start().await;
    let mut old = etcd.daemon();
    old.wait_until_serving();
    let mut admin = old.admin().await;
    submit(&mut admin, "one").await;
    let mut new = etcd.daemon();
    new.wait_for_log("waiting to lead");

    old.signal(Signal::STOP);
    new.wait_until_serving();
    // Waits in the old leader's socket until it wakes.
    let late = tokio::spawn(async move {
        let job_toml = support::job_file("late");
        admin.submit_job(v1::SubmitJobRequest { job_toml }).await
    });
    tokio::task::yield_now().await;
    old.signal(Signal::CONT);
    let line = old.wait_for_log("in stand-by");
    assert!(line.contains("another daemon may be in charge"), "{line}");
    late.await.unwrap().unwrap_err();
    assert_eq!(job_names(&mut new.admin().await).await, ["one"]);
    old.wait_for_log("waiting to lead");
    let refused = submit_refused(&old, "later").await;
    assert_eq!(reknit_client::leader(&refused), Some(format!("http://{}", new.address).as_str()));

    // And it is as good as any when the other goes.
    new.kill();
    old.wait_until_serving();
    assert_eq!(job_names(&mut old.admin().await).await, ["one"]);
}

async fn submit_refused(daemon: &Daemon, name: &str) -> tonic::Status {
    let job_toml = support::job_file(name);
    daemon.admin().await.submit_job(v1::SubmitJobRequest { job_toml }).await.unwrap_err()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_from_an_old_leader_is_refused_by_etcd_itself() {
    use reknitd::config::EtcdConfig;
    use reknitd::store::{Connection, Etcd, Store, StoreError};
    let etcd = EtcdServer::start().await;
    let config = EtcdConfig {
        endpoints: vec![etcd.endpoint.clone()],
        prefix: "/t/".to_owned(),
        lease_seconds: 30,
        ..EtcdConfig::default()
    };
    let connection = Connection::new(&config).unwrap();
    let old = Etcd::open(&connection, "http://old:1").await.unwrap();
    assert!(old.leads());
    old.load().await.unwrap();
    let spec = reknit_layout::JobSpec::parse(&support::job_file("j"), "job").unwrap();
    let mut record = reknit_engine::JobRecord::new(spec);
    old.put_job(&record).await.unwrap();

    // Its leader key goes, as when its lease ends, but it still believes in a long lease.
    let mut client = etcd.client().await.unwrap();
    let prefix = etcd_client::DeleteOptions::new().with_prefix();
    assert_eq!(client.delete("/t/leader", Some(prefix)).await.unwrap().deleted(), 1);
    record.explanation = "from the old leader".to_owned();
    let error = old.put_job(&record).await.unwrap_err();
    assert!(matches!(error, StoreError::LeadershipLost { .. }), "{error}");

    let new = Etcd::open(&connection, "http://new:1").await.unwrap();
    let found = new.load().await.unwrap();
    assert!(new.term() > old.term());
    assert_eq!(found.jobs.len(), 1);
    assert_eq!(found.jobs[0].explanation, "");
    record.explanation = "from the new leader".to_owned();
    new.put_job(&record).await.unwrap();
    new.put_job(&record).await.unwrap();
    assert_eq!(new.load().await.unwrap().jobs, [record.clone()]);

    // More than gRPC's usual limit of 4 MiB for one message.
    record.explanation = "x".repeat(1 << 20);
    for number in 0..6 {
        record.name.0 = format!("large{number}");
        new.put_job(&record).await.unwrap();
    }
    assert_eq!(new.load().await.unwrap().jobs.len(), 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_silence_of_etcd_is_outlived_and_a_long_one_ends_the_leadership() {
    let etcd = EtcdServer::start().await;
    let mut daemon = etcd.daemon();
    daemon.wait_until_serving();
    let mut admin = daemon.admin().await;
    etcd.signal(Signal::STOP);
    let waking = tokio::time::sleep(Duration::from_millis(700));
    let name = support::job_file("patient");
    let submitted = admin.submit_job(v1::SubmitJobRequest { job_toml: name });
    let wake = async {
        waking.await;
        etcd.signal(Signal::CONT);
    };
    tokio::join!(submitted, wake).0.unwrap();
    assert_eq!(job_names(&mut admin).await, ["patient"]);

    etcd.signal(Signal::STOP);
    daemon.wait_for_log("in stand-by");
    let refused = submit_refused(&daemon, "late").await;
    assert!(refused.message().contains("who leads is not known"), "{refused}");
    assert!(refused.message().contains(&etcd.endpoint), "{refused}");
    let line = daemon.wait_for_log("no quorum or cannot be reached");
    assert!(line.contains(&etcd.endpoint) && line.contains("training goes on"), "{line}");
    // Two tries more, of which nothing is said.
    let began = daemon.log.len();
    tokio::time::sleep(Duration::from_secs(5)).await;
    etcd.signal(Signal::CONT);
    daemon.wait_until_serving();
    let said: Vec<_> = daemon.log[began..].iter().filter(|line| line.contains("WARN")).collect();
    assert!(said.is_empty(), "{said:#?}");
    assert_eq!(job_names(&mut daemon.admin().await).await, ["patient"]);
}

async fn term(daemon: &Daemon) -> u64 {
    let view = daemon.admin().await.get_daemon(v1::GetDaemonRequest {}).await.unwrap().into_inner();
    assert_eq!(view.role(), Role::Leading);
    view.term
}

/// Agents and workers obey no term that is lower than the highest they have seen: they outlive the store.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_begins_anew_begins_with_a_higher_term() {
    let dir = tempfile::tempdir().unwrap();
    let mut last = 0;
    for _ in 0..2 {
        let daemon = Daemon::embedded(dir.path());
        let before = std::mem::replace(&mut last, term(&daemon).await);
        assert!(before < last, "the file is there: {before}, then {last}");
        daemon.kill();
    }
    // From the file to etcd, to another etcd, and to one that is wiped under the daemon.
    for _ in 0..2 {
        let etcd = EtcdServer::start().await;
        let mut client = etcd.client().await.unwrap();
        let mut daemon = etcd.daemon();
        for _ in 0..2 {
            daemon.wait_until_serving();
            let before = std::mem::replace(&mut last, term(&daemon).await);
            assert!(before < last, "etcd is empty: {before}, then {last}");
            let stored = client.get("/reknit/term", None).await.unwrap();
            assert_eq!(stored.kvs()[0].value_str().unwrap(), last.to_string());
            let all = etcd_client::DeleteOptions::new().with_prefix();
            assert!(client.delete("/reknit/", Some(all)).await.unwrap().deleted() > 2);
            daemon.wait_for_log("in stand-by");
        }
    }
    // And a clock that was set back changes nothing where the store is there.
    let etcd = EtcdServer::start().await;
    let ahead = u64::MAX / 2;
    etcd.client().await.unwrap().put("/reknit/term", ahead.to_string(), None).await.unwrap();
    let mut daemon = etcd.daemon();
    daemon.wait_until_serving();
    assert_eq!(term(&daemon).await, ahead + 1);
}

/// What an operator may do to the key of a leader, with a lease that lives long after the test.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_whose_key_is_deleted_or_replaced_stands_by_and_one_leads() {
    let lease = Duration::from_secs(6);
    let etcd = EtcdServer::start().await;
    let arguments = ["--listen", "127.0.0.1:0", "--store", "etcd", "--endpoints", &etcd.endpoint];
    let start = || Daemon::spawn(&[&arguments[..], &["--etcd-lease-seconds", "6"]].concat());
    let mut client = etcd.client().await.unwrap();
    let mut old = start();
    old.wait_until_serving();
    let mut new = start();
    new.wait_until_standing_by();
    for way in ["deleted", "overwritten", "replaced"] {
        let key = leaders(&mut client).await.remove(0);
        let done = Instant::now();
        match way {
            "deleted" => drop(client.delete(key, None).await.unwrap()),
            "overwritten" => drop(client.put(key, "x", None).await.unwrap()),
            "replaced" => {
                client.delete(key.clone(), None).await.unwrap();
                client.put(key, "x", None).await.unwrap();
            }
            other => panic!("{other}"),
        }
        new.wait_until_serving();
        let line = old.wait_for_log("in stand-by");
        println!("{way}: the old leader stood by after {:?}", done.elapsed());
        assert!(done.elapsed() < lease + Duration::from_secs(1), "{way}: {:?}", done.elapsed());
        assert!(line.contains("deleted or overwrote the leader's key"), "{way}: {line}");
        old.wait_for_log("waiting to lead");
        let mut roles = Vec::new();
        for daemon in [&old, &new] {
            let view = daemon.admin().await.get_daemon(v1::GetDaemonRequest {}).await.unwrap().into_inner();
            assert_eq!(view.leader, format!("http://{}", new.address), "{way}");
            roles.push(view.role());
        }
        assert_eq!(roles, [Role::StandBy, Role::Leading], "{way}");
        submit(&mut new.admin().await, way).await;
        std::mem::swap(&mut old, &mut new);
    }
    // A stand-by whose key went stands again.
    let candidates = leaders(&mut client).await;
    let waiting = candidates.last().unwrap().clone();
    client.delete(waiting.clone(), None).await.unwrap();
    let deadline = Instant::now() + support::PATIENCE;
    while !leaders(&mut client).await.contains(&waiting) {
        assert!(Instant::now() < deadline, "it stands no more");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    old.kill();
    new.wait_until_serving();
    assert_eq!(job_names(&mut new.admin().await).await, ["deleted", "overwritten", "replaced"]);
}

/// The candidates' keys, with their leases, oldest first.
async fn leaders(client: &mut etcd_client::Client) -> Vec<String> {
    use etcd_client::{GetOptions, SortOrder, SortTarget};
    let oldest_first = GetOptions::new().with_prefix().with_sort(SortTarget::Mod, SortOrder::Ascend);
    let found = client.get("/reknit/leader/", Some(oldest_first)).await.unwrap();
    let leased = found.kvs().iter().filter(|kv| kv.lease() != 0);
    leased.map(|kv| kv.key_str().unwrap().to_owned()).collect()
}

/// Refused at once, a daemon could try a hundred times in a second; and it is as good as any when there is room again.
#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_is_full_is_complained_of_now_and_again() {
    use etcd_client::{AlarmAction, AlarmOptions, AlarmType, CompactionOptions, DeleteOptions};
    let etcd = EtcdServer::start_plain(&["--quota-backend-bytes", "16777216"]).await;
    let mut client = etcd.client().await.unwrap();
    let mut daemon = etcd.daemon();
    daemon.wait_until_serving();
    let mut number = 0;
    let full = loop {
        if let Err(error) = client.put(format!("/fill/{number}"), vec![7; 1 << 20], None).await {
            break error.to_string();
        }
        number += 1;
    };
    assert!(full.contains("database space exceeded"), "{full}");
    let began = daemon.log.len();
    let refused = submit_refused(&daemon, "one").await;
    assert_eq!(refused.code(), tonic::Code::Unavailable, "{refused}");
    daemon.wait_for_log("cannot lead");
    // For as long as that lasts.
    tokio::time::sleep(Duration::from_secs(4)).await;

    let all = DeleteOptions::new().with_prefix();
    let deleted = client.delete("/fill/", Some(all)).await.unwrap();
    let physically = Some(CompactionOptions::new().with_physical());
    client.compact(deleted.header().unwrap().revision(), physically).await.unwrap();
    client.defragment().await.unwrap();
    let member = deleted.header().unwrap().member_id();
    let mut of_member = AlarmOptions::new();
    of_member.with_member(member);
    client.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(of_member)).await.unwrap();
    daemon.wait_until_serving();
    let said = daemon.log[began..].iter().filter(|line| line.contains("database space exceeded"));
    let said: Vec<_> = said.collect();
    // The write, the end of the leadership, and that none can begin.
    assert_eq!(said.len(), 3, "{said:#?}");
    submit(&mut daemon.admin().await, "one").await;
}

/// With a lease that outlives the test, in the middle of a write that nobody answers.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_lease_makes_no_daemon_deaf() {
    let etcd = EtcdServer::start().await;
    let arguments = ["--listen", "127.0.0.1:0", "--store", "etcd", "--endpoints", &etcd.endpoint];
    let mut daemon = Daemon::spawn(&[&arguments[..], &["--etcd-lease-seconds", "3600"]].concat());
    daemon.wait_until_serving();
    let mut admin = daemon.admin().await;
    etcd.signal(Signal::STOP);
    let job_toml = support::job_file("one");
    let asked = Instant::now();
    let write = tokio::spawn(async move { admin.submit_job(v1::SubmitJobRequest { job_toml }).await });
    daemon.wait_for_log("a write failed");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.exit().0, 0);
    println!("stopped after {:?}", asked.elapsed());
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
    write.await.unwrap().unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_is_not_there_is_named_and_status_69() {
    let nobody = free_url();
    let listen = ["--listen", "127.0.0.1:0", "--store", "etcd", "--endpoints", &nobody];
    let (status, last) = Daemon::spawn(&listen).exit();
    assert_eq!(status, 69);
    assert!(last.contains(&nobody) && last.contains("--endpoints"), "{last}");
}
