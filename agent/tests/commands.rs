//! What operators ask of an agent.

#![allow(clippy::unwrap_used)]

mod harness;

use harness::{Daemon, Node, Session, children, kill, probe_of, runs, until};
use reknit_proto::v1;
use reknit_proto::v1::agent_order::Order;
use reknit_proto::v1::{HealthClass, Observability};
use std::time::{Duration, Instant};

async fn quiesce(session: &Session, request: u64, seconds: u32) {
    session.order(Order::Quiesce(v1::Quiesce { request, seconds })).await;
}

async fn limit(session: &mut Session, gpu: &str, limit_mw: u32, lease_seconds: u32) -> v1::OrderDone {
    let order = v1::SetPowerLimit { request: 77, gpu: gpu.to_owned(), limit_mw, lease_seconds };
    session.order(Order::SetPowerLimit(order)).await;
    let done = session.done().await;
    assert_eq!(done.request, 77);
    done
}

/// Whether the process or one it started has the driver loaded.
fn holds_the_driver(agent: u32) -> bool {
    let all = children(agent).into_iter().chain([agent]);
    all.into_iter().any(|pid| {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        maps.contains("libreknit_simdriver")
    })
}

#[tokio::test]
async fn a_quiesce_lets_go_of_the_driver_until_it_is_ended() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.spawn(&node.gpus[0], 1).await;
    let worker = session.spawned().await.pid;
    assert!(holds_the_driver(agent.pid()));

    quiesce(&session, 5, 60).await;
    let done = session.done().await;
    assert_eq!((done.request, done.ok), (5, true), "{}", done.message);
    assert!(done.message.contains("1 min"), "{}", done.message);
    assert!(!holds_the_driver(agent.pid()));
    for unknown in &session.passed {
        assert_eq!(unknown.health(), HealthClass::Unknown);
        assert!(unknown.verdict().cause.starts_with("quiesced"), "{}", unknown.verdict().cause);
    }
    assert_eq!(session.passed.len(), 2);
    let beat = session.heartbeat().await;
    assert_eq!(beat.observability(), Observability::Quiesced);
    assert!(runs(worker));

    // Nothing is read, and a limit is refused.
    node.set(1, "lost=true");
    assert!(!limit(&mut session, &node.gpus[0], 300_000, 60).await.ok);
    session.quiet(Duration::from_secs(1)).await;
    assert!(!holds_the_driver(agent.pid()));
    node.set(1, "lost=false");

    session.order(Order::EndQuiesce(v1::EndQuiesce { request: 6 })).await;
    let done = session.done().await;
    assert_eq!((done.request, done.ok), (6, true));
    for _ in 0..2 {
        assert_eq!(session.health().await.0.health(), HealthClass::Healthy);
    }
    assert!(holds_the_driver(agent.pid()));
    assert_ne!(session.heartbeat().await.observability(), Observability::Quiesced);
}

#[tokio::test]
async fn a_quiesce_ends_by_itself() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(1));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let begun = Instant::now();
    quiesce(&session, 1, 2).await;
    assert!(session.done().await.ok);
    assert_eq!(session.passed.len(), 1);
    let (healthy, _) = session.health().await;
    assert_eq!(healthy.health(), HealthClass::Healthy);
    assert!(begun.elapsed() >= Duration::from_secs(2), "{:?}", begun.elapsed());
    assert!(holds_the_driver(agent.pid()));
}

#[tokio::test]
async fn a_quiesce_outlives_the_agent() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let mut agent = node.start(&daemon);
    let mut session = daemon.session().await;
    quiesce(&session, 1, 60).await;
    assert!(session.done().await.ok);
    agent.kill();
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    assert_eq!(session.hello.observability(), Observability::Quiesced);
    assert!(session.hello.quiesce_left_ms > 0);
    assert_eq!(session.hello.gpus.len(), 2, "they are named though nobody looks");
    assert!(session.hello.gpus.iter().all(|gpu| gpu.health() == HealthClass::Unknown));
    // Of the first quiesce: it was not acknowledged when the agent was killed, or it was.
    while session.next(Duration::from_millis(500)).await.is_some() {}
    assert!(!holds_the_driver(agent.pid()));
    session.order(Order::EndQuiesce(v1::EndQuiesce { request: 2 })).await;
    assert!(session.done().await.ok);
    for _ in 0..2 {
        assert_eq!(session.health().await.0.health(), HealthClass::Healthy);
    }
    assert!(holds_the_driver(agent.pid()));
}

#[tokio::test]
async fn a_power_limit_is_clamped_and_its_default_comes_back() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let gpu = node.gpus[1].clone();
    let done = limit(&mut session, &gpu, 300_000, 60).await;
    assert!(done.ok && done.message.contains("300 W for 1 min"), "{}", done.message);
    assert_eq!(node.value(1, "power_limit_mw"), 300_000);
    let done = limit(&mut session, &gpu, 1_000, 60).await;
    assert!(done.ok && done.message.contains("200 W") && done.message.contains("does not allow"), "{done:?}");
    assert_eq!(node.value(1, "power_limit_mw"), 200_000);
    let done = limit(&mut session, &gpu, 0, 0).await;
    assert!(done.ok && done.message.contains("default again, 700 W"), "{done:?}");
    assert_eq!(node.value(1, "power_limit_mw"), 700_000);

    let begun = Instant::now();
    assert!(limit(&mut session, &gpu, 400_000, 1).await.ok);
    assert_eq!(node.value(1, "power_limit_mw"), 400_000);
    until("the default is back", || node.value(1, "power_limit_mw") == 700_000).await;
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert_eq!(node.value(0, "power_limit_mw"), 700_000, "the other GPU was not touched");
    let kept = || std::fs::read_to_string(node.state_dir().join("power.json")).unwrap();
    until("the lease is forgotten", || kept() == "{}").await;
    drop(agent);
}

#[tokio::test]
async fn a_power_lease_outlives_the_probe_and_the_agent_and_ends_in_time() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(1));
    let mut agent = node.start(&daemon);
    let mut session = daemon.session().await;
    assert!(limit(&mut session, &node.gpus[0], 300_000, 6).await.ok);
    let begun = Instant::now();

    // As if the GPU was reset while no probe ran.
    node.set(0, "power_limit_mw=700000");
    kill(probe_of(agent.pid()).unwrap(), "KILL");
    until("the limit is set again", || node.value(0, "power_limit_mw") == 300_000).await;
    agent.kill();
    node.set(0, "power_limit_mw=700000");
    let mut agent = node.start(&daemon);
    let _session = daemon.session().await;
    until("the limit is set again", || node.value(0, "power_limit_mw") == 300_000).await;
    assert!(begun.elapsed() < Duration::from_secs(6), "too slow a machine");

    // It ends while no agent runs.
    agent.kill();
    tokio::time::sleep(Duration::from_millis(6_100).saturating_sub(begun.elapsed())).await;
    assert_eq!(node.value(0, "power_limit_mw"), 300_000);
    let agent = node.start(&daemon);
    daemon.session().await;
    until("the default is back", || node.value(0, "power_limit_mw") == 700_000).await;
    drop(agent);
}

#[tokio::test]
async fn a_probe_now_reads_everything_now() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let mut command = node.command(&format!("http://{}", daemon.address));
    // By itself it would not look again within this test.
    let agent = harness::RunningAgent(command.env("REKNIT_PROBE_INTERVAL_MS", "60000").spawn().unwrap());
    let mut session = daemon.session().await;
    session.quiet(Duration::from_millis(500)).await;
    node.set(1, "remap_failure=true");
    session.quiet(Duration::from_secs(1)).await;
    let asked = Instant::now();
    session.order(Order::ProbeNow(v1::ProbeNow { request: 9 })).await;
    let done = session.done().await;
    assert_eq!((done.request, done.ok), (9, true), "{}", done.message);
    let drain = match session.passed.pop() {
        Some(drain) => drain,
        None => session.health().await.0,
    };
    println!("asked to told: {:?}", asked.elapsed());
    assert_eq!((drain.gpu.as_str(), drain.health()), (node.gpus[1].as_str(), HealthClass::Drain));
    drop(agent);
}

#[tokio::test]
async fn an_operator_releases_a_gpu_that_waits() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.quiet(Duration::from_millis(500)).await;
    // No reading says so: only the driver's last word was that it is gone.
    node.xid(1, 79);
    assert_eq!(session.health().await.0.health(), HealthClass::Fatal);
    session.quiet(Duration::from_secs(1)).await;
    let release = v1::ReleaseGpu { request: 3, gpu: node.gpus[1].clone() };
    session.order(Order::ReleaseGpu(release)).await;
    let done = session.done().await;
    assert!(done.ok && done.message.contains("counts as healthy"), "{done:?}");
    let healthy = session.passed.pop().unwrap();
    assert_eq!((healthy.gpu.as_str(), healthy.health()), (node.gpus[1].as_str(), HealthClass::Healthy));
    session.quiet(Duration::from_secs(1)).await;
    drop(agent);
}
