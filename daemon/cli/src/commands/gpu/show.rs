//! `reknit gpu show`: everything of one GPU.

use super::super::node::{
    cause, class_text, gpu_json, link_name, now_us, observability_name, power_text, sight, temperature_text,
};
use super::jobs;
use crate::Remote;
use crate::admin::{Admin, refused};
use crate::failure::Failure;
use crate::output::{Format, or_none, print_lines, time_text};
use crate::table::Table;
use reknit_proto::v1::{Job, JobWorker, ListNodesRequest, Node, NodeGpu};
use serde_json::{Value, json};

/// `uuid` as an operator meant it; perhaps no node has it.
pub(super) async fn show(admin: &mut Admin, uuid: &str, remote: &Remote) -> Result<(), Failure> {
    let nodes = admin.list_nodes(ListNodesRequest {}).await.map_err(refused)?.into_inner().nodes;
    let mut gpus = nodes.iter().flat_map(|node| node.gpus.iter().map(move |gpu| (node, gpu)));
    let Some((node, gpu)) = gpus.find(|(_, gpu)| gpu.uuid == uuid) else {
        return Err(Failure::Failed(format!(
            "no agent has named a GPU `{uuid}`: `reknit node list` names them all"
        )));
    };
    let jobs = jobs(admin).await?;
    let workers = workers(&jobs, uuid);
    print_lines(&match remote.format {
        Format::Table => as_lines(node, gpu, &workers, now_us()),
        Format::Json => vec![as_json(node, gpu, &workers).to_string()],
    })
}

/// Those on the GPU, each with its job.
fn workers<'a>(jobs: &'a [Job], uuid: &str) -> Vec<(&'a Job, &'a JobWorker)> {
    let all = jobs.iter().flat_map(|job| job.workers.iter().map(move |worker| (job, worker)));
    all.filter(|(_, worker)| worker.worker.as_ref().is_some_and(|key| key.gpu == uuid)).collect()
}

fn as_lines(node: &Node, gpu: &NodeGpu, workers: &[(&Job, &JobWorker)], now_us: u64) -> Vec<String> {
    let agent = match sight(node, now_us) {
        Some(sight) => format!("{}, {sight}", link_name(node.link())),
        None => link_name(node.link()).to_owned(),
    };
    let verdict = gpu.verdict();
    let shards = if verdict.shards_readable { "can be read" } else { "cannot be read" };
    // 0: its agent did not say.
    let memory = match gpu.memory_bytes {
        0 => String::new(),
        bytes => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    };
    let age = gpu.age_ms.map_or_else(|| "never".to_owned(), |ms| format!("{:.1} s ago", ms as f64 / 1e3));
    let worker = |(job, worker): &(&Job, &JobWorker)| {
        let place = if worker.place.is_empty() { "without a place" } else { &worker.place };
        format!("{place} of job {} (pid {}): {}", job.name, worker.pid, worker.state)
    };
    let workers: Vec<_> = workers.iter().map(worker).collect();
    let rows = [
        ("GPU", format!("{}/{}", node.name, gpu.index)),
        ("UUID", gpu.uuid.clone()),
        ("NAME", gpu.name.clone()),
        ("MEMORY", memory),
        ("AGENT", agent),
        ("HEALTH", class_text(verdict)),
        ("SINCE", time_text(gpu.since_us)),
        ("CAUSE", cause(gpu).to_owned()),
        ("EVIDENCE", verdict.evidence.clone()),
        ("SHARDS", shards.to_owned()),
        ("MAY REJOIN", verdict.rejoin.clone()),
        ("TO DO", verdict.action.clone()),
        ("RISK", format!("{:.1} points", gpu.risk)),
        (
            "DRAINED",
            match gpu.drained_by.as_str() {
                "" => "no".to_owned(),
                "operator" => "by an operator".to_owned(),
                "policy" => "by its job's recovery.on_straggler, until `reknit gpu restore`".to_owned(),
                other => format!("by {other}"),
            },
        ),
        ("WORKER", workers.join("; ")),
        ("READ", age),
        ("TEMPERATURE", temperature_text(gpu)),
        ("POWER", power_text(gpu)),
    ];
    let mut table = Table::plain();
    for (name, value) in rows {
        table.row([name.to_owned(), or_none(&value)]);
    }
    table.lines()
}

fn as_json(node: &Node, gpu: &NodeGpu, workers: &[(&Job, &JobWorker)]) -> Value {
    let mut json = gpu_json(gpu);
    let workers = workers.iter().map(|(job, worker)| {
        json!({
            "job": job.name, "place": worker.place, "pid": worker.pid, "state": worker.state,
            "incarnation": worker.worker.as_ref().map(|key| key.incarnation),
        })
    });
    json["workers"] = workers.collect();
    json["node"] = json!({
        "name": node.name, "link": link_name(node.link()), "link_since_us": node.link_since_us,
        "observability": observability_name(node.observability()), "gaps": node.gaps,
        "quiesced_until_us": node.quiesced_until_us,
    });
    json
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_proto::v1::{HealthClass, HealthVerdict, NodeLink, Observability, WorkerKey};

    #[test]
    fn everything_of_a_gpu() {
        let gpu = NodeGpu {
            uuid: "GPU-a".to_owned(),
            index: 3,
            name: "H200".to_owned(),
            memory_bytes: 143_771 << 20,
            verdict: Some(HealthVerdict {
                health: HealthClass::Drain.into(),
                cause: "XID 95".to_owned(),
                evidence: "XID 95 in the kernel log".to_owned(),
                shards_readable: true,
                rejoin: "after a reset".to_owned(),
                action: "reset it".to_owned(),
                ..HealthVerdict::default()
            }),
            risk: 12.25,
            drained_by: "operator".to_owned(),
            since_us: 1_796_008_398_123_456,
            age_ms: Some(1_200),
            temperature: Some(41),
            power_mw: Some(123_456),
            power_limit_mw: Some(700_000),
        };
        let node = Node {
            name: "n".to_owned(),
            link: NodeLink::Connected.into(),
            observability: Observability::Degraded.into(),
            gaps: vec!["no kernel log".to_owned()],
            gpus: vec![gpu.clone()],
            ..Node::default()
        };
        let on = |gpu: &str, place: &str| JobWorker {
            worker: Some(WorkerKey { gpu: gpu.to_owned(), incarnation: 5, ..WorkerKey::default() }),
            place: place.to_owned(),
            pid: 77,
            state: "training".to_owned(),
            ..JobWorker::default()
        };
        let job = Job {
            name: "j".to_owned(),
            workers: vec![on("GPU-b", "0.0.1"), on("GPU-a", "0.1.2")],
            ..Job::default()
        };
        let jobs = [job];
        let workers = workers(&jobs, "GPU-a");
        assert_eq!(
            as_lines(&node, &gpu, &workers, 0),
            [
                "GPU          n/3",
                "UUID         GPU-a",
                "NAME         H200",
                "MEMORY       140.4 GiB",
                "AGENT        connected, degraded: no kernel log",
                "HEALTH       drain",
                "SINCE        2026-11-30T03:13:18.123Z",
                "CAUSE        XID 95",
                "EVIDENCE     XID 95 in the kernel log",
                "SHARDS       can be read",
                "MAY REJOIN   after a reset",
                "TO DO        reset it",
                "RISK         12.2 points",
                "DRAINED      by an operator",
                "WORKER       0.1.2 of job j (pid 77): training",
                "READ         1.2 s ago",
                "TEMPERATURE  41 C",
                "POWER        123/700 W",
            ]
        );
        let json = as_json(&node, &gpu, &workers);
        assert_eq!(json["workers"][0]["place"], "0.1.2");
        assert_eq!(
            (&json["node"]["name"], &json["since_us"]),
            (&json!("n"), &json!(1_796_008_398_123_456_u64))
        );
    }
}
