//! The probe's keeper: lets go of the GPUs when told to, and never waits for a probe that cannot be killed.

#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used)]

mod harness;

use harness::{Daemon, Node, PATIENCE, RunningAgent, Session, kill, probe_of, runs, users_of_the_driver};
use reknit_proto::v1;
use reknit_proto::v1::agent_order::Order;
use reknit_proto::v1::agent_report::Report;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// A process whose parent does not see its end, as if the driver held it, until this is dropped: it is being
/// traced, and its tracer does not look.
struct Held {
    let_go: Option<Sender<()>>,
    tracer: Option<JoinHandle<()>>,
}

impl Held {
    fn new(pid: u32) -> Self {
        let (traced_in, traced) = channel();
        let (let_go, wait) = channel();
        let tracer = std::thread::spawn(move || {
            let none = std::ptr::null_mut::<libc::c_void>();
            // SAFETY: it changes no memory, of this process or the other.
            let seized =
                unsafe { libc::ptrace(libc::PTRACE_SEIZE, libc::pid_t::try_from(pid).unwrap(), none, none) };
            traced_in.send(seized).unwrap();
            // The end of this thread is the end of the trace.
            let _let_go = wait.recv();
        });
        assert_eq!(traced.recv().unwrap(), 0, "the probe cannot be traced");
        Self { let_go: Some(let_go), tracer: Some(tracer) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.let_go = None;
        self.tracer.take().unwrap().join().unwrap();
    }
}

/// The answer to a request, and how long it took.
async fn done(session: &mut Session, request: u64) -> (v1::OrderDone, Duration) {
    let began = Instant::now();
    loop {
        match session.next(PATIENCE).await.expect("no answer") {
            (Report::Done(done), at) => {
                assert_eq!(done.request, request);
                return (done, at - began);
            }
            (Report::Health(_), _) => {}
            (other, _) => panic!("{other:?} is no answer"),
        }
    }
}

async fn running_probe(agent: &RunningAgent, limit: Duration) -> Option<u32> {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        if let Some(probe) = probe_of(agent.pid()).filter(|probe| runs(*probe)) {
            return Some(probe);
        }
        sleep(Duration::from_millis(5)).await;
    }
    None
}

#[tokio::test]
async fn a_quiesced_agent_holds_no_gpu_until_it_resumes() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let probe = running_probe(&agent, PATIENCE).await.unwrap();
    assert_eq!(users_of_the_driver(agent.pid()), [probe], "only the probe loads it");

    session.order(Order::Quiesce(v1::Quiesce { request: 1, seconds: 600 })).await;
    let (answer, after) = done(&mut session, 1).await;
    println!("quiesced after {after:?}: {}", answer.message);
    assert!(answer.ok && after < Duration::from_secs(1), "{answer:?} after {after:?}");
    assert!(users_of_the_driver(agent.pid()).is_empty());
    assert!(!runs(probe));
    assert_eq!(running_probe(&agent, Duration::from_secs(1)).await, None, "none is started");
    assert!(runs(agent.pid()));

    session.order(Order::EndQuiesce(v1::EndQuiesce { request: 2 })).await;
    assert!(done(&mut session, 2).await.0.ok);
    let second = running_probe(&agent, PATIENCE).await.unwrap();
    assert_ne!(second, probe);
}

#[tokio::test]
async fn a_quiesce_is_confirmed_only_when_the_probe_is_seen_to_end() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(1));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let probe = running_probe(&agent, PATIENCE).await.unwrap();
    let held = Held::new(probe);
    session.order(Order::Quiesce(v1::Quiesce { request: 7, seconds: 600 })).await;
    let early = session.next(Duration::from_secs(2)).await;
    assert!(!matches!(early, Some((Report::Done(_), _))), "{early:?} though the probe is there");
    drop(held);
    let (answer, after) = done(&mut session, 7).await;
    assert!(answer.ok && after < Duration::from_secs(2), "{answer:?} after {after:?}");
}

#[tokio::test]
async fn probes_that_cannot_be_killed_are_left_alone_and_three_are_enough() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(1));
    let agent = node.start(&daemon);
    let _session = daemon.session().await;
    let mut held = Vec::new();
    for _ in 0..3 {
        let probe = running_probe(&agent, PATIENCE).await.expect("the next probe does not wait for the last");
        held.push(Held::new(probe));
        kill(probe, "KILL");
        while runs(probe) {
            sleep(Duration::from_millis(1)).await;
        }
    }
    assert_eq!(running_probe(&agent, Duration::from_secs(4)).await, None, "a fourth would hang too");
    assert!(runs(agent.pid()));
    // One ends after all.
    held.remove(1);
    let fourth = running_probe(&agent, PATIENCE).await;
    assert!(fourth.is_some(), "no probe is started though one is gone");
}
