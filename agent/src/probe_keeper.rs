//! Keeps a probe running: starts it, listens to it, passes orders on, replaces it when it ends or falls
//! silent, and holds it back while the GPUs are to be left alone.

mod process;

use crate::config::LogFormat;
use crate::probe::protocol::{GpuIdentity, ProbeLine, ProbeOrder};
use process::{Abandoned, LineError, Process};
use reknit_layout::GpuId;
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::{error, info, warn};

/// A living probe ticks far more often; a silent one is replaced.
const SILENCE: Duration = Duration::from_secs(3);
/// Loading the driver of a large node takes its time.
const START: Duration = Duration::from_secs(30);
const RESTART: Duration = Duration::from_millis(50);
const RESTART_LIMIT: Duration = Duration::from_secs(2);
/// A probe that lived this long restarts without delay.
const SETTLED: Duration = Duration::from_secs(5);
/// So many probes that cannot be killed are proof that another one would hang too.
const ABANDONED_LIMIT: usize = 3;

/// What the keeper tells.
#[derive(Debug)]
pub(crate) enum ProbeNews {
    Line(ProbeLine),
    /// Nothing can be read until another probe is ready.
    Ended {
        why: String,
    },
    /// As ordered, no probe runs and none is started until `Resume`.
    Quiesced {
        /// Every probe's exit was seen, so nothing of this agent holds a GPU. Where it was not, it is told
        /// again once it is.
        confirmed: bool,
    },
}

/// What the keeper is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KeeperOrder {
    /// Another probe is wanted.
    Replace,
    /// End the probe, which lets go of every GPU, and start none.
    Quiesce,
    Resume,
    /// A power limit is answered by `ProbeLine::PowerLimit` also where no probe runs.
    ToProbe(ProbeOrder),
}

/// What is the same for every probe.
#[derive(Debug)]
pub(crate) struct ProbeSpec {
    pub(crate) library: PathBuf,
    pub(crate) interval: Duration,
    pub(crate) log: LogFormat,
    /// Say only what went wrong.
    pub(crate) quiet: bool,
}

/// How to start a probe.
#[derive(Debug)]
pub(crate) struct ProbeKeeper {
    spec: ProbeSpec,
    /// GPUs seen so far.
    known: Vec<GpuIdentity>,
    news: mpsc::Sender<ProbeNews>,
    orders: mpsc::Receiver<KeeperOrder>,
    quiesced: bool,
    /// Power limits that the probe has not answered.
    unanswered: Vec<GpuId>,
    abandoned: Abandoned,
}

/// Why the keeper no longer listens to a probe.
enum End {
    /// It is of no more use.
    Useless {
        why: String,
    },
    Quiesced,
}

/// Nobody listens to the keeper, or nobody gives it orders any more.
struct AgentGone;

impl ProbeKeeper {
    pub(crate) fn new(
        spec: ProbeSpec,
        known: Vec<GpuIdentity>,
        news: mpsc::Sender<ProbeNews>,
        orders: mpsc::Receiver<KeeperOrder>,
    ) -> Self {
        let (quiesced, unanswered, abandoned) = (false, Vec::new(), Abandoned::default());
        Self { spec, known, news, orders, quiesced, unanswered, abandoned }
    }

    /// Starts no probe until `Resume`.
    pub(crate) fn quiesced(mut self) -> Self {
        self.quiesced = true;
        self
    }

    /// Runs until nobody listens or nobody gives orders. The probe ends with it, as its socket is closed.
    pub(crate) async fn run(mut self) {
        let mut delay = RESTART;
        let mut due = Instant::now();
        loop {
            if self.wait_to_start(due).await.is_err() {
                return;
            }
            let began = Instant::now();
            if self.one_probe().await.is_err() {
                return;
            }
            if began.elapsed() > SETTLED {
                delay = RESTART;
            }
            due = Instant::now() + delay;
            delay = (delay * 2).min(RESTART_LIMIT);
        }
    }

    /// One probe's life, and its death.
    async fn one_probe(&mut self) -> Result<(), AgentGone> {
        let mut probe = match Process::start(&self.spec, &self.known).await {
            Ok(probe) => probe,
            Err(e) => return self.ended(format!("the probe could not be started: {e}")).await,
        };
        let end = self.listen(&mut probe).await?;
        match end {
            // First the news: a process stuck in the driver takes its time to end.
            End::Useless { why } => self.ended(why).await?,
            End::Quiesced => self.quiesced = true,
        }
        self.abandoned.end(probe).await;
        for gpu in std::mem::take(&mut self.unanswered) {
            self.refuse_power_limit(gpu, "the probe ended before it answered").await?;
        }
        Ok(())
    }

    /// Passes lines and orders on until the probe is of no more use.
    async fn listen(&mut self, probe: &mut Process) -> Result<End, AgentGone> {
        let mut silent_at = Instant::now() + START;
        let useless = |why: String| Ok(End::Useless { why });
        loop {
            let line = tokio::select! {
                line = timeout_at(silent_at, probe.line()) => line,
                order = self.orders.recv() => match order.ok_or(AgentGone)? {
                    KeeperOrder::Replace => return useless("no GPU answers".to_owned()),
                    KeeperOrder::Quiesce => return Ok(End::Quiesced),
                    KeeperOrder::Resume => continue,
                    KeeperOrder::ToProbe(order) => {
                        if let Err(e) = probe.order(&order).await {
                            return useless(format!("the probe takes no orders: {e}"));
                        }
                        if let ProbeOrder::SetPowerLimit { gpu, limit: _ } = order {
                            self.unanswered.push(gpu);
                        }
                        continue;
                    }
                },
                () = self.abandoned.one_gone(), if !self.abandoned.is_empty() => continue,
            };
            let line = match line {
                Ok(Ok(Some(line))) => line,
                Ok(Ok(None)) => return useless("the probe is gone".to_owned()),
                Ok(Err(LineError::Broken(e))) => return useless(format!("the probe's socket broke: {e}")),
                Ok(Err(LineError::Nonsense(e))) => return useless(format!("the probe speaks nonsense: {e}")),
                Err(_) => return useless("the probe is silent".to_owned()),
            };
            match &line {
                ProbeLine::Failed { message } => return useless(message.clone()),
                ProbeLine::Ready { gpus, driver, silent: _ } => {
                    info!(driver, gpus = gpus.len(), "probe ready");
                    self.known = gpus.iter().filter(|gpu| gpu.is_identified()).cloned().collect();
                }
                ProbeLine::PowerLimit { gpu, set: _ } => {
                    if let Some(place) = self.unanswered.iter().position(|waiting| waiting == gpu) {
                        self.unanswered.remove(place);
                    }
                }
                ProbeLine::Reading { .. }
                | ProbeLine::Xid { .. }
                | ProbeLine::Gap { .. }
                | ProbeLine::GapClosed { .. }
                | ProbeLine::Tick { .. } => {}
            }
            silent_at = Instant::now() + SILENCE;
            self.tell(ProbeNews::Line(line)).await?;
        }
    }

    /// Without a probe, until `due`, and for as long as the agent is quiesced or too many probes hang.
    async fn wait_to_start(&mut self, due: Instant) -> Result<(), AgentGone> {
        let mut due = due;
        let mut told = None;
        let mut complained = false;
        loop {
            let confirmed = self.abandoned.is_empty();
            if self.quiesced && told != Some(confirmed) {
                told = Some(confirmed);
                info!(confirmed, "quiesced: the GPUs are let go");
                self.tell(ProbeNews::Quiesced { confirmed }).await?;
            }
            let hung = self.abandoned.count() >= ABANDONED_LIMIT;
            if hung && !complained {
                complained = true;
                let pids = self.abandoned.pids();
                error!(?pids, "no other probe is started until one of these is gone");
                let why = format!(
                    "{ABANDONED_LIMIT} probes hang in the driver and cannot be killed; look at the kernel log, \
                     and reboot the node"
                );
                self.ended(why).await?;
            }
            let held = self.quiesced || hung;
            if !held && Instant::now() >= due {
                return Ok(());
            }
            tokio::select! {
                order = self.orders.recv() => match order.ok_or(AgentGone)? {
                    KeeperOrder::Quiesce => (self.quiesced, told) = (true, None),
                    KeeperOrder::Resume => {
                        if self.quiesced {
                            info!("resumed");
                            due = Instant::now();
                        }
                        self.quiesced = false;
                        complained = false;
                    }
                    // There will be another one anyway, and it reads everything at once.
                    KeeperOrder::Replace
                    | KeeperOrder::ToProbe(ProbeOrder::ReadNow | ProbeOrder::Expect { .. }) => {}
                    KeeperOrder::ToProbe(ProbeOrder::SetPowerLimit { gpu, limit: _ }) => {
                        self.refuse_power_limit(gpu, "no probe runs").await?;
                    }
                },
                () = sleep_until(due), if !held => {}
                () = self.abandoned.one_gone(), if !self.abandoned.is_empty() => {}
            }
        }
    }

    async fn ended(&self, why: String) -> Result<(), AgentGone> {
        warn!(why, "the probe ended");
        self.tell(ProbeNews::Ended { why }).await
    }

    async fn refuse_power_limit(&self, gpu: GpuId, why: &str) -> Result<(), AgentGone> {
        let set = Err(why.to_owned());
        self.tell(ProbeNews::Line(ProbeLine::PowerLimit { gpu, set })).await
    }

    async fn tell(&self, news: ProbeNews) -> Result<(), AgentGone> {
        self.news.send(news).await.map_err(|_| AgentGone)
    }
}
