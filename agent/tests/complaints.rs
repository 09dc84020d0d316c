//! What operators complain of in other monitors, each as a test of this one. The numbers are the public reports'.

#![allow(clippy::unwrap_used)]

mod harness;

use harness::{Daemon, Node, RunningAgent, Session, cpu_ticks, probe_of, users_of_the_driver};
use reknit_proto::v1::agent_order::Order;
use reknit_proto::v1::agent_report::Report;
use reknit_proto::v1::{AgentHeartbeat, EndQuiesce, HealthClass, HealthTransition, Observability, Quiesce};
use reknit_simdriver::state::State;
use std::fs;
use std::time::{Duration, Instant};

const CALM: Duration = Duration::from_millis(700);
const EVENT: Duration = Duration::from_millis(100);

fn log(node: &Node, gpu: usize, xid: u64, message: &str) {
    let kmsg = node.folder.path().join("kmsg");
    State::load(&node.driver()).unwrap().log_xid(gpu, xid, Some(message), &kmsg).unwrap();
}

async fn calm(gpus: usize) -> (Daemon, Node, RunningAgent, Session) {
    let (mut daemon, node) = (Daemon::start().await, Node::new(gpus));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.quiet(CALM).await;
    (daemon, node, agent, session)
}

fn of(report: &HealthTransition, node: &Node) -> (usize, HealthClass) {
    (node.gpus.iter().position(|uuid| *uuid == report.gpu).unwrap(), report.health())
}

/// NVSentinel#1576: the driver call never returns, so the monitor cannot report.
#[tokio::test]
async fn complaint_1_a_call_that_never_returns_silences_nobody_and_condemns_no_gpu() {
    let (_daemon, node, agent, mut session) = calm(2).await;
    let hung = probe_of(agent.pid()).unwrap();
    node.set_node("hang=true");
    for _ in 0..2 {
        assert_eq!(session.health().await.0.health(), HealthClass::Unknown);
    }
    session.heartbeat().await;
    node.set_node("hang=false");
    for _ in 0..2 {
        assert_eq!(session.health().await.0.health(), HealthClass::Healthy);
    }
    assert_ne!(probe_of(agent.pid()), Some(hung), "the hung probe was replaced");
}

/// DCGM#313, NVSentinel#1748: calls block for 45 s on a GPU with thousands of corrected errors a second.
#[tokio::test]
async fn complaint_2_a_slow_gpu_keeps_its_last_values_with_their_age_and_delays_no_other() {
    let (_daemon, node, _agent, mut session) = calm(2).await;
    node.set(1, "ecc_corrected=17700");
    node.set(1, "temperature=71");
    let state = |beat: &AgentHeartbeat, gpu: usize| {
        beat.gpus.iter().find(|state| state.uuid == node.gpus[gpu]).unwrap().clone()
    };
    while state(&session.heartbeat().await, 1).temperature != Some(71) {}
    node.set(1, "delays_ms={\"*\":2500}");
    loop {
        let beat = session.heartbeat().await;
        let (fast, slow) = (state(&beat, 0), state(&beat, 1));
        assert_eq!(slow.temperature, Some(71), "the last value stays");
        assert!(fast.age_ms.unwrap() < 1000, "{fast:?}");
        if slow.age_ms.unwrap() > 2000 {
            break;
        }
    }
    let raised = Instant::now();
    node.xid(0, 79);
    let (report, at) = loop {
        let (report, at) = session.health().await;
        if of(&report, &node).0 == 0 {
            break (report, at);
        }
        assert_eq!(of(&report, &node), (1, HealthClass::Unknown), "slow is not dead");
    };
    assert_eq!(report.health(), HealthClass::Fatal);
    assert!(at - raised < EVENT, "{:?}", at - raised);
    node.set(1, "delays_ms={}");
}

/// NVSentinel#1575: a detected failure was lost because the clean-up after it blocked.
#[tokio::test]
async fn complaint_3_a_failure_is_sent_before_anything_can_block() {
    let (_daemon, node, _agent, mut session) = calm(2).await;
    let broken = Instant::now();
    State::update(&node.driver(), |state| {
        state.raise_xid(1, 79)?;
        // Whatever is called from here on never returns.
        state.set(1, &["hang=true".to_owned()])
    })
    .unwrap();
    let (report, at) = session.health().await;
    assert_eq!(of(&report, &node), (1, HealthClass::Fatal));
    assert!(at - broken < EVENT, "{:?}", at - broken);
    node.set(1, "hang=false");
}

/// NVSentinel#1701: NVLINK_DOWN on 214 of 288 nodes, every one a planned reboot.
#[tokio::test]
async fn complaint_4_a_planned_reboot_is_no_link_failure() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(4));
    // This machine was booted a while ago: what counts as just booted is made longer.
    let policy = node.folder.path().join("graced.toml");
    fs::write(&policy, "rule.nvlink_down.boot_grace = \"1000years\"\n").unwrap();
    let mut command = node.command(&format!("http://{}", daemon.address));
    let agent = RunningAgent(command.arg("--policy").arg(&policy).spawn().unwrap());
    let mut session = daemon.session().await;
    session.quiet(CALM).await;
    node.set(2, "nvlink_down=true");
    session.quiet(3 * CALM).await;
    // The links were down and were seen to be: without the grace they count.
    fs::write(&policy, "").unwrap();
    let (report, _) = session.health().await;
    assert_eq!(of(&report, &node), (2, HealthClass::Fatal));
    drop(agent);
}

/// k8s-device-plugin#1014: XID 94 latched the GPU for ever.
#[tokio::test]
async fn complaint_5_a_contained_error_does_not_latch_the_gpu() {
    let (_daemon, node, _agent, mut session) = calm(2).await;
    node.xid(0, 94);
    let (report, _) = session.health().await;
    assert_eq!(of(&report, &node), (0, HealthClass::RankDied));
    assert_eq!(report.verdict().rejoin, "at once, when it reads healthy");
    let (report, _) = session.health().await;
    assert_eq!(of(&report, &node), (0, HealthClass::Healthy));
}

/// dcgm-exporter#500: the gauge of the last XID never clears.
#[tokio::test]
async fn complaint_6_events_have_a_number_and_a_time_and_end() {
    let (_daemon, node, _agent, mut session) = calm(2).await;
    let before = now_ms();
    node.xid(0, 94);
    let (died, _) = session.health().await;
    let (healthy, _) = session.health().await;
    assert_eq!(healthy.sequence, died.sequence + 1);
    // The agent's clock does not follow the wall clock's jumps.
    let (earliest, latest) = (before - 1000, now_ms() + 1000);
    assert!(
        earliest <= died.at_ms && died.at_ms < healthy.at_ms && healthy.at_ms <= latest,
        "{died:?} {healthy:?}"
    );
    assert_eq!((died.verdict().evidence.as_str(), healthy.verdict().evidence.as_str()), ("XID 94", ""));
}

/// DCGM#235: XID 62 stands in the log and is absent from the metric.
#[tokio::test]
async fn complaint_7_an_xid_that_only_the_log_tells_is_heard_and_counts_once() {
    let (_daemon, node, _agent, mut session) = calm(2).await;
    let written = Instant::now();
    log(&node, 1, 62, "2193e");
    let (report, at) = session.health().await;
    assert_eq!(of(&report, &node), (1, HealthClass::Fatal));
    assert!(at - written < EVENT, "{:?}", at - written);
    assert!(report.verdict().evidence.starts_with("kernel log: Xid 62"), "{}", report.verdict().evidence);
    // NVML tells it after all.
    node.xid(1, 62);
    session.quiet(CALM).await;
}

/// NVSentinel#1357, gpud#1174: a nonfatal 145 was reported as fatal.
#[tokio::test]
async fn complaint_8_a_nonfatal_link_error_is_not_fatal() {
    let (_daemon, node, _agent, mut session) = calm(3).await;
    log(&node, 0, 145, "RLW_CTRL Nonfatal XC0 i0 Link 04 (0x00000004 0x00000000)");
    node.xid(0, 145);
    assert_eq!(of(&session.health().await.0, &node), (0, HealthClass::Predict));
    session.quiet(CALM).await;
    log(&node, 1, 145, "RLW_CTRL Fatal XC0 i0 Link 04 (0x00000004 0x00000000)");
    assert_eq!(of(&session.health().await.0, &node), (1, HealthClass::Fatal));
    // A subcode of the other end blames the other end.
    log(&node, 2, 149, "NETIR_LINK_EVT PEER_LINK_DOWN Link 08 (0x00000004 0x00000000)");
    session.quiet(CALM).await;
}

/// dcgm-exporter#706: open handles block unbind and reset.
#[tokio::test]
async fn complaint_9_quiesce_lets_go_of_every_handle() {
    let (_daemon, _node, agent, mut session) = calm(2).await;
    let holders = || users_of_the_driver(agent.pid()).len();
    assert_eq!(holders(), 1);
    session.order(Order::Quiesce(Quiesce { request: 7, seconds: 60 })).await;
    let mut unknown = 0;
    loop {
        match session.next(harness::PATIENCE).await.unwrap().0 {
            Report::Health(report) => {
                assert_eq!(report.health(), HealthClass::Unknown);
                unknown += 1;
            }
            Report::Done(done) => {
                assert!(done.ok && done.request == 7, "{done:?}");
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((unknown, holders()), (2, 0));
    assert_eq!(session.heartbeat().await.observability(), Observability::Quiesced);
    session.order(Order::EndQuiesce(EndQuiesce { request: 8 })).await;
    let mut healthy = 0;
    while healthy < 2 {
        if let Report::Health(report) = session.next(harness::PATIENCE).await.unwrap().0 {
            assert_eq!(report.health(), HealthClass::Healthy);
            healthy += 1;
        }
    }
    assert_eq!(holders(), 1);
}

/// HAMi#2321: the wait fails at once, the loop spins, and every GPU is condemned.
#[tokio::test]
async fn complaint_10_a_wait_that_fails_at_once_neither_spins_nor_condemns() {
    let (_daemon, node, agent, mut session) = calm(8).await;
    let probe = probe_of(agent.pid()).unwrap();
    node.set_node("wait_error=999");
    // Each listener has met the error by then.
    session.quiet(Duration::from_secs(2)).await;
    let before = cpu_ticks(probe);
    session.quiet(Duration::from_secs(3)).await;
    let spent = cpu_ticks(probe) - before;
    println!("the probe took {spent} ticks of 10 ms in 3 s");
    assert!(spent <= 30, "{spent} ticks in 3 s are more than a tenth of a core");
    let beat = session.heartbeat().await;
    assert_eq!(beat.observability(), Observability::Degraded, "{beat:?}");
    assert!(beat.gaps.iter().any(|gap| gap.starts_with("XID events")), "{:?}", beat.gaps);
    // Without events readings tell.
    node.set(3, "lost=true");
    assert_eq!(of(&session.health().await.0, &node), (3, HealthClass::Fatal));
}

fn now_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::try_from(now.as_millis()).unwrap()
}
