//! `reknit bench daemon`: a real reknitd on one core under thousands of simulated agents and workers.
//!
//! Every agent has a connection of its own and a heartbeat a second; workers share connections, several on each, and
//! answer every order of the protocol. One worker is killed while all train. What is measured ends when the message has
//! arrived here, and the fleet runs on the machine's other cores: its own delays count against the daemon.

mod agent;
mod fleet;
mod gauge;
mod ground;
mod report;
mod worker;

use crate::failure::Failure;
use crate::output::{Format, print_lines};
use crate::process::{Child, tail};
use fleet::{Fleet, Tally, gpu_uuid};
use gauge::Asker;
use ground::{OPENING, allow_files, connect, start_daemon};
use reknit_layout::JobSpec;
use reknit_layout::job::Dtype;
use reknit_proto::v1::SubmitJobRequest;
use reknit_proto::v1::admin_client::AdminClient;
use report::{Measured, Percentiles, Recovery};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint, Uri};

const START_LIMIT: Duration = Duration::from_secs(20);
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// For everyone to do something once.
const FLEET_LIMIT: Duration = Duration::from_secs(120);
/// GPUs of a node of a large job, which is a rack, and of a small one. A group is a node.
const RACK: u32 = 64;
const NODE: u32 = 4;
const JOB: &str = "bench";

#[derive(Debug, clap::Args)]
pub(crate) struct DaemonArgs {
    /// Agents, each on a connection of its own, each with one heartbeat a second.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    agents: u32,
    /// Workers of the job, on the first agents' nodes: nodes of 4, or racks of 64 from 128 on.
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    workers: u32,
    /// Workers that share a connection.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=100))]
    share: u32,
    /// How long the load is measured before the fault.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Between two steps of the job.
    #[arg(long, value_name = "N", default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(100..=600_000))]
    step_ms: u64,
    /// Only what the daemon takes at rest with a small cluster: 2 nodes, 8 workers.
    #[arg(long)]
    resting: bool,
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

pub(crate) async fn run(args: &DaemonArgs) -> Result<(), Failure> {
    let (agents, workers) = if args.resting { (2, 8) } else { (args.agents, args.workers) };
    let spec = job(workers)?;
    let gpus = spec.parallel.tensor;
    if agents < workers / gpus {
        return Err(Failure::Usage(format!(
            "--agents {agents}: {workers} workers need {} nodes of {gpus} GPUs",
            workers / gpus
        )));
    }
    let connections = workers.div_ceil(args.share);
    allow_files(u64::from(agents) + u64::from(connections))?;
    let mut bench = Bench::start(agents, workers, connections, &spec, args.step_ms).await?;
    let measured = bench.measure(args.seconds, args.resting).await;
    let measured = measured.map_err(|failure| bench.explain(failure));
    bench.stop().await;
    let measured = measured?;
    match args.format {
        Format::Json => {
            let json = serde_json::to_string(&measured).map_err(Failure::failed("the figures as JSON"))?;
            print_lines(&[json])
        }
        Format::Table => print_lines(&measured.lines()),
    }
}

/// Each replica is one group. The model is as large as one stage of eight of a model of 70 billion parameters.
fn job(workers: u32) -> Result<JobSpec, Failure> {
    let tensor = if workers >= 2 * RACK { RACK } else { NODE };
    if workers < 2 * NODE || !workers.is_multiple_of(tensor) {
        return Err(Failure::Usage(format!(
            "--workers {workers}: allowed are multiples of {NODE} from {} and of {RACK} from {}",
            2 * NODE,
            2 * RACK
        )));
    }
    let mut job = super::planner::job(workers / tensor);
    JOB.clone_into(&mut job.name);
    (job.model.layers, job.model.dtype) = (10, Dtype::F32);
    (job.parallel.tensor, job.parallel.pipeline) = (tensor, 1);
    // Nobody trains with it here.
    job.run.steps = 1_000_000;
    Ok(job)
}

#[derive(Debug)]
struct Bench {
    dir: TempDir,
    daemon: Child,
    pid: u32,
    channel: Channel,
    fleet: Arc<Fleet>,
    /// Of the nodes with GPUs: who shall die there.
    kills: Vec<mpsc::Sender<u32>>,
    asker: Asker,
    agents: u32,
    workers: u32,
    connections: u32,
    spec: String,
    step: Duration,
}

impl Bench {
    async fn start(
        agents: u32,
        workers: u32,
        connections: u32,
        spec: &JobSpec,
        step_ms: u64,
    ) -> Result<Self, Failure> {
        let dir = tempfile::tempdir().map_err(Failure::failed("a temporary directory"))?;
        let ready = dir.path().join("ready");
        let daemon = start_daemon(&dir)?;
        let pid = daemon.process().pid();
        let until = Instant::now() + START_LIMIT;
        let address = loop {
            let text = std::fs::read_to_string(&ready).unwrap_or_default();
            if !text.trim().is_empty() {
                break text.trim().to_owned();
            }
            if Instant::now() > until || daemon.process().has_exited() {
                let log = tail(daemon.log(), 3).join("; ");
                return Err(Failure::Failed(format!("reknitd does not start: {log}")));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        let uri: Uri =
            format!("http://{address}").parse().map_err(Failure::failed("the daemon's address"))?;
        let channel = Endpoint::from(uri.clone()).connect().await;
        let channel = channel.map_err(Failure::failed("the daemon does not answer"))?;
        let workers_channels = connect(&uri, connections).await?;
        Ok(Self {
            fleet: Arc::new(Fleet::new(
                uri,
                spec.parallel.tensor,
                spec.batch.global.into(),
                workers_channels,
            )),
            asker: Asker::start(channel.clone()),
            dir,
            daemon,
            pid,
            channel,
            kills: Vec::new(),
            agents,
            workers,
            connections,
            spec: spec.to_toml(),
            step: Duration::from_millis(step_ms),
        })
    }

    async fn measure(&mut self, seconds: u64, resting: bool) -> Result<Measured, Failure> {
        let step = self.step;
        let everyone = self.workers as usize;
        self.connect_agents().await?;
        let idle_bytes = gauge::memory(self.pid, "VmRSS")?;
        let start = Instant::now();
        let request = SubmitJobRequest { job_toml: self.spec.clone() };
        let submitted = AdminClient::new(self.channel.clone()).submit_job(request).await;
        submitted.map_err(Failure::failed("the job is refused"))?;
        self.until("all workers to train", |tally| tally.resumes.len() == everyone).await?;
        let started = start.elapsed();

        let clock = self.steps(step);
        self.asker.take();
        let load = self.load(Duration::from_secs(seconds)).await?;
        if resting {
            return Ok(Measured {
                resting: true,
                started_ms: ms(started),
                ..self.figures(load, idle_bytes)?
            });
        }
        clock.abort();
        let loss = self.lose_one().await?;
        let clock = self.steps(step);
        // The GPU's next worker is knitted in by a planned change.
        let returns = self.take_back().await;
        clock.abort();
        let returns = returns?;
        Ok(Measured {
            started_ms: ms(started),
            loss: Some(loss),
            returns: Some(returns),
            ..self.figures(load, idle_bytes)?
        })
    }

    async fn connect_agents(&mut self) -> Result<(), Failure> {
        let with_gpus = self.workers / self.fleet.gpus;
        for node in 0..self.agents {
            let (kill, kills) = mpsc::channel(1);
            let late = Duration::from_micros(u64::from(node) * 1_000_000 / u64::from(self.agents));
            tokio::spawn(agent::run(Arc::clone(&self.fleet), node, node < with_gpus, late, kills));
            self.kills.push(kill);
            if node % OPENING == OPENING - 1 {
                self.until("agents to connect", |tally| tally.agents > node as usize).await?;
            }
        }
        let all = self.agents as usize;
        self.until("all agents to connect", |tally| tally.agents == all).await
    }

    /// Lets the job train, a step each time that much has passed.
    fn steps(&self, every: Duration) -> tokio::task::JoinHandle<()> {
        let fleet = Arc::clone(&self.fleet);
        tokio::spawn(async move {
            let mut steps = tokio::time::interval(every);
            loop {
                steps.tick().await;
                // Somebody has stopped: everyone will, after the same step.
                if fleet.tally().stops.is_empty() {
                    fleet.step.send_modify(|step| *step += 1);
                }
            }
        })
    }

    async fn load(&self, time: Duration) -> Result<report::Load, Failure> {
        let (cpu, start) = (gauge::cpu_time(self.pid)?, Instant::now());
        let sent = |tally: &Tally| (tally.reports, tally.worker_reports);
        let before = sent(&self.fleet.tally());
        self.fleet.clear();
        tokio::time::sleep(time).await;
        let elapsed = start.elapsed().as_secs_f64();
        let after = sent(&self.fleet.tally());
        // Whatever was sent is taken when an answer that was asked for later is here.
        let waits = self.asker.take();
        let cpu = gauge::cpu_time(self.pid)? - cpu;
        let per_second = |before: u64, after: u64| ((after - before) as f64 / elapsed).round();
        Ok(report::Load {
            agent_reports_per_s: per_second(before.0, after.0),
            worker_reports_per_s: per_second(before.1, after.1),
            core_share: (cpu.as_secs_f64() / elapsed * 1e3).round() / 1e3,
            wait_ms: Percentiles::of(waits),
        })
    }

    /// kill -9 of one worker: its agent sees it end, its group's other members miss it.
    async fn lose_one(&self) -> Result<Recovery, Failure> {
        let everyone = self.workers as usize;
        let (node, index) = (self.workers / self.fleet.gpus / 2, 3);
        self.fleet.clear();
        self.asker.take();
        let start = Instant::now();
        let gone = self.kills.get(node as usize).map(|kill| kill.try_send(index));
        if !matches!(gone, Some(Ok(()))) {
            return Err(Failure::Failed("no agent there to kill a worker".to_owned()));
        }
        {
            let tally = self.fleet.tally();
            // Its group are the others of its node.
            let peers = (0..self.fleet.gpus).filter(|peer| *peer != index);
            for plane in peers.filter_map(|peer| tally.planes.get(&gpu_uuid(node, peer))) {
                let _ = plane.send(());
            }
        }
        self.until("all to resume after a loss", |tally| tally.resumes.len() == everyone - 1).await?;
        self.recovery(start)
    }

    async fn take_back(&self) -> Result<Recovery, Failure> {
        let everyone = self.workers as usize;
        self.fleet.clear();
        self.until("a GPU to return", |tally| !tally.stops.is_empty()).await?;
        let start = self.fleet.tally().stops.first().copied().unwrap_or_else(Instant::now);
        self.until("all to resume after a return", |tally| tally.resumes.len() == everyone).await?;
        self.recovery(start)
    }

    fn recovery(&self, start: Instant) -> Result<Recovery, Failure> {
        let tally = self.fleet.tally();
        let since = |times: &[Instant]| times.iter().map(|at| at.duration_since(start)).collect::<Vec<_>>();
        let stopped = since(&tally.stops);
        let (prepared, resumed) = (since(&tally.prepares), since(&tally.resumes));
        let first_resume = resumed.iter().min().copied().unwrap_or_default();
        let fan_out = resumed.iter().map(|at| at.saturating_sub(first_resume)).collect();
        let asked = self.asker.take();
        Ok(Recovery {
            halted: stopped.len(),
            halt_ms: Percentiles::of(stopped),
            prepared_ms: Percentiles::of(prepared),
            prepare_bytes: tally.prepare_bytes / (tally.prepares.len() as u64).max(1),
            resumed_ms: Percentiles::of(resumed),
            resume_fan_out_ms: Percentiles::of(fan_out),
            wait_ms: Percentiles::of(asked),
        })
    }

    fn figures(&self, load: report::Load, idle_bytes: u64) -> Result<Measured, Failure> {
        Ok(Measured {
            resting: false,
            agents: self.agents,
            workers: self.workers,
            connections: self.agents + self.connections,
            started_ms: 0.0,
            load,
            idle_bytes,
            rss_bytes: gauge::memory(self.pid, "VmRSS")?,
            peak_bytes: gauge::memory(self.pid, "VmHWM")?,
            loss: None,
            returns: None,
        })
    }

    async fn until(&self, what: &str, holds: impl Fn(&Tally) -> bool) -> Result<(), Failure> {
        let waited = self.fleet.until(what, FLEET_LIMIT, holds).await;
        waited.map_err(Failure::Failed)
    }

    /// With the daemon's last words.
    fn explain(&self, failure: Failure) -> Failure {
        let log = tail(self.daemon.log(), 5).join("\n  ");
        Failure::Failed(format!("{failure}; the daemon's last words:\n  {log}"))
    }

    async fn stop(mut self) {
        self.daemon.stop(STOP_LIMIT).await;
        drop(self.dir);
    }
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}
