//! What comes over the wire is checked, not believed.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use reknit_engine::{Event, ExitStatus, JobName};
use reknit_layout::{Axis, GpuId, Holding, Incarnation, NodeName, Step, Units, WorkerKey};
use reknit_proto::Message;
use reknit_proto::v1;
use reknitd::input::Said;
use reknitd::rpc::convert::{agent_hello, agent_report, worker_hello, worker_report};
use reknitd::rpc::{LARGEST_OF_AGENT, LARGEST_OF_WORKER};

fn key() -> Option<v1::WorkerKey> {
    Some(v1::WorkerKey { job: "j".to_owned(), gpu: "GPU-0".to_owned(), incarnation: 1 })
}

fn hello(change: impl FnOnce(&mut v1::WorkerHello)) -> v1::WorkerReport {
    let holding = Holding { step: Step(3), ..Holding::default() };
    let mut hello = v1::WorkerHello {
        worker: key(),
        node: "n0".to_owned(),
        endpoint: Some(v1::Endpoint::default()),
        pid: 1,
        connection: 0,
        state: Some(v1::WorkerState {
            phase: v1::worker_state::Phase::Training.into(),
            committed_step: 3,
            holding: serde_json::to_vec(&holding).unwrap(),
            ..v1::WorkerState::default()
        }),
    };
    change(&mut hello);
    v1::WorkerReport { report: Some(v1::worker_report::Report::Hello(hello)) }
}

#[test]
fn a_hello_that_makes_no_sense_says_why() {
    let (job, worker, connection, event) = worker_hello(hello(|hello| hello.connection = 4)).unwrap();
    assert_eq!(connection, 4);
    assert_eq!((job.0.as_str(), worker.to_string().as_str()), ("j", "GPU-0#1"));
    let Event::WorkerConnected { state, .. } = event else { panic!("{event:?}") };
    assert_eq!((state.holding.step, state.prepared, state.attempted), (Step(3), Step(3), Step(3)));

    let why = |change: fn(&mut v1::WorkerHello)| worker_hello(hello(change)).unwrap_err().to_string();
    assert_eq!(why(|hello| hello.worker = None), "worker is missing");
    assert_eq!(why(|hello| hello.node.clear()), "node is missing");
    assert_eq!(why(|hello| hello.endpoint = None), "endpoint is missing");
    assert_eq!(why(|hello| hello.state = None), "state is missing");
    assert_eq!(why(|hello| hello.worker.as_mut().unwrap().gpu.clear()), "worker.gpu is missing");
    assert_eq!(why(|hello| hello.state.as_mut().unwrap().phase = 0), "state.phase is missing");
    let injected = why(|hello| hello.node = "n0\n\u{1b}[31mERROR".to_owned());
    assert!(injected.starts_with("node: ") && !injected.contains('\n'), "{injected}");
    let long = why(|hello| hello.worker.as_mut().unwrap().job = "j".repeat(1 << 20));
    assert!(long.starts_with("worker.job: ") && long.len() < 200, "{long}");
    let phase = why(|hello| hello.state.as_mut().unwrap().phase = 77);
    assert!(phase.starts_with("state.phase: ") && phase.contains("77"), "{phase}");
    let json = why(|hello| hello.state.as_mut().unwrap().holding = b"{".to_vec());
    assert!(json.starts_with("state.holding: "), "{json}");
    assert_eq!(
        why(|hello| hello.state.as_mut().unwrap().committed_step = 4),
        "state.holding: it stands at step 3, but committed_step is 4"
    );
}

#[test]
fn reports_that_make_no_sense_are_refused() {
    let worker = WorkerKey { gpu: GpuId::from("GPU-0"), incarnation: Incarnation(1) };
    let job = JobName("j".to_owned());
    let said = |report| worker_report(&job, &worker, v1::WorkerReport { report });
    assert_eq!(said(None).unwrap_err().to_string(), "report is missing");
    assert!(said(hello(|_| {}).report).unwrap_err().to_string().contains("Hello comes once"));
    let voteless = v1::worker_report::Report::Committed(v1::Committed::default());
    assert_eq!(said(Some(voteless)).unwrap_err().to_string(), "vote is missing");

    let gpu = v1::Gpu { uuid: "GPU-0".to_owned(), ..v1::Gpu::default() };
    let agent = v1::AgentHello { node: "n0".to_owned(), gpus: vec![gpu], ..v1::AgentHello::default() };
    let agent = v1::AgentReport { report: Some(v1::agent_report::Report::Hello(agent)) };
    assert_eq!(agent_hello(agent).unwrap_err().to_string(), "gpus.health is missing");
}

#[test]
fn exits_keep_signal_and_status_apart() {
    let exit = |signal, status| {
        let how = "so".to_owned();
        let exited = v1::WorkerExited { worker: key(), how, signal, status };
        let report = v1::AgentReport { report: Some(v1::agent_report::Report::Exited(exited)) };
        match agent_report(&NodeName::from("n0"), report).unwrap() {
            Said::Event(Event::WorkerExited { exit, .. }) => exit,
            said => panic!("{said:?}"),
        }
    };
    let how = || "so".to_owned();
    assert_eq!(exit(9, -1), ExitStatus { how: how(), signal: Some(9), status: None });
    assert_eq!(exit(0, 0), ExitStatus { how: how(), signal: None, status: Some(0) });
    assert_eq!(exit(0, -1), ExitStatus { how: how(), signal: None, status: None });
}

fn verdict(text: &str) -> Option<v1::HealthVerdict> {
    let [cause, evidence, rejoin, action] = [text; 4].map(str::to_owned);
    let health = v1::HealthClass::Healthy.into();
    Some(v1::HealthVerdict { health, cause, evidence, rejoin, action, ..v1::HealthVerdict::default() })
}

fn agent(gpus: u32, workers: u64, text: &str) -> v1::AgentReport {
    let uuid = |index| format!("GPU-{index:08x}-0000-0000-0000-000000000000");
    let gpu = |index| v1::Gpu { uuid: uuid(index), index, verdict: verdict(text), ..v1::Gpu::default() };
    let worker = |incarnation| {
        let (job, gpu) = ("llama-405b-pretraining".to_owned(), uuid(0));
        v1::WorkerProcess { worker: Some(v1::WorkerKey { job, gpu, incarnation }), pid: 1 << 22 }
    };
    let hello = v1::AgentHello {
        node: "n0".to_owned(),
        gpus: (0..gpus).map(gpu).collect(),
        workers: (1..=workers).map(worker).collect(),
        version: text.to_owned(),
        gaps: vec![text.to_owned(); 100],
        ..v1::AgentHello::default()
    };
    v1::AgentReport { report: Some(v1::agent_report::Report::Hello(hello)) }
}

#[test]
fn what_is_honestly_sent_is_taken() {
    let hello = agent(128, 1_024, &"x".repeat(200));
    assert!(hello.encoded_len() < LARGEST_OF_AGENT / 2, "{}", hello.encoded_len());
    agent_hello(hello).unwrap();

    // All of a model of 126 layers with 128 heads and 3,328 blocks of the feed-forward, every other unit of it.
    let every_other = |units: u32| -> Units { (0..units).step_by(2).map(|unit| (unit, unit + 1)).collect() };
    let axes = (0..126).flat_map(|layer| {
        [(Axis::attn(layer), every_other(128)), (Axis::ffn(layer), every_other(53_248 / 16))]
    });
    let holding = Holding { step: Step(3), units: std::sync::Arc::new(axes.collect()) };
    let holding = serde_json::to_vec(&holding).unwrap();
    let hello = hello_of(holding);
    let size = hello.encoded_len();
    assert!(size > LARGEST_OF_WORKER / 2 && size < LARGEST_OF_WORKER / 4 * 3, "{size}");
    worker_hello(hello).unwrap();
}

fn hello_of(holding: Vec<u8>) -> v1::WorkerReport {
    hello(|hello| hello.state.as_mut().unwrap().holding = holding)
}

#[test]
fn words_are_cut_and_lists_that_no_node_has_are_refused() {
    let long = "é".repeat(10_000);
    let cut = format!("{}…", "é".repeat(499));
    let (_, event, greeting) = agent_hello(agent(2, 1, &long)).unwrap();
    assert_eq!(greeting.version, cut);
    assert_eq!((greeting.gaps.len(), greeting.gaps.capacity()), (64, 64));
    assert!(greeting.gaps.iter().all(|gap| *gap == cut && gap.capacity() < 4_096));
    let kept = greeting.gpus[1].verdict.as_ref().unwrap();
    assert_eq!([&kept.cause, &kept.evidence, &kept.rejoin, &kept.action], [&cut; 4]);
    let Event::AgentConnected { gpus, .. } = event else { panic!("{event:?}") };
    assert_eq!((&gpus[1].cause, &gpus[1].action), (&cut, &cut));

    let node = NodeName::from("n0");
    let told = |report| agent_report(&node, v1::AgentReport { report: Some(report) });
    let transition =
        v1::HealthTransition { gpu: "GPU-0".to_owned(), verdict: verdict(&long), ..Default::default() };
    match told(v1::agent_report::Report::Health(transition)).unwrap() {
        Said::Transition(Event::HealthChanged { cause, action, .. }, told) => {
            assert_eq!([&cause, &action, &told.verdict.unwrap().evidence], [&cut; 3]);
        }
        said => panic!("{said:?}"),
    }
    let beat = v1::AgentHeartbeat { gaps: vec![long; 100], ..v1::AgentHeartbeat::default() };
    match told(v1::agent_report::Report::Heartbeat(beat.clone())).unwrap() {
        Said::Heartbeat(kept) => assert_eq!(kept.gaps, vec![cut; 64]),
        said => panic!("{said:?}"),
    }

    let why = |gpus, workers| agent_hello(agent(gpus, workers, "")).unwrap_err().to_string();
    agent_hello(agent(128, 4_096, "")).unwrap();
    assert_eq!(why(129, 0), "gpus: 129 are listed, and a node has at most 128");
    assert_eq!(why(1, 4_097), "workers: 4097 are listed, and a node has at most 4096");
    let beat = v1::AgentHeartbeat { gpus: vec![v1::GpuState::default(); 129], ..beat };
    let refused = told(v1::agent_report::Report::Heartbeat(beat)).unwrap_err().to_string();
    assert_eq!(refused, "gpus: 129 are listed, and a node has at most 128");
}
