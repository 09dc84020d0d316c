//! The agent's one loop: everything that happens comes here, and every decision is taken here.

mod orders;
mod wire;

use crate::clock::{Clock, Millis};
use crate::config::Config;
use crate::convert;
use crate::files;
use crate::health::{Memory, Transition, Verdict};
use crate::kernel_log::{Cursor, KernelLog, LogNews, LogStart};
use crate::node_health::{Heard, NodeHealth};
use crate::policy::{PolicyFileError, PolicySource};
use crate::power::Leases;
use crate::probe::protocol::{GpuIdentity, ProbeLine};
use crate::probe_keeper::{KeeperOrder, ProbeKeeper, ProbeNews, ProbeSpec};
use crate::requests::Requests;
use crate::session::{self, SessionNews};
use crate::spool::Spool;
use crate::workers::{Exit, WorkerId, Workers};
use reknit_proto::v1;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
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
    /// Opened so far.
    connections: u64,
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
    /// When this node's first agent started: what the kernel log told before is not for it.
    since: Option<Millis>,
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
        connections: 0,
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
    let start = match (&agent.cursor, agent.remembered.since) {
        (Some(cursor), _) => LogStart::After(cursor.clone()),
        // An earlier agent saw no line, and there may be some since it ended.
        (None, Some(_)) => LogStart::Beginning,
        (None, None) => LogStart::End,
    };
    agent.node.log_since = agent.remembered.since.or(Some(agent.node.now()));
    agent.save_memory();
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
        let spec = ProbeSpec {
            library: self.config.nvml_library.clone(),
            interval: self.config.probe_interval,
            log: self.config.log,
            quiet: false,
        };
        let keeper = ProbeKeeper::new(spec, known, news, orders);
        let quiesced = self.node.sight.quiesced_until().is_some();
        tokio::spawn(if quiesced { keeper.quiesced() } else { keeper }.run());
        receiver
    }

    fn start_session(&self) -> mpsc::Receiver<SessionNews> {
        let (news, receiver) = mpsc::channel(QUEUED_NEWS);
        let (daemons, reopen) = (self.config.daemons.clone(), self.reopen_session.clone());
        tokio::spawn(async move { session::keep(daemons, news, &reopen).await });
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
            ProbeLine::Reading { gpu, reading } => {
                whole = reading.is_whole().then(|| gpu.clone());
                if let Some(limit_mw) = reading.power_limit_mw() {
                    self.power.read(gpu, limit_mw);
                }
            }
            ProbeLine::PowerLimit { gpu, set } => self.power_limit_set(gpu, set),
            ProbeLine::Failed { .. }
            | ProbeLine::Xid { .. }
            | ProbeLine::Tick { .. }
            | ProbeLine::Gap { .. }
            | ProbeLine::GapClosed { .. } => {}
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
        if gpus_changed {
            let gpus: Vec<&GpuIdentity> = self.node.gpus.values().filter(|gpu| gpu.is_identified()).collect();
            files::save_json(&self.config.state_dir.join(GPUS), &gpus);
            self.say_hello();
        }
        self.report_health(transitions);
        if replace_probe && !self.replacing_probe {
            self.replacing_probe = true;
            self.order_probe(KeeperOrder::Replace);
        }
        if read_now {
            self.read_now();
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
        let remembered = Remembered {
            memory: self.node.tracker.memory(),
            kernel_log: self.cursor.clone(),
            since: self.node.log_since,
            newest,
        };
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
