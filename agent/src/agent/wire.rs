//! The agent's end of its session: what it tells the daemon, and the daemon's own orders.

use super::Agent;
use crate::clock::Millis;
use crate::convert;
use crate::session::SessionNews;
use crate::workers::{Spawn, WorkerId};
use reknit_layout::GpuId;
use reknit_proto::v1;
use reknit_proto::v1::agent_order::Order;
use reknit_proto::v1::agent_report::Report;
use std::time::Duration;
use tokio::sync::mpsc::error::TrySendError;
use tracing::info;

/// Whatever a daemon says: with each heartbeat the agent also looks after itself.
const SHORTEST_HEARTBEAT: Duration = Duration::from_millis(10);
const LONGEST_HEARTBEAT: Duration = Duration::from_secs(10);

impl Agent {
    /// Returns how often to send heartbeats, when the daemon has just said so.
    pub(super) fn session_news(&mut self, news: SessionNews) -> Option<Duration> {
        match news {
            SessionNews::Opening(link) => {
                self.link = Some(link);
                self.connections += 1;
                self.greet();
                None
            }
            SessionNews::Closed => {
                self.link = None;
                self.requests.forget();
                None
            }
            SessionNews::Order(order) => self.order(order),
        }
    }

    /// The hello, then all that the daemon may have missed.
    fn greet(&mut self) {
        self.say_hello();
        let missed = self.spool.waiting();
        let mut reports: Vec<_> =
            missed.map(|(sequence, transition)| convert::transition(*sequence, transition)).collect();
        let ends = self.workers.ended_before();
        reports.extend(ends.map(|(worker, exit)| convert::exited(worker, exit)));
        for report in reports {
            self.send(report);
        }
    }

    /// Also within a session: the list of GPUs is told nowhere else.
    pub(super) fn say_hello(&mut self) {
        let now = self.node.now();
        let gpus = self.node.gpus.values().filter_map(|gpu| {
            let verdict = self.node.tracker.verdict(&gpu.uuid)?;
            let enforced = self.node.tracker.enforced(&gpu.uuid);
            Some(convert::gpu(gpu, verdict, enforced, self.node.tracker.risk(now, &gpu.uuid)))
        });
        let workers = self
            .workers
            .running()
            .map(|(worker, pid)| v1::WorkerProcess { worker: Some(convert::worker_key(worker)), pid });
        let hello = v1::AgentHello {
            node: self.config.node.clone(),
            gpus: gpus.collect(),
            workers: workers.collect(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            instance: self.instance.clone(),
            boot_id: self.node.boot_id().to_owned(),
            observability: convert::observability(self.node.sight.observability()).into(),
            gaps: self.node.sight.gaps(),
            next_sequence: self.spool.next(),
            quiesce_left_ms: self.quiesce_left_ms(now),
            connection: self.connections,
        };
        self.send(convert::report(Report::Hello(hello)));
    }

    /// 0: it is not quiesced.
    fn quiesce_left_ms(&self, now: Millis) -> u64 {
        let left = self.node.sight.quiesced_until().map(|until| until.since(now));
        left.map_or(0, |left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX))
    }

    fn order(&mut self, order: Order) -> Option<Duration> {
        match order {
            Order::Welcome(welcome) => {
                let every = Duration::from_millis(welcome.heartbeat_ms.into());
                return Some(every.clamp(SHORTEST_HEARTBEAT, LONGEST_HEARTBEAT));
            }
            Order::Spawn(spawn) => {
                if let Some(worker) = convert::worker_id(spawn.worker) {
                    info!(%worker, epoch = spawn.epoch, "spawn");
                    self.spawn(worker);
                }
            }
            Order::Fence(fence) => {
                if let Some(worker) = convert::worker_id(fence.worker) {
                    info!(%worker, epoch = fence.epoch, "fence");
                    if let Some(exit) = self.workers.fence(&worker) {
                        self.send(convert::exited(&worker, &exit));
                    }
                }
            }
            Order::HealthAck(ack) => self.spool.acknowledge(ack.sequence),
            Order::Quiesce(order) => self.quiesce(order.request, order.seconds),
            Order::EndQuiesce(order) => self.end_quiesce(order.request),
            Order::SetPowerLimit(order) => self.set_power_limit(order),
            Order::ProbeNow(order) => self.probe_now(order.request),
            Order::ReleaseGpu(order) => self.release(order.request, &GpuId(order.gpu)),
        }
        None
    }

    fn spawn(&mut self, worker: WorkerId) {
        let index = self.node.gpus.get(&worker.key.gpu).map(|gpu| gpu.index);
        match self.workers.spawn(worker.clone(), index) {
            Spawn::Running(pid) => {
                self.send(convert::spawned(&worker, pid));
                info!(%worker, pid, "worker runs");
            }
            Spawn::Ended(exit) => self.send(convert::exited(&worker, &exit)),
        }
    }

    pub(super) fn heartbeat(&mut self) {
        self.spool.retry();
        self.workers.retry_saving();
        self.save_memory();
        self.reread_policy();
        if self.link.is_none() {
            return;
        }
        self.heartbeats += 1;
        let now = self.node.now();
        let gpus = self.node.gpus.keys().filter_map(|gpu| {
            let class = self.node.tracker.verdict(gpu)?.class;
            let (enforced, risk) = (self.node.tracker.enforced(gpu), self.node.tracker.risk(now, gpu));
            Some(convert::gpu_state(now, gpu, class, enforced, self.node.sight.of(gpu), risk))
        });
        let beat = v1::AgentHeartbeat {
            sequence: self.heartbeats,
            observability: convert::observability(self.node.sight.observability()).into(),
            gaps: self.node.sight.gaps(),
            gpus: gpus.collect(),
            readings: self.node.readings,
            quiesce_left_ms: self.quiesce_left_ms(now),
        };
        self.send(convert::report(Report::Heartbeat(beat)));
    }

    /// Never waits. A session that cannot keep up is dropped; the next one's hello tells what it missed.
    pub(super) fn send(&mut self, report: v1::AgentReport) {
        let Some(link) = &self.link else {
            return;
        };
        match link.try_send(report) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                self.link = None;
                self.reopen_session.notify_one();
            }
            Err(TrySendError::Closed(_)) => self.link = None,
        }
    }
}
