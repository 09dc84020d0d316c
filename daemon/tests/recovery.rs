//! A job on the wire: to Running, through a daemon's death, and through a worker's.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use reknit_proto::v1;
use rustix::process::Signal;
use std::collections::BTreeSet;
use support::peers::{Node, Told};
use support::{Daemon, submit, wait_for_job};

fn running(step: u64) -> impl Fn(&v1::Job) -> bool {
    move |job| job.phase == "Running" && job.committed_step() >= step
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_runs_outlives_its_daemon_and_a_worker() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::embedded(dir.path());
    let address = daemon.address.clone();
    let mut admin = daemon.admin().await;
    let mut node = Node::start(address.clone(), 4);

    submit(&mut admin, "j").await;
    let first = wait_for_job(&mut admin, "j", running(1)).await;
    assert_eq!((first.committed_step(), first.workers.len()), (1, 4));
    assert_eq!((first.last_loss, first.live), (Some(5.0), true));

    let mut tickets = BTreeSet::new();
    let mut prepared = 0;
    let mut resumed = 0;
    while resumed < 4 {
        match node.next_told().await {
            Told::Prepare { epoch, ticket, .. } => {
                assert_eq!((epoch, ticket.len()), (first.epoch, 32));
                tickets.insert(ticket);
                prepared += 1;
            }
            Told::Resume { epoch, .. } => {
                assert_eq!(epoch, first.epoch);
                resumed += 1;
            }
            Told::Welcome { .. } => {}
            told @ (Told::Close { .. } | Told::Stop { .. }) => panic!("{told:?}"),
        }
    }
    assert_eq!((prepared, tickets.len()), (4, 1), "one ticket for all members");

    // The daemon dies. Nobody is told to stop, and the job goes on under the same epoch.
    daemon.kill();
    let state = dir.path().to_str().unwrap();
    let mut daemon = Daemon::start(&["--listen", &address, "--state-dir", state]);
    let mut admin = daemon.admin().await;
    let again = wait_for_job(&mut admin, "j", running(1)).await;
    assert_eq!((again.epoch, again.committed_step()), (first.epoch, 1));
    for _ in 0..4 {
        let told = node.next_told().await;
        assert!(matches!(told, Told::Welcome { .. }), "{told:?}");
    }

    // A worker dies: the others go on, under a new epoch with a new ticket.
    node.kill_worker("GPU-0");
    let without = |job: &v1::Job| running(2)(job) && job.epoch > first.epoch;
    let after = wait_for_job(&mut admin, "j", without).await;
    let told = loop {
        if let Told::Prepare { epoch, ticket, .. } = node.next_told().await {
            break (epoch, ticket);
        }
    };
    assert!(told.0 > first.epoch && told.0 <= after.epoch);
    assert!(!tickets.contains(&told.1), "an epoch's ticket is never used again");

    let job = "j".to_owned();
    let incidents = admin.list_incidents(v1::ListIncidentsRequest { job }).await.unwrap();
    let incident = incidents.into_inner().incidents.pop().expect("an incident");
    assert_eq!((incident.kind.as_str(), incident.gpu.as_str()), ("worker_killed", "GPU-0"));
    assert!(incident.signal.contains("signal 9"), "{incident:?}");

    daemon.signal(Signal::TERM);
    daemon.wait_for_log("stopping");
    let log = daemon.log.join("\n");
    assert!(log.contains("layout committed"), "{log}");
    for ticket in tickets.iter().chain([&told.1]) {
        assert!(!log.contains(&format!("{ticket:?}")), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_daemon_does_not_know_it_does_not_tell_and_where_a_job_ended_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::embedded(dir.path());
    let address = daemon.address.clone();
    let mut admin = daemon.admin().await;
    let node = Node::start(address.clone(), 4);
    submit(&mut admin, "j").await;
    wait_for_job(&mut admin, "j", running(1)).await;
    daemon.kill();

    // Nobody finds this one, so it hears nothing.
    let alone = Daemon::embedded(dir.path());
    let request = v1::GetJobRequest { name: "j".to_owned() };
    let job = alone.admin().await.get_job(request.clone()).await.unwrap().into_inner();
    assert_eq!((job.phase.as_str(), job.live), ("Rebuilding", false));
    assert_eq!((job.committed_step, job.last_loss), (None, None));
    alone.kill();

    let state = dir.path().to_str().unwrap();
    let daemon = Daemon::start(&["--listen", &address, "--state-dir", state]);
    let mut admin = daemon.admin().await;
    wait_for_job(&mut admin, "j", running(1)).await;
    admin.stop_job(v1::StopJobRequest { name: "j".to_owned() }).await.unwrap();
    (0..4).for_each(|gpu| node.kill_worker(&format!("GPU-{gpu}")));
    let ended = wait_for_job(&mut admin, "j", |job| job.phase == "Stopped").await;
    assert_eq!((ended.committed_step, ended.last_loss, ended.live), (Some(1), Some(5.0), true));
    daemon.kill();

    let later = Daemon::embedded(dir.path());
    let job = later.admin().await.get_job(request).await.unwrap().into_inner();
    assert_eq!((job.phase.as_str(), job.committed_step, job.last_loss), ("Stopped", Some(1), Some(5.0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_must_begin_with_hello_and_unknown_workers_are_told_to_stop_where_some_job_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::embedded(dir.path());
    let url = format!("http://{}", daemon.address);
    let mut client = v1::worker_client::WorkerClient::connect(url.clone()).await.unwrap();

    let progress = v1::worker_report::Report::Progress(v1::Progress::default());
    let report = v1::WorkerReport { report: Some(progress) };
    let refused = client.session(tokio_stream::once(report)).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    assert!(refused.message().contains("Hello"), "{refused}");

    let report = v1::WorkerReport {
        report: Some(v1::worker_report::Report::Hello(v1::WorkerHello {
            worker: Some(v1::WorkerKey { job: "gone".to_owned(), gpu: "GPU-0".to_owned(), incarnation: 3 }),
            node: "n0".to_owned(),
            endpoint: Some(v1::Endpoint::default()),
            pid: 1,
            connection: 0,
            state: Some(v1::WorkerState { phase: 1, ..v1::WorkerState::default() }),
        })),
    };
    let (_open, later) = tokio::sync::watch::channel(false);
    let hello = || {
        let later = tokio_stream::wrappers::WatchStream::from_changes(later.clone());
        let later = tokio_stream::StreamExt::map(later, |_| v1::WorkerReport::default());
        tokio_stream::StreamExt::chain(tokio_stream::once(report.clone()), later)
    };
    let mut orders = client.session(hello()).await.unwrap().into_inner();
    assert_eq!(orders.message().await.unwrap(), None, "a store without any job ends nobody");

    submit(&mut daemon.admin().await, "j").await;
    let mut orders = client.session(hello()).await.unwrap().into_inner();
    let order = orders.message().await.unwrap().unwrap().order;
    assert!(matches!(order, Some(v1::worker_order::Order::Stop(_))), "{order:?}");
    assert_eq!(orders.message().await.unwrap(), None);

    let mut agent = v1::agent_client::AgentClient::connect(url).await.unwrap();
    let nameless = v1::agent_report::Report::Hello(v1::AgentHello::default());
    let report = v1::AgentReport { report: Some(nameless) };
    let refused = agent.session(tokio_stream::once(report)).await.unwrap_err();
    assert_eq!(refused.message(), "node is missing");
}
