//! What the daemon hears comes once and in order, whatever dies.

#![allow(clippy::unwrap_used)]

mod harness;

use harness::{Daemon, Node, kill, runs, until};
use reknit_proto::v1;
use reknit_proto::v1::agent_order::Order;
use reknit_proto::v1::{HealthClass, Observability};
use std::time::Duration;

const CALM: Duration = Duration::from_millis(700);

fn told(log: &std::path::Path, words: &str) -> usize {
    std::fs::read_to_string(log).unwrap().matches(words).count()
}

#[tokio::test]
async fn a_transition_survives_the_agents_death_before_its_acknowledgement() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let mut agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let before = session.hello.clone();
    session.fall_silent();
    node.set(1, "lost=true");
    let (first, _) = session.health().await;
    assert_eq!(first.sequence, before.next_sequence);
    assert_eq!(first.health(), HealthClass::Fatal);
    agent.kill();

    let mut agent = node.start(&daemon);
    let mut session = daemon.session().await;
    assert_ne!(session.hello.instance, before.instance);
    assert_eq!(session.hello.boot_id, before.boot_id);
    let (again, _) = session.health().await;
    assert_eq!(again, first, "the same, under the same number");
    assert!(session.hello.next_sequence > first.sequence, "numbers are never given twice");
    let gpus = &session.hello.gpus;
    let lost = gpus.iter().find(|gpu| gpu.uuid == node.gpus[1]).unwrap();
    assert_eq!(
        (lost.health(), lost.verdict().cause.as_str()),
        (HealthClass::Fatal, first.verdict().cause.as_str())
    );
    assert!(
        !lost.verdict().shards_readable
            && !lost.verdict().rejoin.is_empty()
            && !lost.verdict().action.is_empty(),
        "{lost:?}"
    );
    session.quiet(CALM).await;
    // The acknowledgement is on disk when the next heartbeat is sent.
    session.heartbeat().await;
    agent.kill();

    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.quiet(CALM).await;
    drop(agent);
}

#[tokio::test]
async fn what_happens_while_the_daemon_is_away_is_told_though_the_agent_dies_too() {
    let node = Node::new(3);
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (mut agent, log) = node.start_logged(&address);
    until("the probe reads", || told(&log, "probe ready") == 1).await;
    node.xid(0, 4711);
    until("the first", || told(&log, "GPU health") == 1).await;
    agent.kill();
    let (_agent, _) = node.start_logged(&address);
    until("another probe reads", || told(&log, "probe ready") == 2).await;
    node.xid(1, 4712);
    until("the second", || told(&log, "GPU health") == 2).await;

    let mut daemon = Daemon::start_at(address).await;
    let mut session = daemon.session().await;
    let (first, second) = (session.health().await.0, session.health().await.0);
    assert_eq!((first.gpu.as_str(), second.gpu.as_str()), (node.gpus[0].as_str(), node.gpus[1].as_str()));
    assert!(
        first.verdict().cause.contains("4711") && second.verdict().cause.contains("4712"),
        "{first:?} {second:?}"
    );
    assert!(first.sequence < second.sequence && second.sequence < session.hello.next_sequence);
    assert!(first.at_ms < second.at_ms);
    session.quiet(CALM).await;
}

#[tokio::test]
async fn a_state_folder_that_cannot_be_written_is_told_and_survived() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    // Each file is written beside its place first; a folder there cannot be written, not even by root.
    let blockers = ["transitions", "workers", "gpus", "health", "power"];
    let blockers = blockers.map(|name| node.state_dir().join(format!("{name}.new")));
    blockers.iter().for_each(|path| std::fs::create_dir_all(path).unwrap());
    let (mut agent, log) = node.start_logged(&daemon.address);
    let mut session = daemon.session().await;
    session.fall_silent();
    session.spawn(&node.gpus[0], 1).await;
    let worker = session.spawned().await.pid;
    node.set(1, "lost=true");
    let (lost, _) = session.health().await;
    assert_eq!(lost.health(), HealthClass::Fatal);
    assert!(
        told(&log, "cannot record transitions") > 0 && told(&log, "cannot record the running workers") > 0
    );
    assert!(!node.state_dir().join("workers.json").exists(), "it could be written");

    blockers.iter().for_each(|path| std::fs::remove_dir(path).unwrap());
    let again = ["transitions are recorded again", "the running workers are recorded again"];
    until("it is written again", || again.iter().all(|words| told(&log, words) == 1)).await;
    agent.kill();
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    assert_eq!(session.hello.workers[0].pid, worker);
    assert_eq!(session.health().await.0, lost);
    drop(agent);
}

#[tokio::test]
async fn a_restart_without_the_driver_names_the_gpus_of_before() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let mut agent = node.start(&daemon);
    let _session = daemon.session().await;
    agent.kill();
    let away = node.folder.path().join("away.json");
    std::fs::rename(node.driver(), &away).unwrap();
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    assert_eq!(session.hello.observability(), Observability::Blind);
    let told: Vec<_> = session.hello.gpus.iter().map(v1::Gpu::health).collect();
    assert_eq!(told, [HealthClass::Unknown; 2]);
    std::fs::rename(&away, node.driver()).unwrap();
    for _ in 0..2 {
        assert_eq!(session.health().await.0.health(), HealthClass::Healthy);
    }
    drop(agent);
}

#[tokio::test]
async fn heartbeats_carry_each_gpus_state_and_its_age() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    node.set(1, "temperature=61");
    node.set(1, "power_mw=412000");
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let beat = loop {
        let beat = session.heartbeat().await;
        if beat.gpus.iter().all(|gpu| gpu.power_limit_mw.is_some()) && beat.gpus.len() == 2 {
            break beat;
        }
    };
    let state = beat.gpus.iter().find(|gpu| gpu.uuid == node.gpus[1]).unwrap();
    assert_eq!(
        (state.temperature, state.power_mw, state.power_limit_mw),
        (Some(61), Some(412_000), Some(700_000))
    );
    assert_eq!(state.health(), HealthClass::Healthy);
    assert!(state.age_ms.unwrap() < 1_000, "{state:?}");

    // The readings of a frozen probe grow old; the others' values stay.
    kill(harness::probe_of(agent.pid()).unwrap(), "STOP");
    let old = loop {
        let beat = session.heartbeat().await;
        if beat.gpus[0].age_ms.unwrap() > 1_500 {
            break beat;
        }
    };
    assert!(old.gpus.iter().all(|gpu| gpu.temperature.is_some()));
    let blind = loop {
        let beat = session.heartbeat().await;
        if beat.observability() == Observability::Blind {
            break beat;
        }
    };
    assert!(blind.gaps[0].contains("the probe is silent"), "{:?}", blind.gaps);
    while session.heartbeat().await.observability() == Observability::Blind {}
    drop(agent);
}

#[tokio::test]
async fn an_order_the_agent_cannot_carry_out_is_answered_with_why() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(1));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    use v1::agent_order::Order;
    session.order(Order::EndQuiesce(v1::EndQuiesce { request: 1 })).await;
    session.order(Order::ReleaseGpu(v1::ReleaseGpu { request: 2, gpu: "GPU-no".to_owned() })).await;
    session.order(Order::ReleaseGpu(v1::ReleaseGpu { request: 3, gpu: node.gpus[0].clone() })).await;
    let limit = v1::SetPowerLimit { request: 4, gpu: "GPU-no".to_owned(), limit_mw: 1, lease_seconds: 1 };
    session.order(Order::SetPowerLimit(limit)).await;
    for (request, words) in
        [(1, "is not quiesced"), (2, "no GPU GPU-no"), (3, "it is healthy"), (4, "no GPU GPU-no")]
    {
        let done = session.done().await;
        assert_eq!((done.request, done.ok), (request, false));
        assert!(done.message.contains(words), "{}", done.message);
    }
    assert!(runs(agent.pid()));
}

/// Nobody listens there.
fn dead() -> String {
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    format!("http://{address}")
}

#[tokio::test]
async fn what_is_wrong_with_each_of_several_daemons_is_logged_once() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(1));
    let (_agent, log) = node.start_with(&format!("{},{},http://{}", dead(), dead(), daemon.address));
    for _ in 0..6 {
        daemon.say_only(None).await;
    }
    let _session = daemon.session().await;
    until("the session is open", || told(&log, "session with the daemon open") == 1).await;
    let text = std::fs::read_to_string(&log).unwrap();
    assert_eq!(told(&log, "no session with the daemon"), 3, "{text}");
}

#[tokio::test]
async fn an_order_before_the_welcome_is_not_obeyed() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(1));
    let (_agent, log) = node.start_logged(&daemon.address);
    let worker = Some(harness::key(&node.gpus[0], 1));
    daemon.say_only(Some(Order::Spawn(v1::SpawnWorker { worker, epoch: 1 }))).await;
    let mut session = daemon.session().await;
    assert_eq!(session.hello.workers, []);
    session.quiet(CALM).await;
    assert_eq!(told(&log, "before it said which leadership orders"), 1);
}
