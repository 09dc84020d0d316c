//! `reknit node`

use crate::Remote;
use crate::admin::{connect, refused};
use crate::failure::Failure;
use crate::output::{Format, print_lines};
use crate::table::Table;
use reknit_proto::v1::{
    AgentAnswer, HealthClass, HealthVerdict, ListNodesRequest, Node, NodeGpu, NodeLink, Observability,
    ProbeNodeRequest, QuiesceNodeRequest, ResumeNodeRequest,
};
use serde_json::{Value, json};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Of a quiesce and of a power limit, in seconds: a week.
const LONGEST_LEASE: u32 = 7 * 24 * 3_600;

/// A reading older than this is marked: GPUs are read every second.
const STALE_MS: u64 = 3_000;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum NodeCommand {
    /// Every node with its GPUs.
    List {
        #[command(flatten)]
        remote: Remote,
    },
    /// Make a node's agent let go of the driver, so that a GPU can be reset; its workers are not touched.
    Quiesce {
        node: String,
        /// It ends by itself after this time.
        #[arg(long = "for", value_name = "TIME", default_value = "10m", value_parser = seconds)]
        duration: u32,
        /// Although workers run there: faults of their GPUs go unseen meanwhile.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        remote: Remote,
    },
    /// End a quiesce before its time.
    Resume {
        node: String,
        #[command(flatten)]
        remote: Remote,
    },
    /// Read everything of every GPU of a node now.
    Probe {
        node: String,
        #[command(flatten)]
        remote: Remote,
    },
}

pub(crate) async fn run(command: NodeCommand) -> Result<(), Failure> {
    match command {
        NodeCommand::List { remote } => {
            let answer =
                connect(&remote.daemon).await?.list_nodes(ListNodesRequest {}).await.map_err(refused)?;
            let nodes = answer.into_inner().nodes;
            match remote.format {
                Format::Table => print_lines(&as_lines(&nodes, now_us())),
                Format::Json => print_lines(&[as_json(&nodes).to_string()]),
            }
        }
        NodeCommand::Quiesce { node, duration: seconds, force, remote } => {
            let request = QuiesceNodeRequest { node, seconds, force };
            let answer = connect(&remote.daemon).await?.quiesce_node(request).await.map_err(refused)?;
            said(&remote, answer.into_inner())
        }
        NodeCommand::Resume { node, remote } => {
            let request = ResumeNodeRequest { node };
            let answer = connect(&remote.daemon).await?.resume_node(request).await.map_err(refused)?;
            said(&remote, answer.into_inner())
        }
        NodeCommand::Probe { node, remote } => {
            let request = ProbeNodeRequest { node };
            let answer = connect(&remote.daemon).await?.probe_node(request).await.map_err(refused)?;
            said(&remote, answer.into_inner())
        }
    }
}

/// The agent's own words.
pub(super) fn said(remote: &Remote, answer: AgentAnswer) -> Result<(), Failure> {
    print_lines(&[match remote.format {
        Format::Table => answer.message,
        Format::Json => json!({ "message": answer.message }).to_string(),
    }])
}

/// `90`, `90s`, `10m` or `2h`, in seconds.
pub(super) fn seconds(text: &str) -> Result<u32, String> {
    let (digits, unit) = match text.char_indices().last() {
        Some((at, 's')) => (&text[..at], 1),
        Some((at, 'm')) => (&text[..at], 60),
        Some((at, 'h')) => (&text[..at], 3_600),
        _ => (text, 1),
    };
    let seconds = digits.parse::<u32>().ok().and_then(|number| number.checked_mul(unit));
    let seconds = seconds.filter(|seconds| (1..=LONGEST_LEASE).contains(seconds));
    seconds.ok_or_else(|| "write a time from 1s to 168h (a week), such as 90s, 10m or 2h".to_owned())
}

pub(super) fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// The table, and once for each node why it does not see all.
fn as_lines(nodes: &[Node], now_us: u64) -> Vec<String> {
    let mut lines = as_table(nodes).lines();
    let told: Vec<_> =
        nodes.iter().filter_map(|node| Some(format!("{}: {}", node.name, sight(node, now_us)?))).collect();
    if !told.is_empty() {
        lines.push(String::new());
        lines.extend(told);
    }
    lines
}

fn as_table(nodes: &[Node]) -> Table {
    let mut table =
        Table::new(["NODE", "AGENT", "SEES", "GPU", "UUID", "NAME", "HEALTH", "TEMP", "POWER", "CAUSE"]);
    for node in nodes {
        let (agent, sees) = (link_name(node.link()), sees(node.observability()));
        if node.gpus.is_empty() {
            let row = [&node.name, agent, sees, "-", "-", "-", "-", "-", "-", "no GPU"];
            table.row(row.map(str::to_owned));
        }
        for gpu in &node.gpus {
            table.row([
                node.name.clone(),
                agent.to_owned(),
                sees.to_owned(),
                format!("{}/{}", node.name, gpu.index),
                gpu.uuid.clone(),
                gpu.name.clone(),
                health_text(gpu),
                temperature_text(gpu),
                power_text(gpu),
                cause(gpu).to_owned(),
            ]);
        }
    }
    table
}

fn sees(observability: Observability) -> &'static str {
    match observability {
        // Its agent is away.
        Observability::Unspecified => "-",
        Observability::Full | Observability::Degraded | Observability::Blind | Observability::Quiesced => {
            observability_name(observability)
        }
    }
}

/// How much the agent sees and why, when that is not all.
pub(super) fn sight(node: &Node, now_us: u64) -> Option<String> {
    let left = node.quiesced_until_us.saturating_sub(now_us).div_ceil(1_000_000);
    let mut text = observability_name(node.observability()).to_owned();
    if left > 0 {
        text.push_str(&format!(" for another {}", humantime::format_duration(Duration::from_secs(left))));
    }
    if !node.gaps.is_empty() {
        text.push_str(&format!(": {}", node.gaps.join("; ")));
    }
    (left > 0 || !node.gaps.is_empty()).then_some(text)
}

/// That a healthy GPU reads healthy again is no cause of anything.
pub(super) fn cause(gpu: &NodeGpu) -> &str {
    let verdict = gpu.verdict();
    let well = verdict.health() == HealthClass::Healthy && verdict.would_be() == HealthClass::Unspecified;
    if well { "" } else { &verdict.cause }
}

/// The class that counts, and the one that a policy which is not enforced would give.
pub(super) fn class_text(verdict: &HealthVerdict) -> String {
    let name = health_name(verdict.health());
    would_be(verdict).map_or_else(|| name.to_owned(), |shadow| format!("{name} (would be {shadow})"))
}

fn health_text(gpu: &NodeGpu) -> String {
    let mut text = class_text(gpu.verdict());
    if !gpu.drained_by.is_empty() {
        text.push_str(&format!(", drained by {}", gpu.drained_by));
    }
    if let Some(age) = gpu.age_ms.filter(|age| *age > STALE_MS) {
        text.push_str(&format!(", {} s old", age / 1_000));
    }
    text
}

pub(super) fn temperature_text(gpu: &NodeGpu) -> String {
    gpu.temperature.map_or_else(|| "-".to_owned(), |degrees| format!("{degrees} C"))
}

pub(super) fn power_text(gpu: &NodeGpu) -> String {
    let watts = |mw: Option<u32>| mw.map_or_else(|| "-".to_owned(), |mw| (mw / 1_000).to_string());
    match (gpu.power_mw, gpu.power_limit_mw) {
        (None, None) => "-".to_owned(),
        (power, limit) => format!("{}/{} W", watts(power), watts(limit)),
    }
}

fn as_json(nodes: &[Node]) -> Value {
    let nodes = nodes.iter().map(|node| {
        let gpus = node.gpus.iter().map(gpu_json);
        json!({
            "name": node.name, "connected": node.connected, "link": link_name(node.link()),
            "link_since_us": node.link_since_us, "observability": observability_name(node.observability()),
            "gaps": node.gaps, "quiesced_until_us": node.quiesced_until_us, "agent_version": node.agent_version,
            "gpus": gpus.collect::<Vec<_>>(),
        })
    });
    nodes.collect()
}

pub(super) fn gpu_json(gpu: &NodeGpu) -> Value {
    let mut json = json!({
        "uuid": gpu.uuid, "index": gpu.index, "name": gpu.name, "memory_bytes": gpu.memory_bytes,
        "drained_by": gpu.drained_by, "since_us": gpu.since_us, "age_ms": gpu.age_ms,
        "temperature": gpu.temperature, "power_mw": gpu.power_mw, "power_limit_mw": gpu.power_limit_mw,
        "risk": gpu.risk,
    });
    add_verdict(&mut json, gpu.verdict());
    json
}

/// What is said of a GPU's health, beside the rest of what is said of it.
pub(super) fn add_verdict(json: &mut Value, verdict: &HealthVerdict) {
    json["health"] = health_name(verdict.health()).into();
    json["cause"] = verdict.cause.as_str().into();
    json["evidence"] = verdict.evidence.as_str().into();
    json["shards_readable"] = verdict.shards_readable.into();
    json["rejoin"] = verdict.rejoin.as_str().into();
    json["action"] = verdict.action.as_str().into();
    json["would_be"] = would_be(verdict).into();
}

pub(super) fn link_name(link: NodeLink) -> &'static str {
    match link {
        NodeLink::Unspecified => "unknown",
        NodeLink::Connected => "connected",
        NodeLink::Silent => "silent",
        NodeLink::Gone => "gone",
    }
}

pub(super) fn observability_name(observability: Observability) -> &'static str {
    match observability {
        Observability::Unspecified => "unknown",
        Observability::Full => "full",
        Observability::Degraded => "degraded",
        Observability::Blind => "blind",
        Observability::Quiesced => "quiesced",
    }
}

pub(super) fn health_name(class: HealthClass) -> &'static str {
    match class {
        HealthClass::Unspecified | HealthClass::Unknown => "unknown",
        HealthClass::Healthy => "healthy",
        HealthClass::Fatal => "fatal",
        HealthClass::RankDied => "rank_died",
        HealthClass::Drain => "drain",
        HealthClass::Predict => "predict",
    }
}

/// The class under a policy that does not enforce it.
fn would_be(verdict: &HealthVerdict) -> Option<&'static str> {
    let class = verdict.would_be();
    (class != HealthClass::Unspecified).then(|| health_name(class))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(health: HealthClass, would_be: HealthClass) -> HealthVerdict {
        HealthVerdict { health: health.into(), would_be: would_be.into(), ..HealthVerdict::default() }
    }

    #[test]
    fn a_gpu_shows_who_drained_it_how_old_its_reading_is_and_what_it_would_be() {
        let gpu = NodeGpu {
            uuid: "GPU-1".to_owned(),
            verdict: Some(verdict(HealthClass::Healthy, HealthClass::Fatal)),
            drained_by: "operator".to_owned(),
            age_ms: Some(12_345),
            temperature: Some(41),
            power_mw: Some(123_456),
            power_limit_mw: Some(700_000),
            ..NodeGpu::default()
        };
        let node = Node {
            name: "n".to_owned(),
            link: NodeLink::Silent.into(),
            observability: Observability::Degraded.into(),
            gaps: vec!["no kernel log".to_owned()],
            gpus: vec![gpu],
            ..Node::default()
        };
        let line = as_table(std::slice::from_ref(&node)).lines().remove(1);
        assert!(line.starts_with("n     silent  degraded  n/0"), "{line}");
        assert!(line.contains("healthy (would be fatal), drained by operator, 12 s old"), "{line}");
        assert!(line.contains("41 C  123/700 W"), "{line}");
        let json = &as_json(&[node])[0];
        assert_eq!((&json["link"], &json["gpus"][0]["health"]), (&json!("silent"), &json!("healthy")));
        assert_eq!(json["gpus"][0]["age_ms"], 12_345);
    }

    #[test]
    fn why_a_node_does_not_see_all_stands_once_below_the_table() {
        let unknown = verdict(HealthClass::Unknown, HealthClass::Unspecified);
        let gpu = |index| NodeGpu { index, verdict: Some(unknown.clone()), ..NodeGpu::default() };
        let quiesced = Node {
            name: "n-0".to_owned(),
            observability: Observability::Quiesced.into(),
            gaps: vec!["quiesced by an operator".to_owned(), "no kernel log".to_owned()],
            quiesced_until_us: 91_000_000,
            gpus: vec![gpu(0), gpu(1)],
            ..Node::default()
        };
        let full = Node { observability: Observability::Full.into(), ..quiesced.clone() };
        let full = Node { name: "n-1".to_owned(), gaps: vec![], quiesced_until_us: 0, ..full };
        let silent = Node { name: "n-2".to_owned(), observability: 0, ..full.clone() };
        let lines = as_lines(&[quiesced, full, silent], 1_000_000);
        assert!(lines[1].contains(" quiesced  n-0/0") && lines[5].contains(" -         n-2/0"), "{lines:?}");
        let below = "n-0: quiesced for another 1m 30s: quiesced by an operator; no kernel log";
        assert_eq!(lines[7..], ["", below]);
    }

    #[test]
    fn a_healthy_gpu_has_no_cause_unless_it_would_be_something_else() {
        let shown = |health, would_be| {
            let verdict =
                HealthVerdict { cause: "reads healthy again".to_owned(), ..verdict(health, would_be) };
            cause(&NodeGpu { verdict: Some(verdict), ..NodeGpu::default() }).to_owned()
        };
        assert_eq!(shown(HealthClass::Healthy, HealthClass::Unspecified), "");
        assert_eq!(shown(HealthClass::Healthy, HealthClass::Fatal), "reads healthy again");
        assert_eq!(shown(HealthClass::Fatal, HealthClass::Unspecified), "reads healthy again");
    }

    #[test]
    fn a_fresh_reading_has_no_age() {
        let verdict = Some(verdict(HealthClass::Drain, HealthClass::Unspecified));
        let gpu = NodeGpu { verdict, age_ms: Some(2_999), ..NodeGpu::default() };
        assert_eq!(health_text(&gpu), "drain");
    }

    #[test]
    fn times() {
        assert_eq!(["90", "90s", "10m", "2h"].map(seconds), [Ok(90), Ok(90), Ok(600), Ok(7_200)]);
        assert_eq!(seconds("168h"), Ok(604_800));
        for wrong in ["", "0", "0s", "m", "-5", "1d", "30days", "169h", "99999999h", "1.5m", "ä"] {
            let told = seconds(wrong).unwrap_err();
            assert!(told.contains("from 1s to 168h"), "{wrong}: {told}");
        }
    }
}
