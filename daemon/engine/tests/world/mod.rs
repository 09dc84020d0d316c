//! A model cluster in virtual time: agents and workers that answer orders as proto/reknit/v1/worker.proto says, a
//! network that keeps the order of a session, and a daemon that is nothing but the engine and its store.
// Each test file uses a part of it. TRACE is the tests' own switch.
#![allow(dead_code, unreachable_pub, clippy::disallowed_methods)]

pub mod checks;
pub mod faults;
pub mod stories;
pub mod trace;
pub mod worker;

use checks::Checks;
use reknit_engine::*;
use reknit_layout::job::*;
use reknit_layout::*;
use std::collections::{BTreeMap, BTreeSet};
use worker::Process;

pub const MS: u64 = 1_000;

/// A small, seeded generator (SplitMix64): the same seed, the same run.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    pub fn pick<T: Clone>(&mut self, of: &[T]) -> Option<T> {
        let index = self.below(of.len() as u64) as usize;
        of.get(index).cloned()
    }
}

/// What happens at a time.
#[derive(Debug, Clone)]
pub enum Happening {
    /// Reaches the daemon, if the session it came over still stands.
    Report {
        link: Link,
        session: u64,
        event: Event,
    },
    /// Reaches a worker or an agent, on the same condition.
    Order {
        link: Link,
        session: u64,
        order: Command,
    },
    Planned(Event),
    AgentConnects(NodeName),
    WorkerConnects(WorkerKey),
    ProcessStarts(WorkerKey, NodeName),
    ProcessEnds(WorkerKey, ExitStatus),
    Prepared(WorkerKey, Epoch, Step),
    Commits(WorkerKey, Epoch, Step),
    NoticesFailure(WorkerKey, Epoch),
    GetsReady(WorkerKey, Epoch),
    Heartbeat,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Link {
    Agent(NodeName),
    Worker(WorkerKey),
}

pub struct World {
    pub state: State,
    pub timeouts: Timeouts,
    /// As the daemon is configured.
    pub topology: Topology,
    pub now: Time,
    pub random: Random,
    /// The longest delay of a message, in microseconds; the shortest is a tenth of it.
    pub delay: u64,
    pub step_time: u64,
    queue: BTreeMap<(Time, u64), Happening>,
    sequence: u64,
    /// Open sessions, by their number; a link that is not here is down.
    pub sessions: BTreeMap<Link, u64>,
    /// When the last message of a link arrives: none overtakes it.
    arrivals: BTreeMap<(Link, bool), Time>,
    pub agents: BTreeMap<NodeName, Vec<GpuReport>>,
    pub processes: BTreeMap<WorkerKey, Process>,
    /// Told to every new session of the node's agent.
    pub ends: Vec<(NodeName, WorkerKey, ExitStatus)>,
    pub votes_in: BTreeMap<(Epoch, Step), BTreeSet<WorkerKey>>,
    pub pause_after: BTreeMap<Epoch, Step>,
    pub store: BTreeMap<JobName, JobRecord>,
    pub incidents: BTreeMap<u64, Incident>,
    pub checks: Checks,
    pub trace: Vec<String>,
    /// The daemon dies after so many commands of its next answer.
    pub crash_after: Option<usize>,
    /// Every worker finds other replicated parameters.
    pub lie_about_digests: bool,
    /// Bytes of memory that plans may count on.
    pub gpu_memory: Option<u64>,
}

/// Short, so that stories end soon.
pub const TIMEOUTS: Timeouts =
    Timeouts { operation_ms: 1_000, rejoin_hold_ms: 200, start_ms: 5_000, rebuild_ms: 1_000 };

pub fn job_name() -> JobName {
    JobName("demo".to_owned())
}

/// TP `tensor` x DP 2, 12 units in each family.
pub fn spec(tensor: u32, steps: u64) -> JobSpec {
    JobSpec {
        name: "demo".to_owned(),
        model: ModelSpec {
            kind: ModelKind::Decoder,
            layers: 1,
            hidden: 48,
            heads: 12,
            kv_heads: 12,
            head_dim: None,
            ffn: 96,
            ffn_block: 8,
            vocab: 240,
            vocab_block: 20,
            seq_len: 16,
            tie_embeddings: true,
            dtype: Dtype::F32,
        },
        parallel: ParallelSpec { data: 2, tensor, pipeline: 1, min_tensor: 1 },
        batch: BatchSpec { global: 8, micro: 1, policy: BatchPolicy::KeepGlobal },
        optimizer: OptimizerSpec {
            lr: 0.001,
            warmup_steps: 0,
            decay_steps: 0,
            min_lr: 0.0001,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.0,
            grad_clip: 1.0,
        },
        data: DataSpec { files: vec!["*.txt".to_owned()], tokenizer: "bytes".to_owned() },
        recovery: RecoverySpec::default(),
        checkpoint: CheckpointSpec::default(),
        run: RunSpec { steps, seed: 1 },
    }
}

pub fn node(index: u32) -> NodeName {
    NodeName(format!("node-{index}"))
}

pub fn gpu(node: u32, index: u32) -> GpuId {
    GpuId(format!("g{node}{index}"))
}

impl World {
    /// Two nodes with `tensor` GPUs each, and the job submitted.
    pub fn new(seed: u64, tensor: u32, steps: u64) -> Self {
        Self::with_spec(seed, spec(tensor, steps))
    }

    pub fn with_spec(seed: u64, spec: JobSpec) -> Self {
        let tensor = spec.parallel.tensor;
        let mut world = Self::cluster(seed, &[tensor, tensor], Topology::default());
        world.tell(Event::Submit { spec: Box::new(spec) });
        world
    }

    /// Agents without a job: a node for each number of GPUs.
    pub fn cluster(seed: u64, nodes: &[u32], topology: Topology) -> Self {
        let timeouts = TIMEOUTS;
        timeouts.validate().expect("the ladder");
        let mut world = Self {
            state: State::new(timeouts).with_topology(topology.clone()),
            topology,
            timeouts,
            now: Time(1_000_000),
            random: Random(seed),
            delay: 2 * MS,
            step_time: 50 * MS,
            queue: BTreeMap::new(),
            sequence: 0,
            sessions: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            agents: BTreeMap::new(),
            processes: BTreeMap::new(),
            ends: Vec::new(),
            votes_in: BTreeMap::new(),
            pause_after: BTreeMap::new(),
            store: BTreeMap::new(),
            incidents: BTreeMap::new(),
            checks: Checks::default(),
            trace: Vec::new(),
            crash_after: None,
            lie_about_digests: false,
            gpu_memory: None,
        };
        for (n, gpus) in (0..).zip(nodes) {
            let gpus = (0..*gpus).map(|index| GpuReport {
                gpu: gpu(n, index),
                index,
                name: "model".to_owned(),
                memory_bytes: 1 << 30,
                health: HealthClass::Healthy,
                cause: String::new(),
                action: String::new(),
                shards_readable: true,
            });
            world.agents.insert(node(n), gpus.collect());
            world.at(0, Happening::AgentConnects(node(n)));
        }
        world.at(100 * MS, Happening::Heartbeat);
        world.tell(Event::Started { jobs: Vec::new(), incidents: Vec::new() });
        world
    }

    pub fn view(&self) -> JobView {
        self.state.job(&job_name()).expect("the job")
    }

    pub fn at(&mut self, wait: u64, what: Happening) {
        self.sequence += 1;
        let key = (Time(self.now.0 + wait), self.sequence);
        self.queue.insert(key, what);
    }

    pub fn some_delay(&mut self) -> u64 {
        self.delay / 10 + self.random.below(self.delay)
    }

    /// Sends over a link, behind what was sent before. A link that is down swallows it.
    fn send(&mut self, link: Link, up: bool, make: impl FnOnce(Link, u64) -> Happening) {
        let Some(&session) = self.sessions.get(&link) else {
            return;
        };
        let earliest = Time(self.now.0 + self.some_delay());
        let key = (link.clone(), up);
        let last = self.arrivals.get(&key).copied().unwrap_or_default();
        let arrival = earliest.max(last);
        self.arrivals.insert(key, arrival);
        self.sequence += 1;
        let what = make(link, session);
        self.queue.insert((arrival, self.sequence), what);
    }

    pub fn report(&mut self, link: Link, event: Event) {
        self.send(link, true, |link, session| Happening::Report { link, session, event });
    }

    pub fn open(&mut self, link: Link) {
        self.sequence += 1;
        self.sessions.insert(link.clone(), self.sequence);
        self.arrivals.remove(&(link.clone(), true));
        self.arrivals.remove(&(link, false));
    }

    /// The engine takes the event in and its commands are carried out.
    pub fn tell(&mut self, event: Event) {
        self.checks.heard(&event);
        if std::env::var_os("TRACE").is_some() {
            println!("{:>8} -> {event:?}", self.now.0 / MS);
        }
        let mut commands = step(&mut self.state, self.now, event);
        let crash = self.crash_after.take();
        if let Some(count) = crash {
            commands.truncate(count);
        }
        for command in commands {
            self.trace.extend(trace::brief(&command));
            if std::env::var_os("TRACE").is_some() {
                println!("{:>8}    <- {:?}", self.now.0 / MS, trace::brief(&command));
            }
            self.checks.command(&command);
            self.carry_out(command);
        }
        if crash.is_some() {
            self.restart_daemon();
        }
        if let Some(next) = self.state.next_deadline() {
            let late = next <= self.now;
            assert!(!late, "a deadline that is over was not dealt with: {next:?}");
        }
    }

    fn carry_out(&mut self, command: Command) {
        let link = match &command {
            Command::Persist(record) => {
                self.store.insert(record.name.clone(), (**record).clone());
                return;
            }
            Command::PersistIncident(incident) => {
                self.incidents.insert(incident.id, (**incident).clone());
                return;
            }
            Command::Plan { job, epoch, spec, workers, topology, fresh } => {
                let mut topology = Topology::clone(topology);
                topology.gpu_memory = self.gpu_memory;
                let (topology, epoch, fresh) = (&topology, *epoch, *fresh);
                let result = plan(&PlanRequest { job: spec, topology, epoch, workers, fresh });
                let event = Event::Planned { job: job.clone(), epoch, result };
                let wait = self.some_delay();
                self.at(wait, Happening::Planned(event));
                return;
            }
            Command::Notify { .. } | Command::Announce(_) => return,
            Command::Spawn { node, .. } | Command::Fence { node, .. } => Link::Agent(node.clone()),
            Command::CloseEpoch { worker, .. }
            | Command::Pause { worker, .. }
            | Command::Prepare { worker, .. }
            | Command::Resume { worker, .. }
            | Command::Stop { worker, .. } => Link::Worker(worker.clone()),
        };
        self.send(link, false, |link, session| Happening::Order { link, session, order: command });
    }

    /// Lets the next thing happen; false when `until` comes first.
    pub fn next(&mut self, until: Time) -> bool {
        let queued = self.queue.keys().next().map(|(at, _)| *at);
        let deadline = self.state.next_deadline();
        let Some(at) = queued.into_iter().chain(deadline).min() else {
            return false;
        };
        if at > until {
            self.now = until;
            return false;
        }
        self.now = self.now.max(at);
        if deadline == Some(at) && queued != Some(at) {
            self.tell(Event::Tick);
        } else if let Some((_, what)) = self.queue.pop_first() {
            self.happen(what);
        }
        true
    }

    pub fn run_ms(&mut self, ms: u64) {
        let until = Time(self.now.0 + ms * MS);
        while self.next(until) {}
    }

    /// Runs until the condition holds.
    pub fn run_until(&mut self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let until = Time(self.now.0 + 60_000 * MS);
        while !condition(self) {
            assert!(self.next(until), "never: {what}; {:#?}", self.view());
        }
    }

    pub fn run_until_phase(&mut self, phase: Phase) {
        self.run_until(&format!("{phase:?}"), |world| world.view().phase == phase);
    }

    pub fn run_until_step(&mut self, step: u64) {
        self.run_until(&format!("step {step}"), |world| world.view().committed_step.0 >= step);
    }

    /// The live process on the GPU.
    pub fn on(&self, gpu: &GpuId) -> Option<WorkerKey> {
        self.processes.keys().rfind(|key| key.gpu == *gpu).cloned()
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Report { link, session, event } => {
                if self.sessions.get(&link) == Some(&session) {
                    self.tell(event);
                }
            }
            Happening::Order { link, session, order } => {
                if self.sessions.get(&link) == Some(&session) {
                    self.obey(link, order);
                }
            }
            Happening::Planned(event) => self.tell(event),
            Happening::AgentConnects(node) => self.agent_connects(node),
            Happening::WorkerConnects(key) => self.worker_connects(&key),
            Happening::ProcessStarts(key, node) => self.process_starts(key, node),
            Happening::ProcessEnds(key, exit) => self.process_ends(&key, exit),
            Happening::Prepared(key, epoch, step) => self.prepared(&key, epoch, step),
            Happening::Commits(key, epoch, step) => self.commits(&key, epoch, step),
            Happening::NoticesFailure(key, epoch) => self.notices_failure(&key, epoch),
            Happening::GetsReady(key, epoch) => self.gets_ready(&key, epoch),
            Happening::Heartbeat => self.heartbeat(),
        }
    }
}
