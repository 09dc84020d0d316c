//! The agent's one loop: everything that happens comes here, and every decision is taken here.

mod orders;

use crate::clock::Clock;
use crate::config::Config;
use crate::convert;
use crate::files;
use crate::health::{Memory, Transition, Verdict};
use crate::kernel_log::{Cursor, KernelLog, LogNews, LogStart};
use crate::node_health::{Heard, NodeHealth};
use crate::policy::{PolicyFileError, PolicySource};
use crate::power::Leases;
use crate::probe::protocol::{GpuIdentity, ProbeLine, ProbeOrder};
use crate::probe_keeper::{KeeperOrder, ProbeKeeper, ProbeNews};
use crate::requests::Requests;
use crate::session::{self, SessionNews};
use crate::spool::Spool;
use crate::workers::{Exit, Spawn, WorkerId, Workers};
use reknit_layout::GpuId;
use reknit_proto::v1;
use reknit_proto::v1::agent_order::Order;
use reknit_proto::v1::agent_report::Report;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::{error, info, warn};

/// In the state folder.
const GPUS: &str = "gpus.json";
const MEMORY: &str = "health.json";
const POWER: &str = "power.json";
const QUIESCED: &str = "quiesced.json";
const TRANSITIONS: &str = "transitions.jsonl";

/// News waiting for the loop. Whoever fills it waits.
const QUEUED_NEWS: usize = 256;
const HEARTBEAT: Duration = Duration::from_millis(500);
/// From SIGTERM to SIGKILL for workers of an agent that stops.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// For killed workers to be confirmed gone.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// For the first look at the GPUs, so that the first hello can name them.
const FIRST_LOOK: Duration = Duration::from_secs(10);

/// Why the agent ended other than by being told to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    #[error(transparent)]
    Policy(#[from] PolicyFileError),
    #[error("cannot follow the kernel log: {0}")]
    KernelLog(std::io::Error),
    #[error("cannot look after workers: {0}")]
    Workers(std::io::Error),
    #[error("cannot listen for signals: {0}")]
    Signals(std::io::Error),
}

struct Agent {
    config: Config,
    node: NodeHealth,
    policy: PolicySource,
    /// The last line of the kernel log that was taken in.
    cursor: Option<Cursor>,
    /// Random, of this start.
    instance: String,
    /// As last written down.
    remembered: Remembered,
    workers: Workers,
    spool: Spool<Transition>,
    power: Leases,
    requests: Requests,
    /// The open session, from its hello on.
    link: Option<mpsc::Sender<v1::AgentReport>>,
    heartbeats: u64,
    probe_orders: mpsc::Sender<KeeperOrder>,
    /// Asked for, and the old one has not ended.
    replacing_probe: bool,
    reopen_session: Arc<Notify>,
}

/// `health.json`. Written before the transitions are spooled and sent, so that what is remembered as told is told.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Remembered {
    memory: Memory,
    kernel_log: Option<Cursor>,
    /// The newest transitions, which the spool may lack if the agent died in between.
    newest: Vec<(u64, Transition)>,
}

/// Runs until a signal ends it.
pub(crate) async fn run(config: Config) -> Result<(), AgentError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(AgentError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(AgentError::Signals)?;
    let (exits_in, mut exits) = mpsc::channel(QUEUED_NEWS);
    let workers =
        Workers::adopt(config.worker.clone(), &config.state_dir, exits_in).map_err(AgentError::Workers)?;
    let (probe_orders, probe_orders_out) = mpsc::channel(QUEUED_NEWS);
    let (clock, folder) = (Clock::start(), config.state_dir.clone());
    let remembered: Remembered = files::load_json(&folder.join(MEMORY)).unwrap_or_default();
    let (policy, policies, refused) = PolicySource::open(config.policy.clone(), &folder)?;
    let mut agent = Agent {
        node: NodeHealth::new(clock, policies, remembered.memory.clone()),
        policy,
        cursor: remembered.kernel_log.clone(),
        remembered,
        instance: files::unique().map_err(AgentError::Workers)?,
        // Later than any number of an earlier start that lost its state folder, as long as that sent less than one
        // transition a microsecond.
        spool: Spool::open(&folder.join(TRANSITIONS), clock.now().0.saturating_mul(1_000)),
        power: Leases::restored(files::load_json(&folder.join(POWER)).unwrap_or_default()),
        workers,
        requests: Requests::default(),
        link: None,
        heartbeats: 0,
        probe_orders,
        replacing_probe: false,
        reopen_session: Arc::default(),
        config,
    };
    agent.node.sight.bad_policy = refused;
    agent.spool_newest();
    agent.stay_quiesced();
    let known: Vec<GpuIdentity> = files::load_json(&folder.join(GPUS)).unwrap_or_default();
    let mut probe = agent.start_probe(known.clone(), probe_orders_out);
    agent.first_look(&mut probe, known).await;
    let (log_in, mut log) = mpsc::channel(QUEUED_NEWS);
    let start = agent.cursor.clone().map_or(LogStart::End, LogStart::After);
    let _follows =
        KernelLog::start(agent.config.kmsg.clone(), start, log_in).map_err(AgentError::KernelLog)?;
    let mut session = agent.start_session();
    let mut heartbeat = interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            Some(news) = probe.recv() => agent.probe_news(news),
            Some(news) = log.recv() => agent.log_news(news),
            Some((worker, exit)) = exits.recv() => agent.worker_exited(&worker, &exit),
            Some(news) = session.recv() => {
                if let Some(every) = agent.session_news(news) {
                    heartbeat = interval(every);
                    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
                }
            }
            _ = heartbeat.tick() => agent.heartbeat(),
            () = agent.due() => agent.do_due(),
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    agent.stop(&mut exits).await;
    Ok(())
}

impl Agent {
    /// `known`: GPUs seen by an earlier start. One that is lost now could not be named otherwise.
    fn start_probe(
        &self,
        known: Vec<GpuIdentity>,
        orders: mpsc::Receiver<KeeperOrder>,
    ) -> mpsc::Receiver<ProbeNews> {
        let (news, receiver) = mpsc::channel(QUEUED_NEWS);
        let config = &self.config;
        let keeper = ProbeKeeper::new(
            config.nvml_library.clone(),
            config.probe_interval,
            config.log,
            known,
            news,
            orders,
        );
        let quiesced = self.node.sight.quiesced_until().is_some();
        tokio::spawn(if quiesced { keeper.quiesced() } else { keeper }.run());
        receiver
    }

    fn start_session(&self) -> mpsc::Receiver<SessionNews> {
        let (news, receiver) = mpsc::channel(QUEUED_NEWS);
        let (endpoint, reopen) = (self.config.daemon.clone(), self.reopen_session.clone());
        tokio::spawn(async move { session::keep(endpoint, news, &reopen).await });
        receiver
    }

    /// Waits until the GPUs are known, so that the first hello names them. Goes on with those of an earlier start when there
    /// is no driver or it does not answer: one may come.
    async fn first_look(&mut self, probe: &mut mpsc::Receiver<ProbeNews>, known: Vec<GpuIdentity>) {
        match timeout(FIRST_LOOK, probe.recv()).await {
            Ok(Some(news)) => self.probe_news(news),
            Ok(None) => {}
            Err(_) => warn!("the driver does not answer: the node is blind"),
        }
        if self.node.gpus.is_empty() {
            self.node.not_found_yet(known);
        }
    }

    fn probe_news(&mut self, news: ProbeNews) {
        match news {
            ProbeNews::Line(line) => self.probe_line(line),
            ProbeNews::Quiesced { confirmed } => self.quiesced(confirmed),
            ProbeNews::Ended { why } => {
                self.replacing_probe = false;
                // A quiesce has told already why nothing is seen.
                if self.node.sight.quiesced_until().is_none() {
                    let heard = self.node.ended(&why);
                    self.heard(heard);
                }
            }
        }
    }

    fn probe_line(&mut self, line: ProbeLine) {
        // Of a probe that had not ended yet when it was told to.
        let late = self.node.sight.quiesced_until().is_some();
        let mut whole = None;
        match &line {
            ProbeLine::Ready { .. } | ProbeLine::Reading { .. } | ProbeLine::Tick { .. } if late => return,
            ProbeLine::Ready { .. } => self.power.probe_started(),
            ProbeLine::Reading { gpu, reading } => whole = reading.is_whole().then(|| gpu.clone()),
            ProbeLine::PowerLimit { gpu, set } => self.power_limit_set(gpu, set),
            ProbeLine::Failed { .. }
            | ProbeLine::Xid { .. }
            | ProbeLine::Tick { .. }
            | ProbeLine::Gap { .. } => {}
        }
        let heard = self.node.line(line);
        self.heard(heard);
        if let Some(gpu) = whole {
            let answers = self.requests.read(&gpu);
            self.answer(answers);
        }
    }

    fn log_news(&mut self, news: LogNews) {
        if let LogNews::Line { cursor, .. } = &news {
            self.cursor = Some(cursor.clone());
        }
        let heard = self.node.log(news);
        self.heard(heard);
    }

    /// Does what follows from news.
    fn heard(&mut self, heard: Heard) {
        let Heard { transitions, replace_probe, read_now, gpus_changed } = heard;
        // The wire names GPUs only in the hello, so a changed list needs another one.
        if gpus_changed {
            let gpus: Vec<&GpuIdentity> = self.node.gpus.values().filter(|gpu| gpu.is_identified()).collect();
            files::save_json(&self.config.state_dir.join(GPUS), &gpus);
            if self.link.take().is_some() {
                self.reopen_session.notify_one();
            }
        }
        self.report_health(transitions);
        if replace_probe && !self.replacing_probe {
            self.replacing_probe = true;
            self.order_probe(KeeperOrder::Replace);
        }
        if read_now {
            self.order_probe(KeeperOrder::ToProbe(ProbeOrder::ReadNow));
        }
    }

    fn report_health(&mut self, transitions: impl IntoIterator<Item = Transition>) {
        let newest: Vec<(u64, Transition)> = (self.spool.next()..).zip(transitions).collect();
        if newest.is_empty() {
            return;
        }
        self.remember(newest);
        self.spool_newest();
        for (sequence, transition) in self.remembered.newest.clone() {
            self.send(convert::transition(sequence, &transition));
            let Verdict { class, cause, evidence, rejoin: _, action: _, shards_readable: _ } =
                &transition.verdict;
            info!(gpu = %transition.gpu, ?class, cause, evidence, sequence, "GPU health");
        }
    }

    fn spool_newest(&mut self) {
        for (sequence, transition) in &self.remembered.newest {
            if !self.spool.has_given(*sequence) {
                self.spool.push(transition.clone());
            }
        }
    }

    fn remember(&mut self, newest: Vec<(u64, Transition)>) {
        let remembered =
            Remembered { memory: self.node.tracker.memory(), kernel_log: self.cursor.clone(), newest };
        if remembered != self.remembered {
            files::save_json(&self.config.state_dir.join(MEMORY), &remembered);
            self.remembered = remembered;
        }
    }

    /// What changed without a transition.
    fn save_memory(&mut self) {
        self.remember(self.remembered.newest.clone());
    }

    /// A policy file that changed is taken over, unless it is no good.
    fn reread_policy(&mut self) {
        match self.policy.changed() {
            None => {}
            Some(Ok(policies)) => {
                info!("the policy file has changed and is in force");
                self.node.tracker.set_policies(policies);
                self.node.sight.bad_policy = None;
            }
            Some(Err(e)) => {
                warn!(%e, "the policy stays as it was");
                self.node.sight.bad_policy = Some(format!("{e}; the policy from before is in force"));
            }
        }
    }

    fn worker_exited(&mut self, worker: &WorkerId, exit: &Exit) {
        self.send(convert::exited(worker, exit));
        info!(%worker, %exit, "worker ended");
        self.workers.ended(worker, exit);
    }

    /// Returns how often to send heartbeats, when the daemon has just said so.
    fn session_news(&mut self, news: SessionNews) -> Option<Duration> {
        match news {
            SessionNews::Opening(link) => {
                self.link = Some(link);
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
        };
        let mut reports = vec![convert::report(Report::Hello(hello))];
        let missed = self.spool.waiting();
        reports.extend(missed.map(|(sequence, t)| convert::transition(*sequence, t)));
        let ends = self.workers.ended_before();
        reports.extend(ends.map(|(worker, exit)| convert::exited(worker, exit)));
        for report in reports {
            self.send(report);
        }
    }

    fn order(&mut self, order: Order) -> Option<Duration> {
        match order {
            Order::Welcome(welcome) => {
                return (welcome.heartbeat_ms > 0)
                    .then(|| Duration::from_millis(welcome.heartbeat_ms.into()));
            }
            Order::Spawn(spawn) => {
                if let Some(worker) = convert::worker_id(spawn.worker) {
                    self.spawn(worker);
                }
            }
            Order::Fence(fence) => {
                if let Some(worker) = convert::worker_id(fence.worker) {
                    info!(%worker, "fence");
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

    fn heartbeat(&mut self) {
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
        };
        self.send(convert::report(Report::Heartbeat(beat)));
    }

    /// Never waits. A session that cannot keep up is dropped; the next one's hello tells what it missed.
    fn send(&mut self, report: v1::AgentReport) {
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

    async fn stop(&mut self, exits: &mut mpsc::Receiver<(WorkerId, Exit)>) {
        self.save_memory();
        if self.config.keep_workers || self.workers.is_empty() {
            return;
        }
        info!("stopping the workers");
        self.workers.signal_all(Signal::TERM);
        if self.all_exited(exits, STOP_GRACE).await {
            return;
        }
        self.workers.signal_all(Signal::KILL);
        if !self.all_exited(exits, STOP_LIMIT).await {
            error!("some workers cannot be killed: the driver may hold them; look at the kernel log");
        }
    }

    async fn all_exited(&mut self, exits: &mut mpsc::Receiver<(WorkerId, Exit)>, limit: Duration) -> bool {
        let gone = async {
            while !self.workers.is_empty() {
                if let Some((worker, exit)) = exits.recv().await {
                    self.worker_exited(&worker, &exit);
                }
            }
            self.workers.cleaned_up().await;
        };
        timeout(limit, gone).await.is_ok()
    }
}
