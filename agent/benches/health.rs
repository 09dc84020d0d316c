//! What the agent costs, and how soon the daemon hears of a fault. `make bench` runs it; `--polls N` sets how long
//! memory is watched, `--format json` prints the figures as one line.

#![allow(clippy::unwrap_used)]

#[path = "../tests/harness/mod.rs"]
mod harness;

use harness::{Daemon, Node, RunningAgent, Session, cpu_ticks, probe_of};
use reknit_proto::v1::agent_order::Order;
use reknit_proto::v1::{HealthClass, ReleaseGpu};
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};

/// More than the policy lets pass on one GPU in an hour.
const PATIENT: &str = "gate.hold = \"1ms\"\nrisk = { predict_at = 1e9, drain_at = 1e9 }\n";
const MILLION: u64 = 1_000_000;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let given = |name: &str| arguments.iter().position(|a| a == name).and_then(|at| arguments.get(at + 1));
    let polls = given("--polls").map_or(MILLION, |text| text.parse().expect("--polls takes a number"));
    let as_json = given("--format").is_some_and(|format| format == "json");
    let mut figures = Vec::new();
    let mut tell = |figure: Value| {
        if !as_json {
            let text = |key: &str| figure[key].as_str().unwrap_or_default().to_owned();
            println!("{:<34} {:<62} bar: {}", text("what"), text("seen"), text("bar"));
        }
        figures.push(figure);
    };
    tell(events().await);
    for interval_ms in [200, 1000] {
        tell(polled(interval_ms).await);
    }
    tell(cost().await);
    tell(growth(polls).await);
    if as_json {
        println!("{}", Value::from(figures));
    }
}

async fn start(gpus: usize, interval_ms: u64) -> (Daemon, Node, RunningAgent, Session) {
    let (mut daemon, node) = (Daemon::start().await, Node::new(gpus));
    let policy = node.folder.path().join("patient.toml");
    fs::write(&policy, PATIENT).unwrap();
    let mut command = node.command(&format!("http://{}", daemon.address));
    command.arg("--policy").arg(policy).args(["--probe-interval-ms", &interval_ms.to_string()]);
    let agent = RunningAgent(command.stderr(std::process::Stdio::null()).spawn().unwrap());
    let mut session = daemon.session().await;
    session.quiet(Duration::from_secs(1)).await;
    (daemon, node, agent, session)
}

async fn heard(session: &mut Session, class: HealthClass) -> Instant {
    loop {
        let (report, at) = session.health().await;
        if report.health() == class {
            return at;
        }
    }
}

/// From the driver's event to the report on the daemon's side, over eight GPUs in turn.
async fn events() -> Value {
    let mut delays = Vec::new();
    // Each condemns its GPU, so a fresh node follows.
    for round in 0..25 {
        let (_daemon, node, _agent, mut session) = start(8, 1000).await;
        for gpu in 0..8 {
            tokio::time::sleep(Duration::from_millis(7 * round % 50)).await;
            let raised = Instant::now();
            node.xid(gpu, 79);
            delays.push(heard(&mut session, HealthClass::Fatal).await - raised);
        }
    }
    let count = delays.len();
    json!({
        "what": "event to report", "samples": count, "seen": percentiles(&mut delays), "bar": "p99 <= 100 ms",
        "p99_ms": at(&delays, 0.99),
    })
}

/// From a value that changes without an event to the report, at any moment between two polls.
async fn polled(interval_ms: u64) -> Value {
    let (_daemon, node, _agent, mut session) = start(8, interval_ms).await;
    let mut delays = Vec::new();
    for round in 1..=60_u64 {
        let gpu = (round % 8) as usize;
        // Moments spread over the interval.
        tokio::time::sleep(Duration::from_millis(round * 37 % interval_ms)).await;
        let changed = Instant::now();
        node.set(gpu, "reset_required=true");
        delays.push(heard(&mut session, HealthClass::Fatal).await - changed);
        node.set(gpu, "reset_required=false");
        heard(&mut session, HealthClass::Healthy).await;
        // So that it is no relapse.
        let release = ReleaseGpu { request: round, gpu: node.gpus[gpu].clone() };
        session.order(Order::ReleaseGpu(release)).await;
        session.done().await;
    }
    json!({
        "what": format!("polled every {interval_ms} ms to report"), "samples": delays.len(), "seen": percentiles(&mut delays),
        "bar": format!("<= {} ms", interval_ms + 100), "max_ms": at(&delays, 1.0),
    })
}

/// A healthy node of eight GPUs, with a session and the default interval.
async fn cost() -> Value {
    const TIME: Duration = Duration::from_secs(30);
    let (_daemon, _node, agent, mut session) = start(8, 1000).await;
    let pids = [agent.pid(), probe_of(agent.pid()).unwrap()];
    let before: u64 = pids.iter().map(|pid| cpu_ticks(*pid)).sum();
    let began = Instant::now();
    session.quiet(TIME).await;
    let spent: u64 = pids.iter().map(|pid| cpu_ticks(*pid)).sum::<u64>() - before;
    let percent = 100.0 * spent as f64 * 0.01 / began.elapsed().as_secs_f64();
    let (rss, pss): (Vec<u64>, Vec<u64>) = pids.iter().map(|pid| memory(*pid)).unzip();
    let mib = |kib: &[u64]| kib.iter().sum::<u64>() as f64 / 1024.0;
    json!({
        "what": "healthy node of 8 GPUs",
        "seen": format!("{percent:.2}% of a core, {:.1} MiB resident, {:.1} MiB of its own", mib(&rss), mib(&pss)),
        "bar": "<= 1% of a core, <= 40 MiB", "core_percent": percent, "rss_mib": mib(&rss), "pss_mib": mib(&pss),
    })
}

/// Resident memory while so many readings are taken, from a tenth of them on.
async fn growth(polls: u64) -> Value {
    let (_daemon, _node, agent, mut session) = start(64, 10).await;
    let pids = [agent.pid(), probe_of(agent.pid()).unwrap()];
    let mut seen = Vec::new();
    let mut next = polls / 10;
    loop {
        let readings = session.heartbeat().await.readings;
        if readings < next {
            continue;
        }
        seen.push((readings, pids.map(|pid| memory(pid).0)));
        if readings >= polls {
            break;
        }
        next += polls / 10;
    }
    // All of them: what is kept for a minute fills first, and only after it a level tells.
    let words = |of: usize| {
        let kib: Vec<String> = seen.iter().map(|(_, kib)| kib[of].to_string()).collect();
        format!("{} KiB", kib.join(" "))
    };
    json!({
        "what": format!("{polls} polls"), "seen": format!("agent {}, probe {}", words(0), words(1)),
        "bar": "no growth", "resident_kib": seen.iter().map(|(at, kib)| json!([at, kib])).collect::<Vec<_>>(),
    })
}

fn at(sorted: &[Duration], part: f64) -> f64 {
    let index = ((sorted.len() as f64 * part).ceil() as usize).clamp(1, sorted.len()) - 1;
    sorted[index].as_secs_f64() * 1000.0
}

fn percentiles(delays: &mut [Duration]) -> String {
    delays.sort_unstable();
    format!(
        "{} times: median {:.1} ms, p99 {:.1} ms, max {:.1} ms",
        delays.len(),
        at(delays, 0.5),
        at(delays, 0.99),
        at(delays, 1.0)
    )
}

/// Resident memory of a process, and its own share of it, in KiB.
fn memory(pid: u32) -> (u64, u64) {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let value = |key: &str| {
        let line = rollup.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    (value("Rss:"), value("Pss:"))
}
