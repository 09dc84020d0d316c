//! The agent's one loop: everything that happens comes here, and every decision is taken here.

mod orders;

use crate::clock::{Clock, Millis};
use crate::config::Config;
use crate::convert;
use crate::files;
use crate::health::{Boot, Memory, Tracker, Transition, Verdict, XidSeen};
use crate::policy::Policies;
use crate::power::Leases;
use crate::probe::protocol::{GpuIdentity, ProbeLine};
use crate::probe_keeper::{KeeperOrder, ProbeKeeper, ProbeNews};
use crate::requests::Requests;
use crate::session::{self, SessionNews};
use crate::sight::Sight;
use crate::spool::Spool;
use crate::workers::{Exit, Spawn, WorkerId, Workers};
use reknit_layout::GpuId;
use reknit_proto::v1;
use reknit_proto::v1::agent_order::Order;
use reknit_proto::v1::agent_report::Report;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::path::PathBuf;
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
    #[error(
        "cannot load the NVML library {path}: {why}; install the NVIDIA driver, or give the library's path with --nvml-library"
    )]
    Library { path: PathBuf, why: String },
    #[error(transparent)]
    Policy(#[from] crate::policy::PolicyFileError),
    #[error("cannot look after workers: {0}")]
    Workers(std::io::Error),
    #[error("cannot listen for signals: {0}")]
    Signals(std::io::Error),
}

struct Agent {
    config: Config,
    clock: Clock,
    boot: Boot,
    /// Random, of this start.
    instance: String,
    tracker: Tracker,
    /// As last written down.
    memory: Memory,
    sight: Sight,
    gpus: BTreeMap<GpuId, GpuIdentity>,
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

/// Runs until a signal ends it.
pub(crate) async fn run(config: Config) -> Result<(), AgentError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(AgentError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(AgentError::Signals)?;
    let (exits_in, mut exits) = mpsc::channel(QUEUED_NEWS);
    let workers =
        Workers::adopt(config.worker.clone(), &config.state_dir, exits_in).map_err(AgentError::Workers)?;
    let (probe_orders, probe_orders_out) = mpsc::channel(QUEUED_NEWS);
    let clock = Clock::start();
    let (boot, folder) = (boot(clock.now()), config.state_dir.clone());
    let memory: Memory = files::load_json(&folder.join(MEMORY)).unwrap_or_default();
    let policies = Policies::built_in().map_err(crate::policy::PolicyFileError::from)?;
    let mut agent = Agent {
        tracker: Tracker::new(policies, boot.clone(), memory.clone()),
        memory,
        boot,
        instance: files::unique().map_err(AgentError::Workers)?,
        // Later than any number of an earlier start that lost its state folder, as long as that sent less than one
        // transition a microsecond.
        spool: Spool::open(&folder.join(TRANSITIONS), clock.now().0.saturating_mul(1_000)),
        power: Leases::restored(files::load_json(&folder.join(POWER)).unwrap_or_default()),
        clock,
        sight: Sight::default(),
        gpus: BTreeMap::new(),
        workers,
        requests: Requests::default(),
        link: None,
        heartbeats: 0,
        probe_orders,
        replacing_probe: false,
        reopen_session: Arc::default(),
        config,
    };
    let mut probe = agent.start_probe(probe_orders_out);
    agent.first_look(&mut probe).await?;
    let mut session = agent.start_session();
    let mut heartbeat = interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            Some(news) = probe.recv() => agent.probe_news(news),
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

/// This boot of the node.
fn boot(now: Millis) -> Boot {
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    let uptime = uptime.split_ascii_whitespace().next().and_then(|seconds| seconds.parse().ok());
    let uptime = Duration::try_from_secs_f64(uptime.unwrap_or(0.0)).unwrap_or_default();
    Boot { id: files::boot_id().unwrap_or_default(), at: now.before(uptime) }
}

impl Agent {
    fn start_probe(&self, orders: mpsc::Receiver<KeeperOrder>) -> mpsc::Receiver<ProbeNews> {
        let (news, receiver) = mpsc::channel(QUEUED_NEWS);
        let config = &self.config;
        let keeper = ProbeKeeper::new(
            config.nvml_library.clone(),
            config.probe_interval,
            config.log,
            // One that is lost now could not be named otherwise.
            files::load_json(&config.state_dir.join(GPUS)).unwrap_or_default(),
            news,
            orders,
        );
        tokio::spawn(keeper.run());
        receiver
    }

    fn start_session(&self) -> mpsc::Receiver<SessionNews> {
        let (news, receiver) = mpsc::channel(QUEUED_NEWS);
        let (endpoint, reopen) = (self.config.daemon.clone(), self.reopen_session.clone());
        tokio::spawn(async move { session::keep(endpoint, news, &reopen).await });
        receiver
    }

    /// Waits until the GPUs are known, so that the first hello names them. Goes on without them when the
    /// driver does not answer; only a library that cannot be loaded ends the agent.
    async fn first_look(&mut self, probe: &mut mpsc::Receiver<ProbeNews>) -> Result<(), AgentError> {
        let path = self.config.nvml_library.clone();
        let look = async {
            if let Some(news) = probe.recv().await {
                if let ProbeNews::Ended { why, library: true } = news {
                    return Err(AgentError::Library { path, why });
                }
                self.probe_news(news);
            }
            Ok(())
        };
        match timeout(FIRST_LOOK, look).await {
            Ok(result) => result,
            Err(_) => {
                warn!("the driver does not answer: the node is blind");
                Ok(())
            }
        }
    }

    fn probe_news(&mut self, news: ProbeNews) {
        match news {
            ProbeNews::Line(line) => self.probe_line(line),
            ProbeNews::Quiesced { confirmed } => self.quiesced(confirmed),
            ProbeNews::Ended { why, library: _ } => {
                self.replacing_probe = false;
                // A quiesce has told already why nothing is seen.
                if self.sight.quiesced_until().is_none() {
                    let cause = format!("the node is blind: {why}");
                    let transitions = self.tracker.blind(self.clock.now(), &cause);
                    self.sight.ended(cause);
                    self.report_health(transitions);
                }
            }
        }
    }

    fn probe_line(&mut self, line: ProbeLine) {
        let now = self.clock.now();
        // Of a probe that had not ended yet when it was told to.
        let late = self.sight.quiesced_until().is_some();
        match line {
            ProbeLine::Ready { .. } | ProbeLine::Reading { .. } | ProbeLine::Tick { .. } if late => {}
            ProbeLine::Ready { gpus, silent, driver: _ } => {
                self.sight.ready(gpus.iter().map(|gpu| &gpu.uuid));
                self.gpus_found(gpus, &silent);
                self.power.probe_started();
            }
            ProbeLine::Reading { gpu, reading } => {
                self.sight.reading(now, &gpu, &reading);
                let transition = self.tracker.reading(now, &gpu, &reading);
                self.report_health(transition);
                if reading.is_whole() {
                    let answers = self.requests.read(&gpu);
                    self.answer(answers);
                }
            }
            ProbeLine::Xid { gpu, xid } => {
                let transition = self.tracker.xid(now, &gpu, &XidSeen { number: xid, log: None });
                self.report_health(transition);
                info!(%gpu, xid, "XID");
            }
            ProbeLine::Tick { busy } => {
                let (transitions, blind) = self.tracker.hung(now, &busy);
                self.report_health(transitions);
                if blind && !self.replacing_probe {
                    self.replacing_probe = true;
                    self.order_probe(KeeperOrder::Replace);
                }
            }
            ProbeLine::Gap { gpu, what } => {
                info!(%gpu, what, "cannot be seen");
                self.sight.gap(&gpu, what);
            }
            ProbeLine::PowerLimit { gpu, set } => self.power_limit_set(&gpu, &set),
            // The keeper ends with it, and `Ended` follows.
            ProbeLine::Failed { .. } => {}
        }
    }

    /// Takes over the probe's list of GPUs. The wire names GPUs only in the hello, so a changed list needs
    /// another one.
    fn gpus_found(&mut self, found: Vec<GpuIdentity>, silent: &[GpuId]) {
        let found: BTreeMap<GpuId, GpuIdentity> =
            found.into_iter().map(|gpu| (gpu.uuid.clone(), gpu)).collect();
        if found == self.gpus {
            return;
        }
        for gone in self.gpus.keys().filter(|gpu| !found.contains_key(gpu)) {
            self.tracker.forget(gone);
        }
        for gpu in found.values() {
            self.tracker.watch(gpu, !silent.contains(&gpu.uuid));
        }
        self.gpus = found;
        let gpus: Vec<&GpuIdentity> = self.gpus.values().collect();
        files::save_json(&self.config.state_dir.join(GPUS), &gpus);
        if self.link.take().is_some() {
            self.reopen_session.notify_one();
        }
    }

    fn report_health(&mut self, transitions: impl IntoIterator<Item = Transition>) {
        let mut told = false;
        for transition in transitions {
            let sequence = self.spool.push(transition.clone());
            self.send(convert::transition(sequence, &transition));
            let Verdict { class, cause, evidence, rejoin: _, action: _, shards_readable: _ } =
                &transition.verdict;
            info!(gpu = %transition.gpu, ?class, cause, evidence, sequence, "GPU health");
            told = true;
        }
        // After the transitions: what is remembered as told must have been told.
        if told {
            self.save_memory();
        }
    }

    fn save_memory(&mut self) {
        let memory = self.tracker.memory();
        if memory != self.memory {
            files::save_json(&self.config.state_dir.join(MEMORY), &memory);
            self.memory = memory;
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
        let now = self.clock.now();
        let gpus = self.gpus.values().filter_map(|gpu| {
            let verdict = self.tracker.verdict(&gpu.uuid)?;
            let enforced = self.tracker.enforced(&gpu.uuid);
            Some(convert::gpu(gpu, verdict, enforced, self.tracker.risk(now, &gpu.uuid)))
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
            boot_id: self.boot.id.clone(),
            observability: convert::observability(self.sight.observability()).into(),
            gaps: self.sight.gaps(),
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
        let index = self.gpus.get(&worker.key.gpu).map(|gpu| gpu.index);
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
        if self.link.is_none() {
            return;
        }
        self.heartbeats += 1;
        let now = self.clock.now();
        let gpus = self.gpus.keys().filter_map(|gpu| {
            let class = self.tracker.verdict(gpu)?.class;
            let (enforced, risk) = (self.tracker.enforced(gpu), self.tracker.risk(now, gpu));
            Some(convert::gpu_state(now, gpu, class, enforced, self.sight.of(gpu), risk))
        });
        let beat = v1::AgentHeartbeat {
            sequence: self.heartbeats,
            observability: convert::observability(self.sight.observability()).into(),
            gaps: self.sight.gaps(),
            gpus: gpus.collect(),
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
