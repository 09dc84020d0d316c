//! An agent and workers on the wire, without GPUs or training: they keep the protocol and nothing else.

use reknit_layout::{GpuId, Holding, Incarnation, JobSpec, Layout, Step, WorkerKey};
use reknit_proto::v1;
use std::collections::BTreeMap;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Duration, sleep};
use tokio_stream::wrappers::ReceiverStream;
use v1::agent_client::AgentClient;
use v1::worker_client::WorkerClient;
use v1::worker_state::Phase;

const RECONNECT: Duration = Duration::from_millis(20);

/// What a worker was told, for tests to look at.
#[derive(Debug, Clone, PartialEq)]
pub enum Told {
    Welcome { worker: String },
    Close { worker: String, epoch: u64 },
    Prepare { worker: String, epoch: u64, ticket: Vec<u8> },
    Resume { worker: String, epoch: u64 },
    Stop { worker: String },
}

/// The agent of node `n0` with `gpus` GPUs, and every worker it was told to start.
#[derive(Debug)]
pub struct Node {
    pub told: mpsc::UnboundedReceiver<Told>,
    kill: mpsc::UnboundedSender<String>,
    task: JoinHandle<()>,
}

impl Node {
    /// Connects to wherever the daemon is, again and again. `address` is `host:port`.
    pub fn start(address: String, gpus: u32) -> Self {
        let (tell, told) = mpsc::unbounded_channel();
        let (kill, killed) = mpsc::unbounded_channel();
        let task = tokio::spawn(agent(address, gpus, tell, killed));
        Self { told, kill, task }
    }

    /// As SIGKILL would end the worker on that GPU.
    pub fn kill_worker(&self, gpu: &str) {
        self.kill.send(gpu.to_owned()).unwrap();
    }

    pub async fn next_told(&mut self) -> Told {
        let told = tokio::time::timeout(super::PATIENCE, self.told.recv());
        told.await.expect("the workers are told nothing").unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Ends its worker with it.
struct Running(v1::WorkerKey, JoinHandle<()>);

impl Drop for Running {
    fn drop(&mut self) {
        self.1.abort();
    }
}

async fn agent(
    address: String,
    gpus: u32,
    tell: mpsc::UnboundedSender<Told>,
    mut killed: mpsc::UnboundedReceiver<String>,
) {
    let mut running: BTreeMap<String, Running> = BTreeMap::new();
    loop {
        sleep(RECONNECT).await;
        let Ok(mut client) = AgentClient::connect(format!("http://{address}")).await else {
            continue;
        };
        let (reports, outbound) = mpsc::channel(64);
        let report = |report| v1::AgentReport { report: Some(report) };
        let hello = v1::AgentHello {
            node: "n0".to_owned(),
            gpus: (0..gpus).map(gpu).collect(),
            workers: running
                .values()
                .map(|Running(key, _)| v1::WorkerProcess { worker: Some(key.clone()), pid: 7 })
                .collect(),
            version: "test".to_owned(),
            ..v1::AgentHello::default()
        };
        reports.send(report(v1::agent_report::Report::Hello(hello))).await.unwrap();
        let Ok(orders) = client.session(ReceiverStream::new(outbound)).await else {
            continue;
        };
        let mut orders = orders.into_inner();
        let mut heartbeat = 100;
        loop {
            let (order, dead) = tokio::select! {
                order = orders.message() => match order {
                    Ok(Some(order)) => (order.order, None),
                    Ok(None) | Err(_) => break,
                },
                Some(gpu) = killed.recv() => (None, running.remove(&gpu)),
                () = sleep(Duration::from_millis(heartbeat)) => {
                    let beat = v1::AgentHeartbeat::default();
                    let _ = reports.send(report(v1::agent_report::Report::Heartbeat(beat))).await;
                    continue;
                }
            };
            let exited = |worker: v1::WorkerKey| {
                report(v1::agent_report::Report::Exited(v1::WorkerExited {
                    worker: Some(worker),
                    how: "killed by signal 9".to_owned(),
                    signal: 9,
                    status: -1,
                }))
            };
            if let Some(Running(key, _)) = &dead {
                let _ = reports.send(exited(key.clone())).await;
            }
            match order {
                Some(v1::agent_order::Order::Welcome(welcome)) => {
                    heartbeat = u64::from(welcome.heartbeat_ms);
                }
                Some(v1::agent_order::Order::Spawn(spawn)) => {
                    let key = spawn.worker.unwrap();
                    let task = tokio::spawn(worker(address.clone(), key.clone(), tell.clone()));
                    running.insert(key.gpu.clone(), Running(key.clone(), task));
                    let spawned = v1::WorkerSpawned { worker: Some(key), pid: 7 };
                    let _ = reports.send(report(v1::agent_report::Report::Spawned(spawned))).await;
                }
                Some(v1::agent_order::Order::Fence(fence)) => {
                    let key = fence.worker.unwrap();
                    if running.get(&key.gpu).is_some_and(|Running(now, _)| *now == key) {
                        running.remove(&key.gpu);
                    }
                    let _ = reports.send(exited(key)).await;
                }
                Some(v1::agent_order::Order::ReleaseGpu(release)) => {
                    let done = v1::OrderDone {
                        request: release.request,
                        ok: false,
                        message: "nothing holds it back here".to_owned(),
                    };
                    let _ = reports.send(report(v1::agent_report::Report::Done(done))).await;
                }
                Some(
                    order @ (v1::agent_order::Order::Quiesce(_)
                    | v1::agent_order::Order::EndQuiesce(_)
                    | v1::agent_order::Order::SetPowerLimit(_)
                    | v1::agent_order::Order::ProbeNow(_)),
                ) => panic!("nobody asked for {order:?}"),
                Some(v1::agent_order::Order::HealthAck(_)) | None => {}
            }
        }
    }
}

pub fn gpu(index: u32) -> v1::Gpu {
    v1::Gpu {
        uuid: format!("GPU-{index}"),
        index,
        pci_bus_id: String::new(),
        name: "Test GPU".to_owned(),
        memory_bytes: 80 << 30,
        verdict: Some(v1::HealthVerdict {
            health: v1::HealthClass::Healthy.into(),
            shards_readable: true,
            ..v1::HealthVerdict::default()
        }),
        ..v1::Gpu::default()
    }
}

/// Trains one step in each epoch, by word only.
async fn worker(address: String, key: v1::WorkerKey, tell: mpsc::UnboundedSender<Told>) {
    let mut state = v1::WorkerState {
        phase: Phase::Idle.into(),
        holding: serde_json::to_vec(&Holding::default()).unwrap(),
        ..v1::WorkerState::default()
    };
    let me = WorkerKey { gpu: GpuId(key.gpu.clone()), incarnation: Incarnation(key.incarnation) };
    let name = me.to_string();
    let mut global_batch = 0;
    let mut next: Option<v1::Prepare> = None;
    loop {
        sleep(RECONNECT).await;
        let Ok(mut client) = WorkerClient::connect(format!("http://{address}")).await else {
            continue;
        };
        let (reports, outbound) = mpsc::channel(64);
        let send = async |report| {
            // A broken stream shows when orders are read.
            let _ = reports.send(v1::WorkerReport { report: Some(report) }).await;
        };
        send(v1::worker_report::Report::Hello(v1::WorkerHello {
            worker: Some(key.clone()),
            node: "n0".to_owned(),
            endpoint: Some(v1::Endpoint { node: "n0".to_owned(), unix: name.clone(), tcp: String::new() }),
            pid: 7,
            connection: 0,
            state: Some(state.clone()),
        }))
        .await;
        let Ok(orders) = client.session(ReceiverStream::new(outbound)).await else {
            continue;
        };
        let mut orders = orders.into_inner();
        while let Ok(Some(order)) = orders.message().await {
            let worker = name.clone();
            match order.order.unwrap() {
                v1::worker_order::Order::Welcome(welcome) => {
                    let spec = JobSpec::parse(&welcome.job_toml, "job").unwrap();
                    global_batch = u64::from(spec.batch.global);
                    let _ = tell.send(Told::Welcome { worker });
                }
                v1::worker_order::Order::CloseEpoch(close) => {
                    state.phase = Phase::Quiesced.into();
                    let _ = tell.send(Told::Close { worker, epoch: close.epoch });
                    let state = Some(state.clone());
                    send(v1::worker_report::Report::Quiesced(v1::Quiesced { state })).await;
                }
                v1::worker_order::Order::Pause(_) => {
                    state.phase = Phase::Quiesced.into();
                    let state = Some(state.clone());
                    send(v1::worker_report::Report::Quiesced(v1::Quiesced { state })).await;
                }
                v1::worker_order::Order::Join(join) => {
                    let joined = v1::Joined { epoch: join.epoch };
                    send(v1::worker_report::Report::Joined(joined)).await;
                }
                v1::worker_order::Order::Prepare(prepare) => {
                    let (epoch, ticket) = (prepare.epoch, prepare.ticket.to_vec());
                    let _ = tell.send(Told::Prepare { worker, epoch, ticket });
                    state.phase = Phase::Ready.into();
                    state.ready_epoch = epoch;
                    send(v1::worker_report::Report::Ready(v1::Ready {
                        epoch,
                        replicated_digest: "same".to_owned(),
                        step: prepare.resume_step,
                    }))
                    .await;
                    next = Some(prepare);
                }
                v1::worker_order::Order::Resume(resume) => {
                    let _ = tell.send(Told::Resume { worker, epoch: resume.epoch });
                    let prepared = next.take().expect("Resume comes after Prepare");
                    assert_eq!(prepared.epoch, resume.epoch);
                    let committed = resumed(&mut state, &prepared, &me, global_batch);
                    send(v1::worker_report::Report::Committed(committed)).await;
                }
                v1::worker_order::Order::Stop(_) => {
                    let _ = tell.send(Told::Stop { worker });
                    return;
                }
            }
        }
    }
}

/// Swaps to the prepared layout and commits one step under it.
fn resumed(
    state: &mut v1::WorkerState,
    prepared: &v1::Prepare,
    me: &WorkerKey,
    global_batch: u64,
) -> v1::Committed {
    let layout: Layout = serde_json::from_slice(&reknit_proto::unpack(&prepared.layout).unwrap()).unwrap();
    let place = layout.place_of(me).expect("a member");
    let group = layout.group(place.replica, place.stage).unwrap();
    let step = prepared.resume_step + 1;
    let holding = Holding { step: Step(step), units: group.owned(place.slot).into() };
    let samples = layout.samples_of(place.replica);
    let vote = v1::StepVote { grad_norm_squared: 1.0, loss: 5.0 };
    *state = v1::WorkerState {
        phase: Phase::Training.into(),
        epoch: prepared.epoch,
        ready_epoch: 0,
        committed_step: step,
        holding: serde_json::to_vec(&holding).unwrap(),
        prepared_step: step,
        attempted_step: step,
        vote: Some(vote),
    };
    v1::Committed {
        epoch: prepared.epoch,
        step,
        vote: Some(vote),
        first_sample: prepared.resume_step * global_batch + u64::from(samples.start),
        samples: samples.len() as u32,
        step_ms: 1,
        rolled_forward: false,
        tokens: 1,
    }
}
