//! A daemon and some nodes with simulated GPUs, all of them real processes.

use crate::admin::{self, Admin};
use crate::failure::Failure;
use crate::process::{Child, Process, tail};
use reknit_proto::v1::ListNodesRequest;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::future::{Future, poll_fn};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

const START_LIMIT: Duration = Duration::from_secs(20);
const DRIVER_LIMIT: Duration = Duration::from_secs(5);
/// An agent stops its workers first.
const AGENT_STOP_LIMIT: Duration = Duration::from_secs(10);
const DAEMON_STOP_LIMIT: Duration = Duration::from_secs(5);
const WORKER_STOP_LIMIT: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(10);

/// The programs that make up a cluster, all from one build.
#[derive(Debug)]
pub(crate) struct Programs {
    daemon: PathBuf,
    agent: PathBuf,
    worker: PathBuf,
    driver: PathBuf,
}

impl Programs {
    /// Looks next to the running program.
    pub(crate) fn find() -> Result<Self, Failure> {
        let own = std::env::current_exe().map_err(Failure::failed("where this program lies is unknown"))?;
        let folder = own.parent().unwrap_or(Path::new("/"));
        let file = |name: &str| {
            let path = folder.join(name);
            if path.is_file() {
                Ok(path)
            } else {
                Err(Failure::Usage(format!(
                    "{} is missing: all of Reknit is needed in one folder; build it with `make build`",
                    path.display()
                )))
            }
        };
        Ok(Self {
            daemon: file("reknitd")?,
            agent: file("reknit-agent")?,
            worker: file("reknit-worker")?,
            driver: file("reknit-simdriver")?,
        })
    }
}

/// How large a cluster is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ground {
    pub(crate) nodes: u32,
    /// Of each node.
    pub(crate) gpus: u32,
    /// How long a GPU waits before it rejoins.
    pub(crate) rejoin_hold: Duration,
}

/// Stop it with [`Cluster::stop`]. Should this process be killed, the kernel tells daemon and agents to end.
#[derive(Debug)]
pub(crate) struct Cluster {
    programs: Programs,
    ground: Ground,
    dir: TempDir,
    daemon: Option<Child>,
    nodes: Vec<Node>,
    admin: Option<Admin>,
    /// Every worker ever announced, by pid.
    workers: BTreeMap<u32, Process>,
}

#[derive(Debug)]
struct Node {
    name: String,
    agent: Child,
    /// What its simulated driver reports.
    driver_state: PathBuf,
}

impl Cluster {
    /// Nothing runs yet.
    pub(crate) fn new(programs: Programs, ground: Ground) -> Result<Self, Failure> {
        let dir = tempfile::Builder::new().prefix("reknit-").tempdir();
        let dir = dir.map_err(Failure::failed("no temporary folder could be made"))?;
        Ok(Self {
            programs,
            ground,
            dir,
            daemon: None,
            nodes: Vec::new(),
            admin: None,
            workers: BTreeMap::new(),
        })
    }

    /// Starts everything and waits until all GPUs are reported. After an error some of it runs: stop it.
    pub(crate) async fn start(&mut self) -> Result<(), Failure> {
        let address = self.start_daemon().await?;
        let url = format!("http://{address}");
        let library = self.driver(&["library"], None, &[]).await?;
        for index in 0..self.ground.nodes {
            self.start_node(&format!("node-{index}"), &url, library.trim()).await?;
        }
        let admin = admin::connect(&url).await?;
        self.admin = Some(admin);
        let deadline = Instant::now() + START_LIMIT;
        while !self.all_gpus_reported().await? {
            if let Some(death) = self.death_now() {
                return Err(death);
            }
            if Instant::now() > deadline {
                let limit = START_LIMIT.as_secs();
                return Err(Failure::Failed(format!("not all GPUs were reported within {limit} s")));
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    async fn start_daemon(&mut self) -> Result<String, Failure> {
        let ready = self.dir.path().join("daemon.ready");
        let args: Vec<OsString> = vec![
            "--listen".into(),
            "127.0.0.1:0".into(),
            "--state-dir".into(),
            self.folder("daemon")?.into(),
            "--ready-file".into(),
            ready.clone().into(),
            "--rejoin-hold-ms".into(),
            self.ground.rejoin_hold.as_millis().to_string().into(),
            "--log".into(),
            "human".into(),
        ];
        let log = self.dir.path().join("daemon.log");
        let child = Child::start("reknitd", &self.programs.daemon, &args, &[], &log);
        self.daemon = Some(child.map_err(Failure::failed("reknitd could not be started"))?);
        let deadline = Instant::now() + START_LIMIT;
        loop {
            // It appears as a whole.
            if let Ok(address) = std::fs::read_to_string(&ready) {
                return Ok(address);
            }
            if let Some(death) = self.death_now() {
                return Err(death);
            }
            if Instant::now() > deadline {
                let limit = START_LIMIT.as_secs();
                return Err(Failure::Failed(format!("reknitd was not ready within {limit} s")));
            }
            sleep(POLL).await;
        }
    }

    async fn start_node(&mut self, name: &str, daemon: &str, library: &str) -> Result<(), Failure> {
        let driver_state = self.dir.path().join(format!("{name}.gpus.json"));
        let gpus = self.ground.gpus.to_string();
        self.driver(&["init", "--gpus", &gpus, "--node", name], Some(&driver_state), &[]).await?;
        let policy = self.dir.path().join("policy.toml");
        let hold = self.ground.rejoin_hold.as_millis();
        // The driver's word that a GPU is well again counts as soon as a worker's place is filled again.
        std::fs::write(&policy, format!("version = 1\n[gate]\nhold = \"{hold}ms\"\n"))
            .map_err(Failure::failed(policy.display()))?;
        // This machine's own log may tell of GPUs at the places of the simulated ones.
        let kmsg = self.dir.path().join(format!("{name}.kmsg"));
        std::fs::write(&kmsg, "").map_err(Failure::failed(kmsg.display()))?;
        let args: Vec<OsString> = vec![
            "--policy".into(),
            policy.into(),
            "--kmsg".into(),
            kmsg.into(),
            "--daemon".into(),
            daemon.into(),
            "--node".into(),
            name.into(),
            "--nvml-library".into(),
            library.into(),
            "--state-dir".into(),
            self.folder(name)?.into(),
        ];
        let env = [("REKNIT_SIMDRIVER_STATE", driver_state.clone().into_os_string())];
        let log = self.dir.path().join(format!("{name}.log"));
        let agent = Child::start(&format!("the agent of {name}"), &self.programs.agent, &args, &env, &log)
            .map_err(Failure::failed(format!("the agent of {name} could not be started")))?;
        self.nodes.push(Node { name: name.to_owned(), agent, driver_state });
        Ok(())
    }

    fn folder(&self, name: &str) -> Result<PathBuf, Failure> {
        let path = self.dir.path().join(name);
        std::fs::create_dir_all(&path).map_err(Failure::failed(path.display()))?;
        Ok(path)
    }

    async fn all_gpus_reported(&mut self) -> Result<bool, Failure> {
        let answer = self.admin()?.list_nodes(ListNodesRequest {}).await.map_err(admin::refused)?;
        let nodes = answer.into_inner().nodes;
        let gpus = self.ground.gpus as usize;
        let ready = nodes.iter().filter(|node| node.connected && node.gpus.len() == gpus);
        Ok(ready.count() == self.ground.nodes as usize)
    }

    pub(crate) fn admin(&self) -> Result<Admin, Failure> {
        let admin = self.admin.clone();
        admin.ok_or_else(|| Failure::Failed("the cluster has not been started".to_owned()))
    }

    /// Makes the simulated driver of `node` raise XID 79 and report the GPU lost. A driver logs the XID as the GPU
    /// goes; a reading that fails comes later.
    pub(crate) async fn lose_gpu(&self, node: &str, index: u32) -> Result<(), Failure> {
        self.change_gpu(node, index, &["event"], "xid=79").await?;
        self.change_gpu(node, index, &["set"], "lost=true").await
    }

    pub(crate) async fn give_back_gpu(&self, node: &str, index: u32) -> Result<(), Failure> {
        self.change_gpu(node, index, &["set"], "lost=false").await
    }

    async fn change_gpu(&self, node: &str, index: u32, verb: &[&str], change: &str) -> Result<(), Failure> {
        let state = self.driver_state(node)?;
        self.driver(verb, Some(state), &[&index.to_string(), change]).await?;
        Ok(())
    }

    fn driver_state(&self, node: &str) -> Result<&Path, Failure> {
        let node = self.nodes.iter().find(|candidate| candidate.name == node);
        let state = node.map(|node| node.driver_state.as_path());
        state.ok_or_else(|| Failure::Failed("the daemon named a node that was not started here".to_owned()))
    }

    /// Runs the simulated driver's own tool; returns what it printed.
    async fn driver(&self, before: &[&str], state: Option<&Path>, after: &[&str]) -> Result<String, Failure> {
        let mut command = tokio::process::Command::new(&self.programs.driver);
        command.args(before).args(state).args(after).kill_on_drop(true);
        let what = format!("reknit-simdriver {} failed", before.join(" "));
        let output = tokio::time::timeout(DRIVER_LIMIT, command.output()).await;
        let output = output.map_err(Failure::failed(&what))?.map_err(Failure::failed(&what))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let error = String::from_utf8_lossy(&output.stderr);
        Err(Failure::Failed(format!("{what}: {}", error.trim())))
    }

    /// Takes note of a worker's process, so that it can be killed and is not left behind.
    pub(crate) fn worker(&mut self, pid: u32) -> Result<&Process, Failure> {
        let what = format!("the worker with pid {pid} cannot be watched");
        if !self.workers.contains_key(&pid) {
            let process = Process::open(pid).map_err(Failure::failed(&what))?;
            let program = process.program().map_err(Failure::failed(&what))?;
            if program != self.programs.worker {
                return Err(Failure::Failed(format!("{what}: it runs {}", program.display())));
            }
            self.workers.insert(pid, process);
        }
        self.workers.get(&pid).ok_or(Failure::Failed(what))
    }

    fn children(&self) -> impl Iterator<Item = &Child> {
        self.daemon.iter().chain(self.nodes.iter().map(|node| &node.agent))
    }

    fn children_mut(&mut self) -> impl Iterator<Item = &mut Child> {
        self.daemon.iter_mut().chain(self.nodes.iter_mut().map(|node| &mut node.agent))
    }

    /// The daemon or an agent that has ended.
    pub(crate) fn death_now(&mut self) -> Option<Failure> {
        self.children_mut().find_map(|child| {
            let status = child.status()?;
            Some(Failure::Failed(format!("{} ended unexpectedly ({status})", child.name())))
        })
    }

    /// The last `count` lines that the daemon and each agent wrote.
    pub(crate) fn last_words(&self, count: usize) -> Vec<String> {
        let of = |child: &Child| {
            let lines = tail(child.log(), count).into_iter();
            lines.map(|line| format!("{}: {line}", child.name())).collect::<Vec<_>>()
        };
        self.children().flat_map(of).collect()
    }

    /// Waits until the daemon or an agent has ended.
    pub(crate) async fn death(&self) {
        let mut ends: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
        for child in self.children() {
            ends.push(Box::pin(child.process().exited()));
        }
        poll_fn(|context| {
            let ended = ends.iter_mut().any(|end| end.as_mut().poll(context).is_ready());
            if ended { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Ends everything: agents (which end their workers), the daemon, and any worker that is still there.
    pub(crate) async fn stop(&mut self) {
        for node in &self.nodes {
            let _ = node.agent.process().signal(Signal::TERM);
        }
        for node in &mut self.nodes {
            node.agent.stop(AGENT_STOP_LIMIT).await;
        }
        if let Some(daemon) = &mut self.daemon {
            daemon.stop(DAEMON_STOP_LIMIT).await;
        }
        for worker in self.workers.values() {
            if !worker.has_exited() {
                let _ = worker.signal(Signal::KILL);
                worker.exited_within(WORKER_STOP_LIMIT).await;
            }
        }
    }

    /// Ends everything at once, asking nobody.
    pub(crate) fn kill(&mut self) {
        self.children_mut().for_each(Child::kill);
        for worker in self.workers.values() {
            let _ = worker.signal(Signal::KILL);
        }
    }

    /// For a run that failed: leaves the logs where they are and says where.
    pub(crate) fn keep_logs(self) -> PathBuf {
        self.dir.keep()
    }
}
