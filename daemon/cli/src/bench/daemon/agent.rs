//! A simulated agent: a session of its own connection, a heartbeat a second, and workers that it starts and kills.

use super::fleet::{Fleet, gpu_uuid, node_name};
use super::worker;
use reknit_proto::v1::agent_client::AgentClient;
use reknit_proto::v1::agent_order::Order;
use reknit_proto::v1::agent_report::Report;
use reknit_proto::v1::{self, AgentOrder, AgentReport};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

const HEARTBEAT: Duration = Duration::from_secs(1);

/// Serves until the fleet is dropped with the runtime. `kills`: GPUs whose worker shall die. `late`: heartbeats of many
/// are spread over the second.
pub(super) async fn run(
    fleet: Arc<Fleet>,
    node: u32,
    has_gpus: bool,
    late: Duration,
    kills: mpsc::Receiver<u32>,
) {
    if let Err(problem) = serve(&fleet, node, has_gpus, late, kills).await {
        fleet.fail(format!("agent of {}: {problem}", node_name(node)));
    }
}

async fn serve(
    fleet: &Arc<Fleet>,
    node: u32,
    has_gpus: bool,
    late: Duration,
    mut kills: mpsc::Receiver<u32>,
) -> Result<(), String> {
    let channel = Endpoint::from(fleet.daemon.clone()).connect().await.map_err(|error| error.to_string())?;
    let (reports, stream) = mpsc::channel(64);
    let gpus = if has_gpus { fleet.gpus } else { 0 };
    let send = async |report| {
        let sent = reports.send(AgentReport { report: Some(report) }).await;
        sent.map_err(|_| "its session has ended".to_owned())
    };
    send(Report::Hello(hello(node, gpus))).await?;
    let opened = AgentClient::new(channel).session(ReceiverStream::new(stream)).await;
    let mut orders = opened.map_err(|status| status.message().to_owned())?.into_inner();
    let mut beats = interval_at(Instant::now() + late, HEARTBEAT);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sequence = 0;
    let mut workers: BTreeMap<String, (v1::WorkerKey, oneshot::Sender<()>)> = BTreeMap::new();
    loop {
        tokio::select! {
            _ = beats.tick() => {
                sequence += 1;
                send(Report::Heartbeat(heartbeat(sequence, node, gpus))).await?;
                fleet.tally().reports += 1;
            }
            order = orders.message() => {
                let order = order.map_err(|status| status.message().to_owned())?;
                match order.and_then(|order: AgentOrder| order.order) {
                    Some(Order::Welcome(_)) => fleet.note(|tally| tally.agents += 1),
                    Some(Order::Spawn(v1::SpawnWorker { worker: Some(key), .. })) => {
                        let (alive, killed) = oneshot::channel();
                        let index = (0..gpus).find(|index| gpu_uuid(node, *index) == key.gpu);
                        let index = index.ok_or_else(|| format!("it has no GPU {}", key.gpu))?;
                        tokio::spawn(worker::run(Arc::clone(fleet), node, index, key.clone(), killed));
                        send(Report::Spawned(v1::WorkerSpawned { worker: Some(key.clone()), pid: index + 1 })).await?;
                        workers.insert(key.gpu.clone(), (key, alive));
                    }
                    Some(Order::Fence(v1::FenceWorker { worker: Some(key), .. })) => {
                        workers.remove(&key.gpu);
                        send(exited(key)).await?;
                    }
                    Some(_) => {}
                    None => return Err("the daemon ended its session".to_owned()),
                }
            }
            Some(index) = kills.recv() => {
                if let Some((key, _dies)) = workers.remove(&gpu_uuid(node, index)) {
                    send(exited(key)).await?;
                }
            }
        }
    }
}

fn exited(worker: v1::WorkerKey) -> Report {
    let how = "killed by signal 9".to_owned();
    Report::Exited(v1::WorkerExited { worker: Some(worker), how, signal: 9, status: -1 })
}

fn hello(node: u32, gpus: u32) -> v1::AgentHello {
    let gpus = (0..gpus).map(|index| v1::Gpu {
        uuid: gpu_uuid(node, index),
        index,
        name: "Simulated GPU".to_owned(),
        memory_bytes: 80 << 30,
        verdict: Some(v1::HealthVerdict {
            health: v1::HealthClass::Healthy.into(),
            ..v1::HealthVerdict::default()
        }),
        ..v1::Gpu::default()
    });
    v1::AgentHello {
        node: node_name(node),
        gpus: gpus.collect(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        instance: format!("{node:016x}"),
        observability: v1::Observability::Full.into(),
        next_sequence: 1,
        ..v1::AgentHello::default()
    }
}

fn heartbeat(sequence: u64, node: u32, gpus: u32) -> v1::AgentHeartbeat {
    let gpus = (0..gpus).map(|index| v1::GpuState {
        uuid: gpu_uuid(node, index),
        health: v1::HealthClass::Healthy.into(),
        age_ms: Some(500),
        temperature: Some(60),
        power_mw: Some(400_000),
        power_limit_mw: Some(700_000),
        risk: 0.0,
    });
    v1::AgentHeartbeat {
        sequence,
        observability: v1::Observability::Full.into(),
        gpus: gpus.collect(),
        readings: sequence,
        ..v1::AgentHeartbeat::default()
    }
}
