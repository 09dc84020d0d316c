//! Quiet worlds, in which only what a story tells befalls the cluster. Its job is called "demo".

use crate::agent::killed;
use crate::cluster::{Cluster, ENDLESS, Who, node_name, node_number, spec};
use crate::daemon::{Daemon, Input, Interrupt};
use crate::net::{MS, Peer, Site};
use crate::script::NEVER;
use crate::store::Lease;
use crate::world::{What, World};
use reknit_engine::*;
use reknit_layout::{Epoch, GpuId, JobSpec, NodeName, Topology, WorkerKey};

pub fn job_name() -> JobName {
    JobName("demo".to_owned())
}

/// A job that has trained a few steps.
pub fn running(tensor: u32) -> World {
    running_from(7, tensor)
}

pub fn running_from(seed: u64, tensor: u32) -> World {
    let mut world = World::with_spec(seed, spec("demo", tensor, ENDLESS));
    world.run_until_step(3);
    world.told.clear();
    world
}

/// The one incident that is a fault.
pub fn fault(world: &World) -> Incident {
    let mut faults = world.incidents().into_iter().filter(|found| found.kind != IncidentKind::Planned);
    let first = faults.next().expect("an incident");
    assert!(faults.next().is_none(), "{:#?}", world.incidents());
    first
}

impl World {
    /// A daemon and agents, without a job: a node for each number of GPUs.
    pub fn story(seed: u64, nodes: &[u32], topology: Topology) -> Self {
        let cluster = Cluster { nodes: nodes.to_vec(), topology, jobs: Vec::new() };
        let mut world = Self::empty(seed, cluster, 1);
        world.quiet = true;
        world.trace = std::env::var_os("TRACE").is_some();
        world.daemons[0] = Daemon { up: true, ..Daemon::default() };
        world.takes_over();
        for node in 0..nodes.len() {
            world.agent_boots(node);
        }
        world
    }

    /// Two nodes with `tensor` GPUs each, and the job submitted.
    pub fn with_spec(seed: u64, spec: JobSpec) -> Self {
        let tensor = spec.parallel.tensor;
        let mut world = Self::story(seed, &[tensor, tensor], Topology::default());
        world.tell(Event::Submit { spec: Box::new(spec) });
        world
    }

    pub fn state(&self) -> &State {
        let leading = self.daemons[0].leading.as_ref();
        &leading.expect("a story's daemon leads").state
    }

    pub fn now(&self) -> Time {
        self.now
    }

    pub fn view(&self) -> JobView {
        self.state().job(&job_name()).expect("the job")
    }

    pub fn degrees(&self) -> Vec<u32> {
        self.view().layout.map(|layout| layout.degrees()).unwrap_or_default()
    }

    pub fn incidents(&self) -> Vec<Incident> {
        self.state().incidents(&job_name())
    }

    pub fn stored(&self) -> &JobRecord {
        &self.store.jobs[&job_name()]
    }

    pub fn stored_incident(&self, id: u64) -> &Incident {
        &self.store.incidents[&(job_name(), id)]
    }

    pub fn rolled_forward(&self) -> u64 {
        self.statistics.deeds.get("a worker rolled forward a step").copied().unwrap_or_default()
    }

    pub fn worker(&self, gpu: &GpuId) -> &crate::Worker {
        &self.workers[&self.on(gpu).expect("a process")]
    }

    /// The engine takes the event in, and its commands are carried out. Whoever it is about may be blamed.
    pub fn tell(&mut self, event: Event) {
        self.gpus.clone().iter().for_each(|gpu| self.harms_gpu(gpu));
        self.puts(0, Input::Told(event));
        self.pump(0);
        self.check();
        self.holds();
    }

    fn holds(&self) {
        assert_eq!(self.violation, None);
    }

    pub fn run_until_now(&mut self, until: Time) {
        self.run_until_time(until);
        self.holds();
    }

    pub fn run_ms(&mut self, ms: u64) {
        self.run_until_now(Time(self.now.0 + ms * MS));
    }

    pub fn run_until(&mut self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let until = Time(self.now.0 + 60_000 * MS);
        while !condition(self) {
            assert!(self.next(until), "never: {what}; {:#?}", self.view());
            self.holds();
        }
    }

    pub fn run_until_phase(&mut self, phase: Phase) {
        self.run_until(&format!("{phase:?}"), |world| world.view().phase == phase);
    }

    pub fn run_until_step(&mut self, step: u64) {
        self.run_until(&format!("step {step}"), |world| world.view().committed_step.0 >= step);
    }

    /// And two steps more.
    pub fn run_until_degrees(&mut self, wanted: &[u32]) {
        self.run_until(&format!("{wanted:?}"), |world| {
            world.view().phase == Phase::Running && world.degrees() == wanted
        });
        let step = self.view().committed_step.0;
        self.run_until_step(step + 2);
    }

    pub fn ends(&mut self, who: &Who, exit: ExitStatus) {
        self.harms_gpu(&who.key.gpu);
        self.process_ends(who, exit);
    }

    pub fn kill(&mut self, gpu: &GpuId) {
        let who = self.on(gpu).expect("a process to kill");
        self.ends(&who, killed());
    }

    /// Its sockets stay open.
    pub fn freeze(&mut self, gpu: &GpuId) {
        self.harms_gpu(gpu);
        let who = self.on(gpu).expect("a process to freeze");
        let frozen = Time(self.now.0 + NEVER * MS);
        self.workers.get_mut(&who).expect("it").frozen_until = frozen;
    }

    /// It goes on where it was.
    pub fn thaw(&mut self, gpu: &GpuId) {
        let who = self.on(gpu).expect("a process to thaw");
        self.workers.get_mut(&who).expect("it").frozen_until = Time(0);
        self.wakes_all();
    }

    /// From now on it computes for so long in each step.
    pub fn slow(&mut self, gpu: &GpuId, step_us: u64) {
        self.harms_gpu(gpu);
        let who = self.on(gpu).expect("a process to slow down");
        self.workers.get_mut(&who).expect("it").step_us = step_us;
    }

    /// The agent sees a GPU's class change.
    pub fn health(&mut self, gpu: &GpuId, health: HealthClass, cause: &str) {
        self.health_with(gpu, health, cause, health == HealthClass::Drain);
    }

    pub fn health_with(&mut self, gpu: &GpuId, health: HealthClass, cause: &str, shards_readable: bool) {
        self.harms_gpu(gpu);
        self.diagnoses(gpu, health, cause, shards_readable);
    }

    /// The agent sees it, and says so no sooner than in its next hello.
    pub fn health_unheard(&mut self, gpu: &GpuId, health: HealthClass, cause: &str) {
        self.harms_gpu(gpu);
        self.finds(gpu, health, cause, health == HealthClass::Drain);
    }

    /// The agent's list of GPUs changes, and a class with it.
    pub fn list_with(&mut self, gpu: &GpuId, health: HealthClass, cause: &str) {
        self.harms_gpu(gpu);
        let Some((node, _)) = self.finds(gpu, health, cause, true) else { return };
        let gpus = self.agents[node].gpus.clone();
        self.says(&Peer::Agent(node), Event::GpusListed { node: node_name(node), gpus });
    }

    /// A worker reads from its socket that a peer is gone.
    pub fn plane_fails_at(&mut self, gpu: &GpuId, epoch: Epoch, wait_ms: u64) {
        self.harms_gpu(gpu);
        let who = self.on(gpu).expect("a process");
        self.at(wait_ms * MS, What::NoticesFailure(who.clone(), epoch, who));
    }

    /// Its session ends, and it opens another one after `ms`.
    pub fn flap_worker(&mut self, who: &Who, ms: u64) {
        self.harms_gpu(&who.key.gpu);
        self.flap(Peer::Worker(who.clone()), ms);
    }

    pub fn flap_agent(&mut self, node: &NodeName, ms: u64) {
        self.harms_node(node);
        self.flap(Peer::Agent(node_number(node)), ms);
    }

    fn flap(&mut self, peer: Peer, ms: u64) {
        let link = match &peer {
            Peer::Agent(node) => Some(&mut self.agents[*node].link),
            Peer::Worker(who) => self.workers.get_mut(who).map(|worker| &mut worker.link),
        };
        if let Some(id) = link.and_then(|link| link.session.take()) {
            self.client_leaves(id);
        }
        self.at(ms * MS, What::Dials(peer));
    }

    /// All that runs on the node is gone, without a word. The agent comes back after `ms`.
    pub fn loses_power(&mut self, node: &NodeName, ms: u64) {
        self.harms_node(node);
        self.power_fails(node_number(node), ms);
    }

    /// It looks for the daemon at once.
    pub fn dials_now(&mut self, node: &NodeName) {
        self.flap(Peer::Agent(node_number(node)), 0);
    }

    /// The daemon's process is replaced: it knows what was stored, and everyone connects again.
    pub fn restart_daemon(&mut self) {
        self.ends_leading(0);
        self.takes_over();
    }

    /// Nobody reaches the new one for `ms`.
    pub fn restart_daemon_unheard_for(&mut self, ms: u64) {
        let workers = self.workers.keys().map(|who| self.site(who));
        let agents = (0..self.agents.len()).map(Site::Agent);
        let until = Time(self.now.0 + ms * MS);
        let cuts: Vec<_> = workers.chain(agents).map(|site| ((site, Site::Daemon(0)), until)).collect();
        self.cuts.extend(cuts);
        let gpus = self.gpus.clone();
        gpus.iter().for_each(|gpu| self.harms_gpu(gpu));
        self.restart_daemon();
    }

    /// Nothing that the worker says reaches the daemon for `ms`.
    pub fn mute_worker(&mut self, who: &Who, ms: u64) {
        self.harms_gpu(&who.key.gpu);
        self.cuts.insert((self.site(who), Site::Daemon(0)), Time(self.now.0 + ms * MS));
    }

    /// The daemon dies after so many more commands.
    pub fn crash_after(&mut self, commands: usize) {
        self.daemons[0].interrupt = Some(Interrupt::Crash { after: commands, ms: 0 });
    }

    /// A leadership that nobody ends.
    fn takes_over(&mut self) {
        self.store.revision += 1;
        let (term, until) = (self.store.revision, Time(self.now.0 + NEVER * MS));
        self.store.leader = Some(Lease { daemon: 0, term, until });
        self.starts_leading(0, term, until);
    }

    fn harms_gpu(&mut self, gpu: &GpuId) {
        let gpu = self.gpu_number(gpu);
        self.harms(&crate::Fault::KillWorker { gpu });
    }

    fn harms_node(&mut self, node: &NodeName) {
        let node = node_number(node);
        self.harms(&crate::Fault::FreezeAgent { node, ms: NEVER });
    }

    /// Of the story's job.
    pub fn keys(&self) -> Vec<WorkerKey> {
        self.workers.keys().map(|who| who.key.clone()).collect()
    }
}
