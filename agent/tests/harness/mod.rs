//! A daemon, a node's driver and an agent, for the tests: the agent and the probe are the real program.
#![allow(dead_code, missing_debug_implementations, clippy::unwrap_used, clippy::expect_used)]

use reknit_proto::v1;
use reknit_proto::v1::agent_order::Order;
use reknit_proto::v1::agent_report::Report;
use reknit_proto::v1::agent_server::{Agent, AgentServer};
use reknit_simdriver::state::{STATE_VARIABLE, State, Target};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// One session of the agent with the test's daemon.
pub(crate) struct Session {
    pub(crate) hello: v1::AgentHello,
    reports: mpsc::Receiver<(Report, Instant)>,
    orders: Option<mpsc::Sender<Result<v1::AgentOrder, Status>>>,
    acknowledge: bool,
    /// Transitions that came before an answer that was waited for.
    pub(crate) passed: Vec<v1::HealthTransition>,
}

/// An opened session: what the agent reports, and where its orders go.
type Opened = (Streaming<v1::AgentReport>, mpsc::Sender<Result<v1::AgentOrder, Status>>);

struct Service {
    opened: mpsc::Sender<Opened>,
}

#[tonic::async_trait]
impl Agent for Service {
    type SessionStream = ReceiverStream<Result<v1::AgentOrder, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::AgentReport>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (orders, queued) = mpsc::channel(64);
        self.opened
            .send((request.into_inner(), orders))
            .await
            .map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(queued)))
    }
}

/// The test's side of the Agent service.
pub(crate) struct Daemon {
    pub(crate) address: SocketAddr,
    opened: mpsc::Receiver<Opened>,
}

impl Daemon {
    pub(crate) async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap()).await
    }

    pub(crate) async fn start_at(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (opened_in, opened) = mpsc::channel(4);
        let server = tonic::transport::Server::builder()
            .add_service(AgentServer::new(Service { opened: opened_in }))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(server);
        Self { address, opened }
    }

    async fn opened(&mut self) -> Opened {
        timeout(PATIENCE, self.opened.recv()).await.expect("no session").unwrap()
    }

    /// The next session hears no more than this. Returns when the agent has left it.
    pub(crate) async fn say_only(&mut self, order: Option<Order>) {
        let (mut stream, orders) = self.opened().await;
        let mut orders = Some(orders);
        match order {
            Some(order) => {
                let order = v1::AgentOrder { order: Some(order) };
                orders.as_ref().unwrap().send(Ok(order)).await.unwrap();
            }
            None => orders = None,
        }
        let left = async { while let Ok(Some(_)) = stream.message().await {} };
        timeout(PATIENCE, left).await.expect("the agent stays");
        drop(orders);
    }

    /// The next session, welcomed.
    pub(crate) async fn session(&mut self) -> Session {
        let (mut stream, orders) = self.opened().await;
        let first = timeout(PATIENCE, stream.message()).await;
        let first = first.expect("no hello").unwrap().unwrap();
        let Some(Report::Hello(hello)) = first.report else {
            panic!("the first report is {first:?}, no hello");
        };
        let (reports_in, reports) = mpsc::channel(1024);
        tokio::spawn(async move {
            while let Ok(Some(message)) = stream.message().await {
                let report = message.report.unwrap();
                if reports_in.send((report, Instant::now())).await.is_err() {
                    return;
                }
            }
        });
        let session = Session { hello, reports, orders: Some(orders), acknowledge: true, passed: Vec::new() };
        let welcome = v1::AgentWelcome { heartbeat_ms: 100, term: 1 };
        session.order(Order::Welcome(welcome)).await;
        session
    }
}

impl Session {
    pub(crate) async fn order(&self, order: Order) {
        let order = v1::AgentOrder { order: Some(order) };
        self.orders.as_ref().unwrap().send(Ok(order)).await.unwrap();
    }

    pub(crate) async fn spawn(&self, gpu: &str, incarnation: u64) {
        let worker = Some(key(gpu, incarnation));
        self.order(Order::Spawn(v1::SpawnWorker { worker, epoch: 0 })).await;
    }

    pub(crate) async fn fence(&self, gpu: &str, incarnation: u64) {
        let worker = Some(key(gpu, incarnation));
        self.order(Order::Fence(v1::FenceWorker { worker, epoch: 0 })).await;
    }

    /// From now on transitions are left unacknowledged.
    pub(crate) fn fall_silent(&mut self) {
        self.acknowledge = false;
    }

    /// The next report that is no heartbeat, within `limit`.
    pub(crate) async fn next(&mut self, limit: Duration) -> Option<(Report, Instant)> {
        let deadline = tokio::time::Instant::now() + limit;
        loop {
            let next = tokio::time::timeout_at(deadline, self.reports.recv());
            let (report, at) = next.await.ok()??;
            if let Report::Health(health) = &report
                && self.acknowledge
            {
                let sequence = health.sequence;
                self.order(Order::HealthAck(v1::HealthAck { sequence })).await;
            }
            if !matches!(report, Report::Heartbeat(_)) {
                return Some((report, at));
            }
        }
    }

    pub(crate) async fn health(&mut self) -> (v1::HealthTransition, Instant) {
        match self.next(PATIENCE).await {
            Some((Report::Health(health), at)) => (health, at),
            other => panic!("{other:?} is no health transition"),
        }
    }

    /// The hello that tells another list of GPUs within the session.
    pub(crate) async fn hello_again(&mut self) {
        match self.next(PATIENCE).await {
            Some((Report::Hello(hello), _)) => self.hello = hello,
            other => panic!("{other:?} is no hello"),
        }
    }

    pub(crate) async fn spawned(&mut self) -> v1::WorkerSpawned {
        match self.next(PATIENCE).await {
            Some((Report::Spawned(spawned), _)) => spawned,
            other => panic!("{other:?} is no spawned worker"),
        }
    }

    pub(crate) async fn exited(&mut self) -> (v1::WorkerExited, Instant) {
        match self.next(PATIENCE).await {
            Some((Report::Exited(exited), at)) => (exited, at),
            other => panic!("{other:?} is no ended worker"),
        }
    }

    /// The next answer to an order.
    pub(crate) async fn done(&mut self) -> v1::OrderDone {
        loop {
            match self.next(PATIENCE).await {
                Some((Report::Done(done), _)) => return done,
                Some((Report::Health(health), _)) => self.passed.push(health),
                other => panic!("{other:?} is no answer"),
            }
        }
    }

    pub(crate) async fn heartbeat(&mut self) -> v1::AgentHeartbeat {
        let heard = timeout(PATIENCE, async {
            loop {
                if let Some((Report::Heartbeat(beat), _)) = self.reports.recv().await {
                    return beat;
                }
            }
        });
        heard.await.expect("no heartbeat")
    }

    /// Nothing but heartbeats for `time`.
    pub(crate) async fn quiet(&mut self, time: Duration) {
        if let Some((report, _)) = self.next(time).await {
            panic!("{report:?} though nothing happened");
        }
    }

    /// The daemon ends the session.
    pub(crate) fn close(mut self) {
        self.orders = None;
    }
}

pub(crate) fn key(gpu: &str, incarnation: u64) -> v1::WorkerKey {
    v1::WorkerKey { job: "job".to_owned(), gpu: gpu.to_owned(), incarnation }
}

/// A node: a folder, its simulated driver and what the agent keeps.
pub(crate) struct Node {
    pub(crate) folder: TempDir,
    pub(crate) gpus: Vec<String>,
    pub(crate) worker: PathBuf,
}

impl Node {
    pub(crate) fn new(gpus: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = State::healthy("n0", gpus);
        state.save(&folder.path().join("driver.json")).unwrap();
        // As the built-in one, but a GPU that was taken out is not held back for seconds.
        std::fs::write(folder.path().join("quick.toml"), "gate.hold = \"100ms\"\n").unwrap();
        std::fs::write(folder.path().join("kmsg"), "").unwrap();
        let worker = folder.path().join("worker.sh");
        std::fs::write(&worker, "#!/bin/sh\necho \"$@\"\nexec sleep 1000\n").unwrap();
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&worker, executable).unwrap();
        Self { gpus: state.gpus.into_iter().map(|gpu| gpu.uuid).collect(), folder, worker }
    }

    pub(crate) fn driver(&self) -> PathBuf {
        self.folder.path().join("driver.json")
    }

    pub(crate) fn set(&self, gpu: usize, change: &str) {
        State::update(&self.driver(), |s| s.set(gpu, &[change.to_owned()])).unwrap();
    }

    /// A value of the driver's, as the file has it now.
    pub(crate) fn value(&self, gpu: usize, key: &str) -> serde_json::Value {
        let text = std::fs::read(self.driver()).unwrap();
        let state: serde_json::Value = serde_json::from_slice(&text).unwrap();
        state["gpus"][gpu][key].clone()
    }

    pub(crate) fn state_dir(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    pub(crate) fn write_worker(&self, script: &str) {
        std::fs::write(&self.worker, script).unwrap();
    }

    /// Changes a key of the whole node.
    pub(crate) fn set_node(&self, change: &str) {
        State::update(&self.driver(), |s| s.set(Target::Node, &[change.to_owned()])).unwrap();
    }

    pub(crate) fn xid(&self, gpu: usize, xid: u64) {
        State::update(&self.driver(), |s| s.raise_xid(gpu, xid)).unwrap();
    }

    pub(crate) fn command(&self, daemon: &str) -> Command {
        self.command_over(daemon, &library())
    }

    /// With another library than the simulated driver's.
    pub(crate) fn command_over(&self, daemon: &str, library: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_reknit-agent"));
        command
            .env("REKNIT_DAEMON", daemon)
            .args(["--node", "n0"])
            .arg("--nvml-library")
            .arg(library)
            .arg("--state-dir")
            .arg(self.folder.path().join("state"))
            .arg("--worker-binary")
            .arg(&self.worker)
            .env(STATE_VARIABLE, self.driver())
            .env("REKNIT_PROBE_INTERVAL_MS", "250")
            .env("REKNIT_POLICY", self.folder.path().join("quick.toml"))
            .env("REKNIT_KMSG", self.folder.path().join("kmsg"))
            .stdin(Stdio::null());
        command
    }

    /// Started, with its log in a file.
    pub(crate) fn start_logged(&self, address: &SocketAddr) -> (RunningAgent, PathBuf) {
        self.start_with(&format!("http://{address}"))
    }

    /// The same, with any list of daemons.
    pub(crate) fn start_with(&self, daemons: &str) -> (RunningAgent, PathBuf) {
        let path = self.folder.path().join("agent.log");
        let log = std::fs::File::options().create(true).append(true).open(&path).unwrap();
        let mut command = self.command(daemons);
        (RunningAgent(command.stderr(log).spawn().unwrap()), path)
    }

    pub(crate) fn start(&self, daemon: &Daemon) -> RunningAgent {
        let address = format!("http://{}", daemon.address);
        RunningAgent(self.command(&address).spawn().unwrap())
    }
}

/// Killed with the test if it still runs, and its workers with it.
pub(crate) struct RunningAgent(pub(crate) Child);

impl RunningAgent {
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    pub(crate) fn terminate(&self) {
        kill(self.pid(), "TERM");
    }

    pub(crate) fn exit_code(&mut self, limit: Duration) -> Option<i32> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("the agent still runs after {limit:?}");
    }
}

impl Drop for RunningAgent {
    fn drop(&mut self) {
        // SIGTERM first, so that the workers go too.
        if let Ok(None) = self.0.try_wait() {
            self.terminate();
            let _code = self.exit_code(Duration::from_secs(8));
        }
    }
}

pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let mut folders = test.ancestors().skip(1).take(2);
    folders
        .find_map(|folder| {
            let path = folder.join("libreknit_simdriver.so");
            path.exists().then_some(path)
        })
        .expect("cargo builds the simulated driver with this test")
}

pub(crate) fn kill(pid: u32, signal: &str) {
    let status = Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status().unwrap();
    assert!(status.success(), "no process {pid}");
}

pub(crate) fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    state.is_some_and(|state| !state.starts_with('Z') && !state.starts_with('X'))
}

/// Waits for something that tells nobody.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) fn children(pid: u32) -> Vec<u32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let text = std::fs::read_to_string(Path::new(&path)).unwrap_or_default();
    text.split_whitespace().map(|n| n.parse().unwrap()).collect()
}

pub(crate) fn command_line(pid: u32) -> String {
    let raw = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&raw).replace('\0', " ")
}

/// The agent's probe.
pub(crate) fn probe_of(agent: u32) -> Option<u32> {
    children(agent).into_iter().find(|child| command_line(*child).contains(" probe --nvml-library"))
}

/// Those of the agent and its children that have the driver's library loaded.
pub(crate) fn users_of_the_driver(agent: u32) -> Vec<u32> {
    let mut all = vec![agent];
    all.extend(children(agent));
    all.retain(|pid| {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        maps.contains("libreknit_simdriver.so")
    });
    all
}

/// CPU time of a process so far, in clock ticks of 10 ms.
pub(crate) fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    // utime and stime are fields 14 and 15; the state, first here, is field 3.
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}
