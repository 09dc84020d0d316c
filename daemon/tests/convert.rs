//! What comes over the wire is checked, not believed.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use reknit_engine::{Event, ExitStatus, JobName};
use reknit_layout::{GpuId, Holding, Incarnation, NodeName, Step, WorkerKey};
use reknit_proto::v1;
use reknitd::input::Said;
use reknitd::rpc::convert::{agent_hello, agent_report, worker_hello, worker_report};

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
