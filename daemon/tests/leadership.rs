//! A leader whose lease has ended orders nothing and answers nobody, though nobody has told it yet.

#![allow(clippy::unwrap_used)]

mod support;

use async_trait::async_trait;
use reknit_engine::{Incident, JobName, JobRecord, State, Timeouts};
use reknit_layout::{GpuId, JobSpec, NodeName, WorkerKey};
use reknit_proto::v1;
use reknitd::Failure;
use reknitd::clock::Clock;
use reknitd::input::{Ask, Input, Inputs, Reply, Request, Wish};
use reknitd::rpc::convert;
use reknitd::run::Coordinator;
use reknitd::sessions::{Peer, StreamEnd, session};
use reknitd::store::{Embedded, Snapshot, Store, StoreError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use support::PATIENCE;
use tokio::sync::{broadcast, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// A real store, under a lease that ends when the test says so. Whoever is to tell of that sleeps.
#[derive(Debug)]
struct Lease {
    store: Embedded,
    runs: AtomicBool,
    ends_with_next_write: AtomicBool,
}

impl Lease {
    fn written(&self) {
        if self.ends_with_next_write.load(Ordering::SeqCst) {
            self.runs.store(false, Ordering::SeqCst);
        }
    }
}

#[async_trait]
impl Store for Lease {
    async fn load(&self) -> Result<Snapshot, StoreError> {
        self.store.load().await
    }

    async fn put_job(&self, record: &JobRecord) -> Result<(), StoreError> {
        self.store.put_job(record).await?;
        self.written();
        Ok(())
    }

    async fn put_incident(&self, incident: &Incident) -> Result<(), StoreError> {
        self.store.put_incident(incident).await?;
        self.written();
        Ok(())
    }

    fn term(&self) -> u64 {
        self.store.term()
    }

    fn leads(&self) -> bool {
        self.runs.load(Ordering::SeqCst)
    }

    async fn leadership_lost(&self) -> StoreError {
        std::future::pending().await
    }

    async fn release(&self) {
        self.store.release().await;
    }
}

/// A leader with one agent of four GPUs and one job, which has spawned its workers.
struct Leader {
    lease: Arc<Lease>,
    inputs: Inputs,
    ends: JoinHandle<Result<(), Failure>>,
    agent: StreamEnd<v1::AgentOrder>,
    _dir: tempfile::TempDir,
}

fn hello(node: &str) -> v1::AgentReport {
    let hello = v1::AgentHello {
        node: node.to_owned(),
        gpus: (0..4).map(support::peers::gpu).collect(),
        instance: "one".to_owned(),
        next_sequence: 1,
        ..v1::AgentHello::default()
    };
    v1::AgentReport { report: Some(v1::agent_report::Report::Hello(hello)) }
}

fn agent_opens(node: &str) -> (Input, StreamEnd<v1::AgentOrder>) {
    let (session, end) = session(64);
    let (node, hello, greeting) = convert::agent_hello(hello(node)).unwrap();
    (Input::AgentOpened { node, session, hello, greeting }, end)
}

fn worker_opens(job: &str) -> (Input, StreamEnd<v1::WorkerOrder>) {
    let (session, end) = session(64);
    let worker = v1::WorkerKey { job: job.to_owned(), gpu: "GPU-0".to_owned(), incarnation: 1 };
    let hello = v1::WorkerHello {
        worker: Some(worker),
        node: "n0".to_owned(),
        endpoint: Some(v1::Endpoint::default()),
        pid: 7,
        connection: 1,
        state: Some(v1::WorkerState {
            phase: v1::worker_state::Phase::Idle.into(),
            ..v1::WorkerState::default()
        }),
    };
    let report = v1::WorkerReport { report: Some(v1::worker_report::Report::Hello(hello)) };
    let (job, worker, connection, hello): (JobName, WorkerKey, _, _) = convert::worker_hello(report).unwrap();
    (Input::WorkerOpened { job, worker, connection, session, hello }, end)
}

/// Everything that was ordered and not looked at yet.
fn ordered<O>(end: &mut StreamEnd<O>) -> Vec<O> {
    std::iter::from_fn(|| end.orders.try_recv().ok()).map(Result::unwrap).collect()
}

impl Leader {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let lease = Arc::new(Lease {
            store: Embedded::open(dir.path()).await.unwrap(),
            runs: true.into(),
            ends_with_next_write: false.into(),
        });
        let timeouts = Timeouts::default();
        let clock = Clock::start();
        let (inputs, to_loop) = Inputs::new(clock);
        let (watchers, _) = broadcast::channel(64);
        let state = State::new(timeouts);
        let store: Arc<dyn Store> = lease.clone();
        let coordinator = Coordinator::start(state, timeouts, clock, store, watchers, inputs.clone());
        let coordinator = coordinator.await.unwrap();
        let ends = tokio::spawn(coordinator.run(to_loop, std::future::pending()));
        let (opens, mut agent) = agent_opens("n0");
        assert!(inputs.tell(opens).await);
        agent.orders.recv().await.unwrap().unwrap();
        let mut leader = Self { lease, inputs, ends, agent, _dir: dir };
        leader.submit("job").await.unwrap();
        assert_eq!(ordered(&mut leader.agent).len(), 4, "every worker was spawned");
        leader
    }

    /// `None`: nobody answers.
    async fn ask<T>(&self, question: impl FnOnce(Reply<T>) -> Request) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.inputs.tell(Input::Asked(question(reply))).await.then_some(())?;
        timeout(PATIENCE, answer).await.unwrap().ok()
    }

    async fn submit(&self, name: &str) -> Option<()> {
        let spec = JobSpec::parse(&support::job_file(name), "job").unwrap();
        let submitted = self.ask(|reply| Request::Submit(Box::new(spec), reply)).await?;
        submitted.unwrap();
        Some(())
    }

    fn says(&self, report: v1::agent_report::Report) -> Input {
        let node = NodeName::from("n0");
        let report = v1::AgentReport { report: Some(report) };
        let said = convert::agent_report(&node, report).unwrap();
        Input::Said { peer: Peer::Agent(node), session: self.agent.id, said }
    }

    /// It has found out by itself. What was ordered meanwhile.
    async fn orders_at_the_end(self) -> Vec<v1::AgentOrder> {
        let Self { ends, mut agent, inputs: _inputs, lease, _dir } = self;
        let ended = timeout(PATIENCE, ends).await.expect("it still leads").unwrap();
        assert!(matches!(ended, Err(Failure::Leadership(_))), "{ended:?}");
        assert!(!lease.leads());
        ordered(&mut agent)
    }
}

fn warm(sequence: u64) -> v1::agent_report::Report {
    v1::agent_report::Report::Health(v1::HealthTransition {
        sequence,
        gpu: "GPU-0".to_owned(),
        verdict: Some(v1::HealthVerdict {
            health: v1::HealthClass::Predict.into(),
            ..v1::HealthVerdict::default()
        }),
        ..v1::HealthTransition::default()
    })
}

#[tokio::test]
async fn whoever_comes_after_the_lease_is_told_nothing() {
    let leader = Leader::start().await;
    leader.lease.runs.store(false, Ordering::SeqCst);
    let (opens, mut agent) = agent_opens("n1");
    assert!(leader.inputs.tell(opens).await);
    assert_eq!(leader.orders_at_the_end().await, []);
    assert_eq!(ordered(&mut agent), []);
    for job in ["job", "unknown"] {
        let leader = Leader::start().await;
        leader.lease.runs.store(false, Ordering::SeqCst);
        let (opens, mut worker) = worker_opens(job);
        assert!(leader.inputs.tell(opens).await);
        assert_eq!(leader.orders_at_the_end().await, []);
        assert_eq!(ordered(&mut worker), [], "a worker of {job}");
    }
}

#[tokio::test]
async fn a_repeated_transition_is_not_acknowledged_after_the_lease() {
    let mut leader = Leader::start().await;
    assert!(leader.inputs.tell(leader.says(warm(1))).await);
    let acknowledged = leader.agent.orders.recv().await.unwrap().unwrap();
    assert!(matches!(acknowledged.order, Some(v1::agent_order::Order::HealthAck(_))));
    leader.lease.runs.store(false, Ordering::SeqCst);
    assert!(leader.inputs.tell(leader.says(warm(1))).await);
    assert_eq!(leader.orders_at_the_end().await, []);
}

#[tokio::test]
async fn what_operators_ask_of_an_agent_is_not_passed_on_after_the_lease() {
    let gpu = || GpuId::from("GPU-0");
    let of_node = |wish| {
        move |reply| Request::Agent { ask: Ask { node: NodeName::from("n0"), wish, reply }, force: true }
    };
    type Question = Box<dyn FnOnce(Reply<Result<String, reknit_engine::Refusal>>) -> Request>;
    let questions: [Question; 5] = [
        Box::new(of_node(Wish::Quiesce { seconds: 60 })),
        Box::new(of_node(Wish::EndQuiesce)),
        Box::new(of_node(Wish::Probe)),
        Box::new(move |reply| Request::SetPowerLimit {
            gpu: gpu(),
            limit_mw: 300_000,
            lease_seconds: 60,
            reply,
        }),
        Box::new(move |reply| Request::RestoreGpu(gpu(), reply)),
    ];
    for (number, question) in questions.into_iter().enumerate() {
        let leader = Leader::start().await;
        leader.lease.runs.store(false, Ordering::SeqCst);
        assert_eq!(leader.ask(question).await, None, "question {number}");
        assert_eq!(leader.orders_at_the_end().await, [], "question {number}");
    }
}

#[tokio::test]
async fn a_lease_that_ends_between_two_commands_ends_the_orders() {
    let leader = Leader::start().await;
    assert!(leader.ask(|reply| Request::StopJob(JobName("job".to_owned()), reply)).await.is_some());
    let (inputs, mut leader) = (leader.inputs.clone(), leader);
    ordered(&mut leader.agent);
    // Its record is the first command, and spawning its workers follows.
    leader.lease.ends_with_next_write.store(true, Ordering::SeqCst);
    assert_eq!(leader.submit("another").await, None);
    assert_eq!(leader.lease.store.load().await.unwrap().jobs.len(), 2, "the first command was carried out");
    assert_eq!(leader.orders_at_the_end().await, []);
    drop(inputs);
}

#[tokio::test]
async fn a_lease_that_ends_with_the_last_command_ends_what_was_to_follow() {
    let leader = Leader::start().await;
    let gpu = GpuId::from("GPU-0");
    assert!(leader.ask(|reply| Request::DrainGpu(gpu.clone(), reply)).await.is_some());
    let mut leader = leader;
    ordered(&mut leader.agent);
    leader.lease.ends_with_next_write.store(true, Ordering::SeqCst);
    assert_eq!(leader.ask(|reply| Request::RestoreGpu(gpu, reply)).await, None);
    assert_eq!(leader.orders_at_the_end().await, [], "the agent was to release it");
}

#[tokio::test]
async fn an_operator_is_not_told_what_an_old_leader_knows() {
    let leader = Leader::start().await;
    leader.lease.runs.store(false, Ordering::SeqCst);
    assert!(leader.ask(Request::ListJobs).await.is_none());
    assert_eq!(leader.orders_at_the_end().await, []);
}
