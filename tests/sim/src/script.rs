//! What goes wrong, and when: drawn from a seed, or written down.

use crate::cluster::{Cluster, ENDLESS, spec};
use crate::random::Random;
use reknit_engine::HealthClass;
use reknit_layout::job::{CheckpointSpec, Reaction, Restore};
use reknit_layout::{JobSpec, Topology};

/// Milliseconds that no run lasts for: whoever is frozen or away for so long does not come back.
pub const NEVER: u64 = 1 << 40;

/// A run's whole story. The seed also draws every delay.
#[derive(Debug, Clone, PartialEq)]
pub struct Script {
    pub seed: u64,
    pub cluster: Cluster,
    /// In milliseconds from the start.
    pub faults: Vec<(u64, Fault)>,
}

/// Which direction of a link is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Both,
    There,
    Back,
}

/// Daemons, nodes, GPUs and jobs by number; durations in milliseconds, [`NEVER`] for what does not end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    KillWorker {
        gpu: usize,
    },
    /// From now on it computes for so long in each step.
    SlowWorker {
        gpu: usize,
        step_us: u64,
    },
    /// It wakes up and goes on, if nobody killed it.
    FreezeWorker {
        gpu: usize,
        ms: u64,
    },
    BreakWorkerSession {
        gpu: usize,
    },
    RestartAgent {
        node: usize,
        ms: u64,
    },
    FreezeAgent {
        node: usize,
        ms: u64,
    },
    BreakAgentSession {
        node: usize,
    },
    CrashNode {
        node: usize,
        ms: u64,
    },
    Health {
        gpu: usize,
        health: HealthClass,
    },
    /// With a new clock, which may be behind the old one.
    CrashDaemon {
        daemon: usize,
        ms: u64,
    },
    /// In the middle of its next orders.
    CrashLeader {
        after: usize,
        ms: u64,
    },
    /// Wakes with the rest of its next orders in hand and gives them without a look at its lease.
    FreezeLeader {
        after: usize,
        ms: u64,
    },
    FreezeDaemon {
        daemon: usize,
        ms: u64,
    },
    /// Its clock is ahead by so much more at once.
    JumpClock {
        daemon: usize,
        ms: u64,
    },
    CutStore {
        daemon: usize,
        way: Way,
        ms: u64,
    },
    CutAgent {
        node: usize,
        daemon: usize,
        way: Way,
        ms: u64,
    },
    CutWorker {
        gpu: usize,
        daemon: usize,
        way: Way,
        ms: u64,
    },
    CutPeers {
        gpu: usize,
        other: usize,
        way: Way,
        ms: u64,
    },
    StoreDown {
        ms: u64,
    },
    StoreSlow {
        ms: u64,
    },
    /// The next write of a leader is carried out, but its answer is lost.
    LoseAnswer,
    Drain {
        gpu: usize,
    },
    Restore {
        gpu: usize,
    },
    Rebalance {
        job: usize,
    },
    Stop {
        job: usize,
    },
    /// Submits it once more, if it has ended.
    Start {
        job: usize,
    },
}

impl Script {
    pub fn draw(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x1234_5678_9abc_def1));
        let mut cluster = Cluster::draw(&mut random);
        // Not by a draw, which would make other stories of all seeds.
        if seed % 3 == 2 {
            for CheckpointSpec { dir, every_steps, restore, .. } in cluster.checkpoints() {
                (*dir, *every_steps, *restore) = ("/checkpoints".to_owned(), 5, Restore::Act);
            }
        }
        let mut at = random.below(3_000);
        let gap = [30, 300, 1_500][random.below(3) as usize];
        let mut faults = Vec::new();
        for _ in 0..(2 + random.below(12)) {
            if random.below(24) == 0 {
                faults.extend(old_leader(&mut random, at, &cluster));
            }
            faults.push((at, fault(&mut random, &cluster)));
            // Now and then right behind the last one: inside its recovery.
            at += if random.below(3) == 0 { random.below(40) } else { random.below(gap) };
        }
        Self { seed, cluster, faults }
    }

    /// When the last fault strikes.
    pub(crate) fn end(&self) -> u64 {
        self.faults.iter().map(|(ms, _)| *ms).max().unwrap_or(0)
    }
}

impl std::fmt::Display for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Cluster { nodes, topology, jobs } = &self.cluster;
        writeln!(f, "seed {}, nodes {nodes:?}, domains {:?}", self.seed, topology.domains().len())?;
        for JobSpec { name, parallel, recovery, checkpoint, run, .. } in jobs {
            let every = checkpoint.every_steps;
            writeln!(
                f,
                "{name}: {parallel:?}, {recovery:?}, checkpoints every {every}, {} steps",
                run.steps
            )?;
        }
        self.faults.iter().try_for_each(|fault| writeln!(f, "{fault:?},"))
    }
}

impl Cluster {
    fn checkpoints(&mut self) -> impl Iterator<Item = &mut CheckpointSpec> {
        self.jobs.iter_mut().map(|job| &mut job.checkpoint)
    }

    fn draw(random: &mut Random) -> Self {
        let tensor = if random.below(3) == 0 { 2 } else { 4 };
        let mut cluster = Self::pair(tensor);
        match random.below(20) {
            // A free GPU next to one group, or a whole node.
            0..=2 => {
                cluster.nodes[random.below(2) as usize] += 1;
                cluster.jobs[0].recovery.spares = 1;
            }
            3 => {
                cluster.nodes.push(tensor);
                cluster.jobs[0].recovery.spares = tensor;
            }
            4 => cluster = Self::rack(),
            // Room for both jobs, or for one after the other.
            5..=7 => cluster.jobs = vec![spec("demo", 2, ENDLESS), spec("other", 2, ENDLESS)],
            8 | 9 => {
                let last = 20 + random.below(100);
                cluster = Self::pair(2);
                cluster.jobs = vec![spec("demo", 2, last), spec("other", 2, ENDLESS)];
            }
            10 | 11 => cluster.jobs[0].run.steps = 20 + random.below(100),
            12 | 13 => cluster.jobs[0].recovery.on_hang = Reaction::Report,
            14 => cluster.jobs[0].recovery.on_straggler = Reaction::Act,
            _ => {}
        }
        if cluster.jobs.len() == 2 && cluster.nodes == [2, 2] && cluster.jobs[0].run.steps == ENDLESS {
            cluster.nodes = vec![4, 4];
        }
        cluster
    }

    /// Two nodes share a domain in which a spare is.
    fn rack() -> Self {
        let described = "[[domain]]\nname = \"rack\"\nnodes = [{ name = \"node-1\", gpus = 1 }, { name = \"node-2\", gpus = 3 }]";
        let mut job = spec("demo", 2, ENDLESS);
        job.recovery.spares = 1;
        let topology = Topology::parse(described, "topology").unwrap_or_default();
        Self { nodes: vec![1, 1, 4], topology, jobs: vec![job] }
    }
}

/// The leader sleeps until another one has been met, whose sessions then break: peers dial the one that they knew
/// before, which wakes up and takes them in.
fn old_leader(random: &mut Random, at: u64, cluster: &Cluster) -> Vec<(u64, Fault)> {
    let ms = 2_000 + random.below(1_500);
    let mut faults = vec![(at, Fault::FreezeLeader { after: 0, ms })];
    let breaks = at + ms - 100 - random.below(600);
    faults.extend((0..cluster.gpus()).map(|gpu| (breaks, Fault::BreakWorkerSession { gpu })));
    faults.extend((0..cluster.nodes.len()).map(|node| (breaks, Fault::BreakAgentSession { node })));
    faults
}

fn fault(random: &mut Random, cluster: &Cluster) -> Fault {
    let mut below = |limit: usize| random.below(limit as u64) as usize;
    let gpus = cluster.gpus();
    let (gpu, other, node) = (below(gpus), below(gpus), below(cluster.nodes.len()));
    let (daemon, after, job) = (below(3), below(12), below(cluster.jobs.len()));
    let way = [Way::Both, Way::There, Way::Back][below(3)];
    let longest = [200, 1_200, 4_000][below(3)];
    let ms = 1 + below(longest) as u64;
    let rarely = if below(8) == 0 { NEVER } else { ms };
    let step_us = [20_000, 36_000, 80_000][below(3)];
    let health = [
        HealthClass::Fatal,
        HealthClass::Fatal,
        HealthClass::Drain,
        HealthClass::RankDied,
        HealthClass::Unknown,
        HealthClass::Predict,
        HealthClass::Healthy,
        HealthClass::Healthy,
    ][below(8)];
    match below(108) {
        0..=13 => Fault::KillWorker { gpu },
        14..=20 => Fault::FreezeWorker { gpu, ms: rarely },
        21..=23 => Fault::BreakWorkerSession { gpu },
        24..=27 => Fault::RestartAgent { node, ms },
        28..=30 => Fault::FreezeAgent { node, ms: rarely },
        31..=32 => Fault::BreakAgentSession { node },
        33..=34 => Fault::CrashNode { node, ms: rarely },
        35..=43 => Fault::Health { gpu, health },
        44..=49 => Fault::CrashDaemon { daemon, ms },
        50..=56 => Fault::CrashLeader { after, ms },
        57..=62 => Fault::FreezeLeader { after, ms },
        63..=65 => Fault::FreezeDaemon { daemon, ms },
        66..=69 => Fault::CutStore { daemon, way, ms },
        70..=72 => Fault::CutAgent { node, daemon, way, ms },
        73..=76 => Fault::CutWorker { gpu, daemon, way, ms },
        77..=81 => Fault::CutPeers { gpu, other, way, ms },
        82..=83 => Fault::StoreDown { ms },
        84..=86 => Fault::StoreSlow { ms },
        87..=89 => Fault::LoseAnswer,
        90..=93 => Fault::Drain { gpu },
        94..=97 => Fault::Restore { gpu },
        98..=99 => Fault::Rebalance { job },
        100..=101 => Fault::SlowWorker { gpu, step_us },
        102..=103 => Fault::JumpClock { daemon, ms: 5 * ms },
        104..=105 => Fault::Start { job },
        106 => Fault::Stop { job },
        _ => Fault::Restore { gpu },
    }
}
