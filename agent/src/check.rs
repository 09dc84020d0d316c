//! `reknit-agent check`: a look at this node for a person or a script.

use crate::clock::{Clock, Millis};
use crate::config::LogFormat;
use crate::health::{Memory, Transition, Verdict};
use crate::kernel_log::{KernelLog, LogStart};
use crate::node_health::{Heard, NodeHealth};
use crate::policy::command::Format;
use crate::policy::{Class, Policies, PolicyFileError, Span};
use crate::probe::protocol::{GpuIdentity, ProbeOrder};
use crate::probe_keeper::{KeeperOrder, ProbeKeeper, ProbeNews, ProbeSpec};
use crate::sight::Observability;
use reknit_layout::GpuId;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

const QUEUED_NEWS: usize = 256;
/// Every tenth look takes all there is to read: so many in the time that is given that a signal which must be
/// seen three times is.
const LOOKS: u32 = 25;
/// What began sooner is said to be old.
const OLD: Duration = Duration::from_secs(60);
const FASTEST: Duration = Duration::from_millis(10);

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CheckArguments {
    /// NVIDIA's management library, or the simulated one.
    #[arg(long, env = "REKNIT_NVML_LIBRARY", default_value = "libnvidia-ml.so.1")]
    nvml_library: PathBuf,
    /// The kernel log. What it tells of this boot counts.
    #[arg(long, env = "REKNIT_KMSG", default_value = "/dev/kmsg")]
    kmsg: PathBuf,
    /// The policy file; the built-in policy without one.
    #[arg(long, env = "REKNIT_POLICY", value_name = "FILE")]
    policy: Option<PathBuf>,
    /// How long to look. What a policy wants to see for longer is not seen.
    #[arg(long = "for", value_name = "DURATION", default_value = "5s", value_parser = duration)]
    time: Duration,
    /// How many GPUs this node should have. One that is not even counted is as bad as a fatal one.
    #[arg(long, value_name = "GPUS")]
    expect: Option<usize>,
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

fn duration(text: &str) -> Result<Duration, String> {
    const LONGEST: Duration = Duration::from_secs(24 * 3600);
    let time = humantime::parse_duration(text).map_err(|e| format!("{e}; write it as 500ms, 5s or 2m"))?;
    if time.is_zero() || time > LONGEST {
        return Err(format!("must be more than 0 and at most {}", Span(LONGEST)));
    }
    Ok(time)
}

/// Why there was no look.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckError {
    #[error(transparent)]
    Policy(#[from] PolicyFileError),
    #[error("cannot start: {0}")]
    Start(#[from] std::io::Error),
}

/// What a look found.
#[derive(Debug)]
pub(crate) struct Findings {
    format: Format,
    observability: Observability,
    gaps: Vec<String>,
    enforce: bool,
    expected: Option<usize>,
    now: Millis,
    gpus: Vec<Finding>,
}

#[derive(Debug)]
struct Finding {
    gpu: GpuIdentity,
    verdict: Verdict,
    since: Option<Millis>,
}

/// Looks for as long as was asked for.
pub(crate) async fn look(arguments: CheckArguments) -> Result<Findings, CheckError> {
    let policies = Policies::of(arguments.policy.as_deref())?;
    let enforce = policies.general().enforce;
    let (clock, end) = (Clock::start(), Instant::now() + arguments.time);
    let began = clock.now();
    let (news_in, mut news) = mpsc::channel(QUEUED_NEWS);
    let (orders, orders_out) = mpsc::channel(QUEUED_NEWS);
    let interval = (arguments.time / LOOKS).clamp(FASTEST, Duration::from_secs(1));
    let spec = ProbeSpec { library: arguments.nvml_library, interval, log: LogFormat::Human, quiet: true };
    tokio::spawn(ProbeKeeper::new(spec, Vec::new(), news_in, orders_out).run());
    let (lines_in, mut lines) = mpsc::channel(QUEUED_NEWS);
    let mut log = None;
    let mut node = NodeHealth::new(clock, policies, Memory::default());
    let mut seen = Seen::default();
    loop {
        let next = async {
            tokio::select! {
                Some(news) = news.recv() => match news {
                    ProbeNews::Line(line) => node.line(line),
                    ProbeNews::Ended { why } => node.ended(&why),
                    ProbeNews::Quiesced { confirmed: _ } => Heard::default(),
                },
                Some(news) = lines.recv() => node.log(news),
                else => std::future::pending().await,
            }
        };
        let Ok(heard) = timeout_at(end, next).await else {
            break;
        };
        if heard.gpus_changed && log.is_none() {
            // Its lines name GPUs by their place, so these must be known.
            log = Some(KernelLog::start(arguments.kmsg.clone(), LogStart::Beginning, lines_in.clone())?);
        }
        if heard.replace_probe {
            let _keeper_is_busy = orders.try_send(KeeperOrder::Replace);
        }
        if heard.read_now {
            let _keeper_is_busy = orders.try_send(KeeperOrder::ToProbe(ProbeOrder::ReadNow));
        }
        for transition in heard.transitions {
            seen.transition(began, transition);
        }
    }
    let gpus = node.gpus.values().map(|gpu| seen.finding(&node, gpu));
    let mut gpus: Vec<Finding> = gpus.collect();
    gpus.sort_by_key(|finding| finding.gpu.index);
    Ok(Findings {
        format: arguments.format,
        observability: node.sight.observability(),
        gaps: node.sight.gaps(),
        enforce,
        expected: arguments.expect,
        now: clock.now(),
        gpus,
    })
}

/// What was told while we looked.
#[derive(Debug, Default)]
struct Seen {
    /// The worst of each GPU, also if it is over. That nothing was known for a while does not count.
    worst: BTreeMap<GpuId, Verdict>,
    /// When the present verdict began.
    since: BTreeMap<GpuId, Millis>,
}

impl Seen {
    /// What the kernel log tells of before `began` counts if it still holds.
    fn transition(&mut self, began: Millis, transition: Transition) {
        let Transition { gpu, at, verdict, enforced: _ } = transition;
        self.since.insert(gpu.clone(), at);
        let worse = self.worst.get(&gpu).is_none_or(|before| verdict.class >= before.class);
        if at >= began && verdict.class != Class::Unknown && worse {
            self.worst.insert(gpu, verdict);
        }
    }

    /// Of what is equally bad the present tells.
    fn finding(&self, node: &NodeHealth, gpu: &GpuIdentity) -> Finding {
        let present = node.tracker.verdict(&gpu.uuid);
        let all = [node.tracker.ignored(&gpu.uuid), self.worst.get(&gpu.uuid), present];
        let worst = all.into_iter().flatten().max_by_key(|verdict| verdict.class);
        Finding {
            gpu: gpu.clone(),
            verdict: worst.cloned().unwrap_or_else(|| Verdict::unknown("not read")),
            since: self.since.get(&gpu.uuid).copied(),
        }
    }
}

impl Findings {
    /// GPUs that should be there and are not counted.
    fn missing(&self) -> usize {
        self.expected.unwrap_or(0).saturating_sub(self.gpus.len())
    }

    /// 0 healthy, 1 something is wrong and nothing must be dropped, 2 something fatal, 3 blind.
    pub(crate) fn exit_code(&self) -> u8 {
        let missing = (self.missing() > 0).then_some(Class::Fatal);
        let worst = self.gpus.iter().map(|finding| finding.verdict.class).chain(missing).max();
        match (self.observability, worst) {
            (Observability::Blind | Observability::Quiesced, _) | (_, None) => 3,
            (_, Some(Class::Fatal)) => 2,
            (_, Some(Class::Drain | Class::Unknown | Class::RankDied | Class::Predict)) => 1,
            (_, Some(Class::Ignore | Class::Healthy)) => 0,
        }
    }

    pub(crate) fn text(&self) -> String {
        match self.format {
            Format::Json => self.json(),
            Format::Table => self.table(),
        }
    }

    fn json(&self) -> String {
        let gpus = self.gpus.iter().map(|Finding { gpu, verdict, since }| {
            json!({
                "since_ms": since.map(|since| since.0),
                "index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "pci_bus_id": gpu.pci_bus_id,
                "class": verdict.class, "cause": verdict.cause, "evidence": verdict.evidence,
                "shards_readable": verdict.shards_readable, "rejoin": verdict.rejoin, "action": verdict.action,
            })
        });
        let gpus: Vec<_> = gpus.collect();
        let observability = self.observability.name();
        let answer = json!({
            "observability": observability, "gaps": self.gaps, "enforce": self.enforce, "missing": self.missing(),
            "gpus": gpus,
        });
        format!("{answer}\n")
    }

    fn table(&self) -> String {
        let mut text = String::new();
        for Finding { gpu, verdict, since } in &self.gpus {
            let GpuIdentity { index, uuid, name, pci_bus_id, .. } = gpu;
            let _ = writeln!(text, "GPU {index}  {:<9}  {name}  {pci_bus_id}  {uuid}", verdict.class.name());
            let age = since.map(|since| self.now.since(since)).filter(|age| *age >= OLD);
            let age = age.map_or_else(String::new, |age| {
                format!("{} ago", humantime::format_duration(Duration::from_secs(age.as_secs())))
            });
            let details = [
                ("cause", verdict.cause.as_str()),
                ("since", &age),
                ("evidence", &verdict.evidence),
                ("shards", if verdict.shards_readable { "can be read" } else { "cannot be read" }),
                ("rejoin", &verdict.rejoin),
                ("action", &verdict.action),
            ];
            if verdict.class != Class::Healthy {
                for (about, words) in details.into_iter().filter(|(_, words)| !words.is_empty()) {
                    let _ = writeln!(text, "       {about:<9}  {words}");
                }
            }
        }
        if self.missing() > 0 {
            let (missing, expected) = (self.missing(), self.expected.unwrap_or(0));
            let _ = writeln!(text, "missing: {missing} of {expected} GPUs are not even counted");
        }
        if !self.enforce {
            text.push_str("policy: enforce = false, so the agent only tells and nothing happens\n");
        }
        let _ = writeln!(text, "observability: {}", self.observability.name());
        for gap in &self.gaps {
            let _ = writeln!(text, "  {gap}");
        }
        text
    }
}
