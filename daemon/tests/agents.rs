//! Agents on the wire: who may speak for a node, what is taken of what they say, and what operators ask of them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use reknit_proto::v1;
use rustix::process::Signal;
use std::path::Path;
use support::{Daemon, PATIENCE};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;
use v1::HealthClass as Class;
use v1::agent_client::AgentClient;
use v1::agent_order::Order;
use v1::agent_report::Report;

/// One agent of `n0`, as the test makes it speak.
struct Agent {
    reports: mpsc::Sender<v1::AgentReport>,
    orders: Streaming<v1::AgentOrder>,
}

impl Agent {
    async fn open(daemon: &Daemon, hello: v1::AgentHello) -> Result<Self, tonic::Status> {
        let url = format!("http://{}", daemon.address);
        let mut client: AgentClient<Channel> = AgentClient::connect(url).await.unwrap();
        let (reports, outbound) = mpsc::channel(8);
        reports.send(v1::AgentReport { report: Some(Report::Hello(hello)) }).await.unwrap();
        let orders = client.session(ReceiverStream::new(outbound)).await?.into_inner();
        let mut agent = Self { reports, orders };
        match agent.next().await? {
            Order::Welcome(welcome) => assert!(welcome.heartbeat_ms > 0),
            order => panic!("{order:?}"),
        }
        Ok(agent)
    }

    async fn next(&mut self) -> Result<Order, tonic::Status> {
        let message = tokio::time::timeout(PATIENCE, self.orders.message()).await.expect("no order comes");
        message.map(|order| order.expect("the session ended").order.unwrap())
    }

    async fn say(&self, report: Report) {
        self.reports.send(v1::AgentReport { report: Some(report) }).await.unwrap();
    }

    async fn acknowledged(&mut self, sequence: u64) {
        let order = self.next().await.unwrap();
        assert_eq!(order, Order::HealthAck(v1::HealthAck { sequence }));
    }
}

fn hello(instance: &str, next_sequence: u64) -> v1::AgentHello {
    v1::AgentHello {
        node: "n0".to_owned(),
        gpus: vec![support::peers::gpu(0)],
        instance: instance.to_owned(),
        next_sequence,
        observability: v1::Observability::Degraded.into(),
        gaps: vec!["no kernel log".to_owned()],
        ..v1::AgentHello::default()
    }
}

fn transition(sequence: u64, health: Class, cause: &str) -> Report {
    Report::Health(v1::HealthTransition {
        sequence,
        gpu: "GPU-0".to_owned(),
        verdict: Some(v1::HealthVerdict {
            health: health.into(),
            cause: cause.to_owned(),
            action: "reset it".to_owned(),
            ..v1::HealthVerdict::default()
        }),
        ..v1::HealthTransition::default()
    })
}

fn embedded(dir: &Path, operation_ms: &str) -> Daemon {
    let config = dir.join("reknitd.toml");
    std::fs::write(&config, format!("[timeouts]\noperation_ms = {operation_ms}\n")).unwrap();
    let (config, state) = (config.to_str().unwrap().to_owned(), dir.join("state"));
    Daemon::start(&["--config", &config, "--listen", "127.0.0.1:0", "--state-dir", state.to_str().unwrap()])
}

async fn node(daemon: &Daemon) -> v1::Node {
    let nodes = daemon.admin().await.list_nodes(v1::ListNodesRequest {}).await.unwrap();
    nodes.into_inner().nodes.remove(0)
}

async fn until(daemon: &Daemon, wanted: impl Fn(&v1::Node) -> bool) -> v1::Node {
    let wait = async {
        loop {
            let node = node(daemon).await;
            if wanted(&node) {
                return node;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("the node never looks so")
}

/// Everything about the cluster, as a watcher of some job sees it.
async fn watch(daemon: &Daemon) -> Streaming<v1::JobEvent> {
    let request = v1::WatchEventsRequest { job: "whichever".to_owned() };
    daemon.admin().await.watch_events(request).await.unwrap().into_inner()
}

async fn seen(events: &mut Streaming<v1::JobEvent>) -> v1::job_event::Event {
    let event = tokio::time::timeout(PATIENCE, events.message()).await.expect("no event").unwrap().unwrap();
    assert_eq!(event.job, "");
    event.event.unwrap()
}

async fn health_seen(events: &mut Streaming<v1::JobEvent>) -> (u64, Class) {
    loop {
        match seen(events).await {
            v1::job_event::Event::Health(changed) => {
                assert_eq!(changed.index, Some(0));
                return (changed.sequence, changed.health());
            }
            v1::job_event::Event::Note(_) => {}
            event => panic!("{event:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_agent_under_one_name_is_refused_until_the_first_is_silent() {
    let dir = tempfile::tempdir().unwrap();
    // A heartbeat every 100 ms: 300 ms without one is silence.
    let mut daemon = embedded(dir.path(), "500");
    let mut first = Agent::open(&daemon, hello("one", 1)).await.unwrap();
    let refused = Agent::open(&daemon, hello("two", 1)).await.map(|_| ()).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::AlreadyExists);
    assert!(refused.message().contains("another agent is connected as n0"), "{refused}");
    assert!(refused.message().contains("--node"), "{refused}");
    Agent::open(&daemon, hello("two", 1)).await.map(|_| ()).unwrap_err();
    first.say(transition(1, Class::Predict, "warm")).await;
    first.acknowledged(1).await;

    // The same agent again: the newer session counts, the older ends.
    let second = Agent::open(&daemon, hello("one", 2)).await.unwrap();
    let ended = first.next().await.unwrap_err();
    assert_eq!(ended.code(), tonic::Code::Aborted);

    // It says nothing more, though its connection stays open.
    until(&daemon, |node| node.link() == v1::NodeLink::Silent).await;
    let _third = Agent::open(&daemon, hello("two", 1)).await.unwrap();
    assert_eq!(node(&daemon).await.link(), v1::NodeLink::Connected);
    drop(second);
    daemon.signal(Signal::TERM);
    daemon.wait_for_log("stopping");
    let refusals = daemon.log.iter().filter(|line| line.contains("a second agent under this name"));
    assert_eq!(refusals.count(), 1, "{:?}", daemon.log);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_too_large_is_refused_and_says_by_how_much() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = embedded(dir.path(), "10000");
    let large = v1::AgentHello { gaps: vec!["x".repeat(50 << 20)], ..hello("a", 1) };
    let Err(status) = Agent::open(&daemon, large).await else { panic!("50 MiB were taken") };
    assert_eq!(status.code(), tonic::Code::OutOfRange, "{status}");
    assert!(status.message().contains("the limit is: 1048576 bytes"), "{status}");
    // In an open session too.
    let mut agent = Agent::open(&daemon, hello("a", 1)).await.unwrap();
    let beat = v1::AgentHeartbeat { gaps: vec!["x".repeat(2 << 20)], ..v1::AgentHeartbeat::default() };
    agent.say(Report::Heartbeat(beat)).await;
    let status = agent.next().await.unwrap_err();
    assert!(status.message().contains("the limit is: 1048576 bytes"), "{status}");
    until(&daemon, |node| node.link() == v1::NodeLink::Silent).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transition_counts_once_and_one_from_before_the_hello_is_only_told() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::embedded(dir.path());
    let mut events = watch(&daemon).await;
    let mut agent = Agent::open(&daemon, hello("one", 41)).await.unwrap();
    // Its hello says the GPU is healthy: what it was before must not be acted on.
    agent.say(transition(40, Class::Fatal, "XID 79")).await;
    agent.acknowledged(40).await;
    assert_eq!(node(&daemon).await.gpus[0].health(), Class::Healthy);
    agent.say(transition(41, Class::Drain, "remap failed")).await;
    agent.acknowledged(41).await;
    let shown = node(&daemon).await.gpus.remove(0);
    assert_eq!((shown.health(), shown.verdict().cause.as_str()), (Class::Drain, "remap failed"));
    assert_eq!(shown.verdict().action, "reset it");

    // The acknowledgement was lost, and the agent restarted: taken already.
    drop(agent);
    until(&daemon, |node| node.link() == v1::NodeLink::Silent).await;
    let mut agent = Agent::open(&daemon, hello("two", 42)).await.unwrap();
    agent.say(transition(41, Class::Drain, "remap failed")).await;
    agent.acknowledged(41).await;
    assert_eq!(node(&daemon).await.gpus[0].health(), Class::Healthy, "the hello is newer");
    agent.say(transition(42, Class::Predict, "warm")).await;
    agent.acknowledged(42).await;
    let seen =
        [health_seen(&mut events).await, health_seen(&mut events).await, health_seen(&mut events).await];
    assert_eq!(seen, [(40, Class::Fatal), (41, Class::Drain), (42, Class::Predict)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_is_a_state_of_its_own_and_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = embedded(dir.path(), "500");
    let mut events = watch(&daemon).await;
    let agent = Agent::open(&daemon, hello("one", 1)).await.unwrap();
    let state = v1::GpuState {
        uuid: "GPU-0".to_owned(),
        age_ms: Some(40),
        temperature: Some(50),
        ..v1::GpuState::default()
    };
    let beat = v1::AgentHeartbeat {
        observability: v1::Observability::Blind.into(),
        gaps: vec!["the driver does not answer".to_owned()],
        gpus: vec![state],
        ..v1::AgentHeartbeat::default()
    };
    let before = node(&daemon).await;
    assert_eq!(before.observability(), v1::Observability::Degraded);
    assert_eq!((before.gaps, before.gpus[0].age_ms), (vec!["no kernel log".to_owned()], None));
    agent.say(Report::Heartbeat(beat)).await;
    let blind = until(&daemon, |node| node.observability() == v1::Observability::Blind).await;
    assert_eq!(blind.gpus[0].temperature, Some(50));
    assert!((40..5_000).contains(&blind.gpus[0].age_ms.unwrap()), "{blind:?}");

    let silent = until(&daemon, |node| node.link() == v1::NodeLink::Silent).await;
    let gone = until(&daemon, |node| node.link() == v1::NodeLink::Gone).await;
    assert!(!silent.connected && !gone.connected);
    assert_eq!((silent.observability(), silent.gaps.len()), (v1::Observability::Unspecified, 0));
    assert_eq!(silent.gpus[0].temperature, None, "it is old");
    assert_eq!(silent.link_since_us, gone.link_since_us);
    assert!(gone.gpus[0].age_ms.unwrap() >= 1_000, "the reading ages: {gone:?}");
    let _agent = Agent::open(&daemon, hello("one", 1)).await.unwrap();
    for told in ["node n0 is silent", "node n0 is gone", "node n0 is back"] {
        let v1::job_event::Event::Note(note) = seen(&mut events).await else { panic!("no note") };
        assert!(note.text.starts_with(told), "{}", note.text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_operator_asks_is_answered_with_the_agents_words() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::embedded(dir.path());
    let mut admin = daemon.admin().await;
    let quiesce =
        |seconds, node: &str| v1::QuiesceNodeRequest { node: node.to_owned(), seconds, force: false };
    let unknown = admin.quiesce_node(quiesce(60, "n0")).await.unwrap_err();
    assert_eq!(unknown.code(), tonic::Code::NotFound);
    assert!(unknown.message().contains("reknit node list"), "{unknown}");
    assert_eq!(admin.quiesce_node(quiesce(0, "n0")).await.unwrap_err().code(), tonic::Code::InvalidArgument);

    let mut agent = Agent::open(&daemon, hello("one", 1)).await.unwrap();
    let answers = tokio::spawn(async move {
        let Ok(Order::Quiesce(order)) = agent.next().await else { panic!("no quiesce") };
        assert_eq!(order.seconds, 60);
        let (request, message) = (order.request, "every handle is closed".to_owned());
        agent.say(Report::Done(v1::OrderDone { request, ok: true, message })).await;
        let Ok(Order::EndQuiesce(order)) = agent.next().await else { panic!("no resume") };
        let (request, message) = (order.request, "it is read again".to_owned());
        agent.say(Report::Done(v1::OrderDone { request, ok: true, message })).await;
        let Ok(Order::SetPowerLimit(order)) = agent.next().await else { panic!("no limit") };
        assert_eq!((order.gpu.as_str(), order.limit_mw, order.lease_seconds), ("GPU-0", 300_000, 60));
        let (request, message) = (order.request, "the driver refuses".to_owned());
        agent.say(Report::Done(v1::OrderDone { request, ok: false, message })).await;
        let Ok(Order::ReleaseGpu(order)) = agent.next().await else { panic!("no release") };
        let (request, message) = (order.request, "it may rejoin".to_owned());
        agent.say(Report::Done(v1::OrderDone { request, ok: true, message })).await;
        // The next question gets no answer, but an end.
        let Ok(Order::ProbeNow(_)) = agent.next().await else { panic!("no probe") };
    });
    let answer = admin.quiesce_node(quiesce(60, "n0")).await.unwrap().into_inner();
    assert_eq!(answer.message, "every handle is closed");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64;
    let quiesced = node(&daemon).await;
    assert_eq!(quiesced.observability(), v1::Observability::Quiesced);
    assert!((now + 30_000_000..now + 61_000_000).contains(&quiesced.quiesced_until_us), "{quiesced:?}");
    // What needs the driver is refused here, with the remedy.
    let restore = v1::RestoreGpuRequest { gpu: "GPU-0".to_owned() };
    let power = v1::SetPowerLimitRequest { gpu: "GPU-0".to_owned(), limit_mw: 300_000, lease_seconds: 60 };
    for refused in [
        admin.probe_node(v1::ProbeNodeRequest { node: "n0".to_owned() }).await.unwrap_err(),
        admin.set_power_limit(power).await.unwrap_err(),
        admin.restore_gpu(restore).await.unwrap_err(),
    ] {
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        assert!(refused.message().contains("node n0 is quiesced for another"), "{refused}");
        assert!(refused.message().contains("reknit node resume n0"), "{refused}");
    }
    let resumed = admin.resume_node(v1::ResumeNodeRequest { node: "n0".to_owned() }).await.unwrap();
    assert_eq!(resumed.into_inner().message, "it is read again");
    assert_eq!(node(&daemon).await.quiesced_until_us, 0);
    let limit =
        |gpu: &str| v1::SetPowerLimitRequest { gpu: gpu.to_owned(), limit_mw: 300_000, lease_seconds: 60 };
    assert_eq!(admin.set_power_limit(limit("GPU-9")).await.unwrap_err().code(), tonic::Code::NotFound);
    let refused = admin.set_power_limit(limit("GPU-0")).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert_eq!(refused.message(), "agent of n0: the driver refuses");
    // Not drained by an operator: the agent alone holds it back.
    let restore = v1::RestoreGpuRequest { gpu: "GPU-0".to_owned() };
    assert_eq!(admin.restore_gpu(restore).await.unwrap().into_inner().message, "it may rejoin");
    let unanswered = admin.probe_node(v1::ProbeNodeRequest { node: "n0".to_owned() }).await.unwrap_err();
    assert!(unanswered.message().contains("ended before it answered"), "{unanswered}");
    answers.await.unwrap();
    let away = admin.resume_node(v1::ResumeNodeRequest { node: "n0".to_owned() }).await.unwrap_err();
    assert!(away.message().contains("is not connected"), "{away}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quiesce_is_refused_while_workers_run_unless_forced() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::embedded(dir.path());
    let mut admin = daemon.admin().await;
    let mut gpus = hello("one", 1);
    gpus.gpus = (0..4).map(support::peers::gpu).collect();
    let mut agent = Agent::open(&daemon, gpus).await.unwrap();
    support::submit(&mut admin, "j").await;
    for _ in 0..4 {
        assert!(matches!(agent.next().await.unwrap(), Order::Spawn(_)));
    }
    let request = |force| v1::QuiesceNodeRequest { node: "n0".to_owned(), seconds: 60, force };
    let refused = admin.quiesce_node(request(false)).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(refused.message().contains("worker 1.0.1 of job j"), "{refused}");
    assert!(refused.message().contains("--force"), "{refused}");
    let asked = tokio::spawn(async move { admin.quiesce_node(request(true)).await });
    let Ok(Order::Quiesce(order)) = agent.next().await else { panic!("no quiesce") };
    let (request, message) = (order.request, "done".to_owned());
    agent.say(Report::Done(v1::OrderDone { request, ok: true, message })).await;
    assert_eq!(asked.await.unwrap().unwrap().into_inner().message, "done");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_later_hello_changes_the_list_of_gpus_and_the_session_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::embedded(dir.path());
    let mut events = watch(&daemon).await;
    let mut agent = Agent::open(&daemon, hello("one", 1)).await.unwrap();
    let before = node(&daemon).await;
    // What was asked before it is still answered.
    let mut admin = daemon.admin().await;
    let probe = v1::ProbeNodeRequest { node: "n0".to_owned() };
    let asked = tokio::spawn(async move { admin.probe_node(probe).await });
    let Ok(Order::ProbeNow(order)) = agent.next().await else { panic!("no probe") };
    let mut later = hello("one", 7);
    later.gpus = (0..2).map(support::peers::gpu).collect();
    later.gpus[0].verdict = Some(v1::HealthVerdict {
        health: Class::Predict.into(),
        cause: "warm".to_owned(),
        ..v1::HealthVerdict::default()
    });
    agent.say(Report::Hello(later)).await;
    let (request, message) = (order.request, "all read".to_owned());
    agent.say(Report::Done(v1::OrderDone { request, ok: true, message })).await;
    assert_eq!(asked.await.unwrap().unwrap().into_inner().message, "all read");
    let after = node(&daemon).await;
    assert_eq!(after.gpus.len(), 2);
    assert_eq!((after.gpus[0].health(), after.gpus[0].verdict().cause.as_str()), (Class::Predict, "warm"));
    assert!(after.gpus[0].since_us > before.gpus[0].since_us);
    assert_eq!(after.link_since_us, before.link_since_us, "connected all the while");
    // Older than the hello: history. And nothing but that was told of the node.
    agent.say(transition(6, Class::Fatal, "XID 79")).await;
    agent.acknowledged(6).await;
    assert_eq!(node(&daemon).await.gpus[0].health(), Class::Predict);
    assert!(matches!(seen(&mut events).await, v1::job_event::Event::Health(_)));

    let other = v1::AgentHello { node: "n1".to_owned(), ..hello("one", 8) };
    agent.say(Report::Hello(other)).await;
    let refused = agent.next().await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    assert!(refused.message().contains("this session is that of n0"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_the_agent_refuses_fails_and_says_that_the_drain_is_lifted() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::embedded(dir.path());
    let mut admin = daemon.admin().await;
    let mut agent = Agent::open(&daemon, hello("one", 1)).await.unwrap();
    let drain = v1::DrainGpuRequest { gpu: "GPU-0".to_owned() };
    let restore = v1::RestoreGpuRequest { gpu: "GPU-0".to_owned() };
    admin.drain_gpu(drain.clone()).await.unwrap();
    agent.say(transition(1, Class::Fatal, "XID 79")).await;
    agent.acknowledged(1).await;
    let refuse = async |agent: &mut Agent, message: &str| {
        let Ok(Order::ReleaseGpu(order)) = agent.next().await else { panic!("no release") };
        let (request, message) = (order.request, message.to_owned());
        agent.say(Report::Done(v1::OrderDone { request, ok: false, message })).await;
    };
    let (refused, ()) =
        tokio::join!(admin.restore_gpu(restore.clone()), refuse(&mut agent, "still fatal: XID 79"));
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(refused.message().contains("drain of GPU GPU-0 is lifted"), "{refused}");
    assert!(refused.message().ends_with("agent of n0: still fatal: XID 79"), "{refused}");
    assert_eq!(node(&daemon).await.gpus[0].drained_by, "");
    // Once more, without a drain.
    let (refused, ()) =
        tokio::join!(admin.restore_gpu(restore.clone()), refuse(&mut agent, "still fatal: XID 79"));
    assert_eq!(refused.unwrap_err().message(), "agent of n0: still fatal: XID 79");
    // A healthy GPU that an operator had drained: its agent has nothing to release.
    agent.say(transition(2, Class::Healthy, "")).await;
    agent.acknowledged(2).await;
    admin.drain_gpu(drain).await.unwrap();
    let (restored, ()) = tokio::join!(admin.restore_gpu(restore), refuse(&mut agent, "it is healthy"));
    assert_eq!(restored.unwrap().into_inner().message, "");
}
