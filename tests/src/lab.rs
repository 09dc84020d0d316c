//! A daemon and some nodes with simulated GPUs on this machine, each a real process, on loopback.

use crate::etcd::{Etcd, free_ports};
use crate::job::{TEXT, TestJob};
use crate::process::{is_worker, signal, wait_limited};
use crate::watch::Watch;
use anyhow::{Context, Result, bail, ensure};
use reknit_proto::v1::admin_client::AdminClient;
use reknit_proto::v1::{
    GetJobRequest, Job, ListIncidentsRequest, ListNodesRequest, SubmitJobRequest, WatchEventsRequest,
};
use rustix::process::Signal;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tonic::transport::Channel;

/// Everything in a test is awaited at most this long.
pub const LIMIT: Duration = Duration::from_secs(60);
/// How long after a leader's death another may lead.
pub const LEASE: Duration = Duration::from_secs(3);
/// A daemon that is stopped or gone does not answer.
const ASK_LIMIT: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy)]
pub struct LabOptions {
    pub nodes: u32,
    pub gpus: u32,
    pub rejoin_hold_ms: u32,
    /// One keeps its state in a file; several, in an etcd of three members.
    pub daemons: usize,
}

impl Default for LabOptions {
    fn default() -> Self {
        Self { nodes: 2, gpus: 4, rejoin_hold_ms: 500, daemons: 1 }
    }
}

/// Stops everything when dropped.
#[derive(Debug)]
pub struct Lab {
    pub dir: TempDir,
    options: LabOptions,
    pub etcd: Option<Etcd>,
    daemons: Vec<Daemon>,
    agents: Vec<Child>,
    pids: BTreeSet<u32>,
    stopped: bool,
}

#[derive(Debug)]
struct Daemon {
    /// `host:port`. Port 0 until it was started once.
    address: String,
    process: Option<Child>,
}

/// A program of this build.
pub fn program(name: &str) -> Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let dir = exe.parent().and_then(Path::parent).context("a test runs in target/PROFILE/deps")?;
    let path = dir.join(name);
    ensure!(path.is_file(), "{} is missing: run `cargo build --workspace` first", path.display());
    Ok(path)
}

impl Lab {
    pub async fn start(options: LabOptions) -> Result<Self> {
        let several = options.daemons > 1;
        let etcd = if several { Some(Etcd::start().await?) } else { None };
        // The agents are told all addresses before the daemons have been started.
        let ports = if several { free_ports(options.daemons)? } else { vec![0] };
        let daemons = ports.into_iter().map(|port| format!("127.0.0.1:{port}"));
        let mut lab = Self {
            dir: tempfile::tempdir()?,
            options,
            etcd,
            daemons: daemons.map(|address| Daemon { address, process: None }).collect(),
            agents: Vec::new(),
            pids: BTreeSet::new(),
            stopped: false,
        };
        if several {
            (0..options.daemons).try_for_each(|number| lab.spawn_daemon(number))?;
            lab.leader().await?;
        } else {
            lab.start_daemon().await?;
        }
        for node in 0..options.nodes {
            let state = lab.driver_state(node).display().to_string();
            let (gpus, name) = (options.gpus.to_string(), format!("node-{node}"));
            driver(&["init", "--gpus", &gpus, "--node", &name, &state])?;
            let agent = lab.spawn_agent(node, &name)?;
            lab.agents.push(agent);
        }
        let want = (options.nodes * options.gpus) as usize;
        let mut admin = lab.admin().await?;
        eventually("all GPUs to be reported", async || {
            let nodes = admin.list_nodes(ListNodesRequest {}).await?.into_inner().nodes;
            Ok(nodes.iter().map(|node| node.gpus.len()).sum::<usize>() == want)
        })
        .await?;
        Ok(lab)
    }

    fn log(&self, name: &str) -> Result<std::fs::File> {
        let path = self.dir.path().join(name);
        Ok(std::fs::File::options().create(true).append(true).open(path)?)
    }

    /// Starts the only daemon; after the first time at the address it had.
    pub async fn start_daemon(&mut self) -> Result<()> {
        let ready = self.dir.path().join("ready");
        let _ = std::fs::remove_file(&ready);
        self.spawn_daemon(0)?;
        let mut address = String::new();
        eventually("the daemon to listen", async || {
            address = std::fs::read_to_string(&ready).unwrap_or_default().trim().to_owned();
            Ok(!address.is_empty())
        })
        .await?;
        self.daemons[0].address = address;
        Ok(())
    }

    /// Starts a daemon, which leads or stands by.
    pub fn spawn_daemon(&mut self, number: usize) -> Result<()> {
        let mut command = Command::new(program("reknitd")?);
        command
            .args(["--listen", &self.daemons[number].address])
            .args(["--rejoin-hold-ms", &self.options.rejoin_hold_ms.to_string()])
            .stdin(Stdio::null())
            .stdout(self.log("daemon.log")?)
            .stderr(self.log("daemon.log")?);
        match &self.etcd {
            Some(etcd) => {
                let lease = LEASE.as_secs().to_string();
                command.args(["--store", "etcd", "--endpoints", &etcd.endpoints()]);
                command.args(["--etcd-lease-seconds", &lease]);
            }
            None => {
                command.arg("--state-dir").arg(self.store());
                command.arg("--ready-file").arg(self.dir.path().join("ready"));
            }
        }
        self.daemons[number].process = Some(command.spawn()?);
        Ok(())
    }

    /// The folder of the only daemon's store.
    pub fn store(&self) -> PathBuf {
        self.dir.path().join("daemon")
    }

    /// kill -9 of the only daemon, confirmed.
    pub fn kill_daemon(&mut self) -> Result<()> {
        self.kill_daemon_at(0)
    }

    /// kill -9, confirmed.
    pub fn kill_daemon_at(&mut self, number: usize) -> Result<()> {
        let mut daemon = self.daemons[number].process.take().context("the daemon runs")?;
        daemon.kill()?;
        let status = daemon.wait()?;
        ensure!(!status.success(), "the daemon was killed, yet {status}");
        Ok(())
    }

    fn driver_state(&self, node: u32) -> PathBuf {
        self.dir.path().join(format!("node-{node}.json"))
    }

    /// An agent of the node. `folder` names its state folder and its log.
    fn spawn_agent(&self, node: u32, folder: &str) -> Result<Child> {
        let state = self.driver_state(node);
        let name = format!("node-{node}");
        let library = program("libreknit_simdriver.so")?;
        let (policy, kmsg) =
            (self.dir.path().join("policy.toml"), self.dir.path().join(format!("{name}.kmsg")));
        std::fs::write(&policy, format!("gate.hold = \"{}ms\"\n", self.options.rejoin_hold_ms))?;
        // This machine's own log may tell of GPUs at the places of the simulated ones.
        std::fs::File::options().create(true).append(true).open(&kmsg)?;
        let child = Command::new(program("reknit-agent")?)
            .args(["--daemon", &self.addresses(), "--node", &name])
            .arg("--nvml-library")
            .arg(library)
            .arg("--state-dir")
            .arg(self.dir.path().join(folder))
            .arg("--policy")
            .arg(policy)
            .arg("--kmsg")
            .arg(kmsg)
            .env("REKNIT_SIMDRIVER_STATE", &state)
            .stdin(Stdio::null())
            .stdout(self.log(&format!("{folder}.log"))?)
            .stderr(self.log(&format!("{folder}.log"))?)
            .spawn()?;
        Ok(child)
    }

    /// kill -9, confirmed.
    pub fn kill_agent(&mut self, node: u32) -> Result<()> {
        let agent = &mut self.agents[node as usize];
        agent.kill()?;
        ensure!(!agent.wait()?.success(), "the agent was killed");
        Ok(())
    }

    /// After `kill_agent`.
    pub fn restart_agent(&mut self, node: u32) -> Result<()> {
        self.agents[node as usize] = self.spawn_agent(node, &format!("node-{node}"))?;
        Ok(())
    }

    /// One more agent under the node's name; it ends with the lab.
    pub fn second_agent(&mut self, node: u32, folder: &str) -> Result<()> {
        let agent = self.spawn_agent(node, folder)?;
        self.agents.push(agent);
        Ok(())
    }

    pub fn signal_daemon(&self, with: Signal) -> Result<()> {
        self.signal_daemon_at(0, with)
    }

    pub fn signal_daemon_at(&self, number: usize, with: Signal) -> Result<()> {
        signal(self.daemon_pid(number)?, with)
    }

    pub fn daemon_pid(&self, number: usize) -> Result<u32> {
        Ok(self.daemons[number].process.as_ref().context("the daemon runs")?.id())
    }

    /// As clients take it.
    pub fn address(&self, daemon: usize) -> String {
        format!("http://{}", self.daemons[daemon].address)
    }

    /// Of all daemons, as clients take them.
    fn addresses(&self) -> String {
        let urls: Vec<_> = (0..self.daemons.len()).map(|daemon| self.address(daemon)).collect();
        urls.join(",")
    }

    /// The daemon that leads, as soon as one does.
    pub async fn leader(&self) -> Result<usize> {
        let mut leader = None;
        eventually("a daemon to lead", async || {
            for number in 0..self.daemons.len() {
                if self.leads(number).await {
                    leader = Some(number);
                }
            }
            Ok(leader.is_some())
        })
        .await?;
        leader.context("just seen")
    }

    /// Only the leader knows the nodes.
    pub async fn leads(&self, number: usize) -> bool {
        let asked = async { self.admin_of(number).await.ok()?.list_nodes(ListNodesRequest {}).await.ok() };
        tokio::time::timeout(ASK_LIMIT, asked).await.is_ok_and(|answer| answer.is_some())
    }

    pub async fn admin_of(&self, number: usize) -> Result<AdminClient<Channel>> {
        Ok(AdminClient::connect(self.address(number)).await?)
    }

    /// What a process of the lab has logged so far.
    pub fn logged(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(format!("{name}.log"))).unwrap_or_default()
    }

    pub async fn nodes(&self) -> Result<Vec<reknit_proto::v1::Node>> {
        let request = ListNodesRequest {};
        Ok(self.admin().await?.list_nodes(request).await?.into_inner().nodes)
    }

    /// The operator's tool, asking this lab's daemon: its exit status, output and error.
    pub fn reknit(&self, args: &[&str]) -> Result<(Option<i32>, String, String)> {
        let mut command = Command::new(program("reknit")?);
        command.args(args).env("REKNIT_DAEMON", self.addresses());
        let output = command.output()?;
        Ok((output.status.code(), String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?))
    }

    pub fn raise_xid(&self, node: u32, gpu: u32, xid: u32) -> Result<()> {
        let state = self.driver_state(node).display().to_string();
        driver(&["event", &state, &gpu.to_string(), &format!("xid={xid}")])
    }

    pub fn set_gpu(&self, node: u32, gpu: u32, change: &str) -> Result<()> {
        driver(&["set", &self.driver_state(node).display().to_string(), &gpu.to_string(), change])
    }

    /// The file that the node's simulated driver reads and writes.
    pub fn driver_file(&self, node: u32) -> Result<String> {
        Ok(std::fs::read_to_string(self.driver_state(node))?)
    }

    /// Of the daemon that leads.
    pub async fn admin(&self) -> Result<AdminClient<Channel>> {
        let leader = if self.daemons.len() > 1 { self.leader().await? } else { 0 };
        self.admin_of(leader).await
    }

    pub async fn submit(&mut self, job: TestJob) -> Result<()> {
        self.submit_on(job, TEXT).await
    }

    /// The job on this text.
    pub async fn submit_on(&mut self, job: TestJob, text: &str) -> Result<()> {
        let path = self.dir.path().join("text");
        std::fs::write(&path, text)?;
        self.admin().await?.submit_job(SubmitJobRequest { job_toml: job.toml(&path) }).await?;
        Ok(())
    }

    pub async fn watch(&self) -> Result<Watch> {
        let events = self.admin().await?.watch_events(WatchEventsRequest::default()).await?.into_inner();
        Ok(Watch::new(events))
    }

    pub async fn job(&self) -> Result<Job> {
        let request = GetJobRequest { name: "test".to_owned() };
        Ok(self.admin().await?.get_job(request).await?.into_inner())
    }

    /// The processes by place.
    pub async fn pids(&self) -> Result<BTreeMap<String, u32>> {
        let workers = self.job().await?.workers;
        let placed = workers.into_iter().filter(|worker| !worker.place.is_empty());
        Ok(placed.map(|worker| (worker.place, worker.pid)).collect())
    }

    /// So many workers train in the present layout.
    pub async fn is_whole(&mut self, workers: usize) -> Result<bool> {
        let job = self.job().await?;
        self.pids.extend(job.workers.iter().map(|worker| worker.pid).filter(|pid| *pid > 0));
        // A newcomer has a place before it trains.
        let train = job.workers.iter().filter(|worker| worker.state == "training" && worker.pid > 0);
        Ok(job.phase == "Running" && train.count() == workers)
    }

    pub async fn incidents(&self) -> Result<Vec<reknit_proto::v1::Incident>> {
        let request = ListIncidentsRequest { job: "test".to_owned() };
        Ok(self.admin().await?.list_incidents(request).await?.into_inner().incidents)
    }

    /// The pid of the worker at a place, which is remembered for the end.
    pub async fn pid(&mut self, place: &str) -> Result<u32> {
        let job = self.job().await?;
        self.pids.extend(job.workers.iter().map(|worker| worker.pid).filter(|pid| *pid > 0));
        let worker = job.workers.iter().find(|worker| worker.place == place && worker.pid > 0);
        Ok(worker.with_context(|| format!("no worker at {place}: {:?}", job.workers))?.pid)
    }

    /// Loses a GPU the driver's way: it falls off the bus with XID 79.
    pub fn lose_gpu(&self, node: u32, gpu: u32) -> Result<()> {
        let state = self.driver_state(node).display().to_string();
        // The word first: on a busy machine the readings alone would condemn the GPU before it.
        driver(&["event", &state, &gpu.to_string(), "xid=79"])?;
        driver(&["set", &state, &gpu.to_string(), "lost=true"])
    }

    pub fn give_back_gpu(&self, node: u32, gpu: u32) -> Result<()> {
        driver(&["set", &self.driver_state(node).display().to_string(), &gpu.to_string(), "lost=false"])
    }

    /// Stops everything in order and checks that nothing is left.
    pub async fn stop(mut self) -> Result<()> {
        self.pids.extend(self.job().await?.workers.iter().map(|worker| worker.pid).filter(|pid| *pid > 0));
        for agent in &mut self.agents {
            signal(agent.id(), Signal::TERM)?;
        }
        for mut agent in std::mem::take(&mut self.agents) {
            ensure!(wait_limited(&mut agent)?.success(), "an agent did not stop well");
        }
        for daemon in self.daemons.iter_mut().filter_map(|daemon| daemon.process.as_mut()) {
            signal(daemon.id(), Signal::TERM)?;
            ensure!(wait_limited(daemon)?.success(), "a daemon did not stop well");
        }
        for pid in &self.pids {
            ensure!(!is_worker(*pid), "worker {pid} is left behind");
        }
        self.stopped = true;
        Ok(())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for agent in &mut self.agents {
            let _ = signal(agent.id(), Signal::TERM);
            if wait_limited(agent).is_err() {
                let _ = agent.kill();
            }
        }
        for daemon in self.daemons.iter_mut().filter_map(|daemon| daemon.process.as_mut()) {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        for pid in &self.pids {
            if is_worker(*pid) {
                let _ = signal(*pid, Signal::KILL);
            }
        }
        if !self.stopped {
            for log in ["daemon.log", "node-0.log", "node-1.log"] {
                let text = std::fs::read_to_string(self.dir.path().join(log)).unwrap_or_default();
                let lines: Vec<_> = text.lines().collect();
                eprintln!("--- {log}\n{}", lines[lines.len().saturating_sub(25)..].join("\n"));
            }
        }
    }
}

fn driver(args: &[&str]) -> Result<()> {
    let output = Command::new(program("reknit-simdriver")?).args(args).output()?;
    ensure!(
        output.status.success(),
        "reknit-simdriver {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Polls something that sends no event of its own.
pub async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !holds().await? {
        if start.elapsed() > LIMIT {
            bail!("waited {LIMIT:?} for {what}");
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}
