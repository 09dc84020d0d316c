//! `reknit-agent check`: a look at this node for a person or a script.

use crate::clock::Clock;
use crate::config::LogFormat;
use crate::health::{Memory, Transition, Verdict};
use crate::kernel_log::{KernelLog, LogStart};
use crate::node_health::{Heard, NodeHealth};
use crate::policy::command::Format;
use crate::policy::{Class, Policies, PolicyFileError, Span};
use crate::probe::protocol::{GpuIdentity, ProbeOrder};
use crate::probe_keeper::{KeeperOrder, ProbeKeeper, ProbeNews};
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
    gpus: Vec<(GpuIdentity, Verdict)>,
}

/// Looks for as long as was asked for.
pub(crate) async fn look(arguments: CheckArguments) -> Result<Findings, CheckError> {
    let policies = match &arguments.policy {
        Some(file) => Policies::load(file)?.0,
        None => Policies::built_in().map_err(PolicyFileError::from)?,
    };
    let end = Instant::now() + arguments.time;
    let (news_in, mut news) = mpsc::channel(QUEUED_NEWS);
    let (orders, orders_out) = mpsc::channel(QUEUED_NEWS);
    let interval = (arguments.time / LOOKS).clamp(FASTEST, Duration::from_secs(1));
    let keeper =
        ProbeKeeper::new(arguments.nvml_library, interval, LogFormat::Human, Vec::new(), news_in, orders_out);
    tokio::spawn(keeper.run());
    let (lines_in, mut lines) = mpsc::channel(QUEUED_NEWS);
    let mut log = None;
    let mut node = NodeHealth::new(Clock::start(), policies, Memory::default());
    let mut seen = BTreeMap::new();
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
        for Transition { gpu, verdict, .. } in heard.transitions {
            keep_worst(&mut seen, gpu, verdict);
        }
    }
    let gpus = node.gpus.values().map(|gpu| (gpu.clone(), finding(&node, &mut seen, &gpu.uuid)));
    let mut gpus: Vec<_> = gpus.collect();
    gpus.sort_by_key(|(gpu, _)| gpu.index);
    Ok(Findings {
        format: arguments.format,
        observability: node.sight.observability(),
        gaps: node.sight.gaps(),
        gpus,
    })
}

/// What happened while we looked counts, also if it is over. That nothing was known for a while does not.
fn keep_worst(seen: &mut BTreeMap<GpuId, Verdict>, gpu: GpuId, verdict: Verdict) {
    let worse = seen.get(&gpu).is_none_or(|before| verdict.class > before.class);
    if verdict.class != Class::Unknown && worse {
        seen.insert(gpu, verdict);
    }
}

fn finding(node: &NodeHealth, seen: &mut BTreeMap<GpuId, Verdict>, gpu: &GpuId) -> Verdict {
    let now = node.verdict(gpu).cloned();
    let ignored = node.tracker.ignored(gpu).cloned();
    let all = [ignored, now, seen.remove(gpu)].into_iter().flatten();
    all.max_by_key(|verdict| verdict.class).unwrap_or_else(|| Verdict::unknown("not read"))
}

impl Findings {
    /// 0 healthy, 1 something is wrong and nothing must be dropped, 2 something fatal, 3 blind.
    pub(crate) fn exit_code(&self) -> u8 {
        let worst = self.gpus.iter().map(|(_, verdict)| verdict.class).max();
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
        let gpus = self.gpus.iter().map(|(gpu, verdict)| {
            json!({
                "index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "pci_bus_id": gpu.pci_bus_id,
                "class": verdict.class, "cause": verdict.cause, "evidence": verdict.evidence,
                "shards_readable": verdict.shards_readable, "rejoin": verdict.rejoin, "action": verdict.action,
            })
        });
        let gpus: Vec<_> = gpus.collect();
        let observability = self.observability.name();
        format!("{}\n", json!({ "observability": observability, "gaps": self.gaps, "gpus": gpus }))
    }

    fn table(&self) -> String {
        let mut text = String::new();
        for (gpu, verdict) in &self.gpus {
            let GpuIdentity { index, uuid, name, pci_bus_id, .. } = gpu;
            let _ = writeln!(text, "GPU {index}  {:<9}  {name}  {pci_bus_id}  {uuid}", verdict.class.name());
            let details = [
                ("cause", verdict.cause.as_str()),
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
        let _ = writeln!(text, "observability: {}", self.observability.name());
        for gap in &self.gaps {
            let _ = writeln!(text, "  {gap}");
        }
        text
    }
}
