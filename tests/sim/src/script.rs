//! What goes wrong, and when: drawn from a seed, or written down.

use crate::random::Random;
use reknit_engine::HealthClass;

/// A run's whole story. The seed also draws every delay.
#[derive(Debug, Clone, PartialEq)]
pub struct Script {
    pub seed: u64,
    /// Slots of a tensor group: there are two groups, each on a node of its own.
    pub tensor: u32,
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

/// Daemons, nodes and GPUs by number; durations in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    KillWorker {
        gpu: usize,
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
    Rebalance,
    Stop,
}

impl Script {
    pub fn draw(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x1234_5678_9abc_def1));
        let tensor = if random.below(3) == 0 { 2 } else { 4 };
        let mut at = random.below(3_000);
        let gap = [30, 300, 1_500][random.below(3) as usize];
        let mut faults = Vec::new();
        for _ in 0..(2 + random.below(12)) {
            faults.push((at, fault(&mut random, 2 * tensor as usize)));
            // Now and then right behind the last one: inside its recovery.
            at += if random.below(3) == 0 { random.below(40) } else { random.below(gap) };
        }
        Self { seed, tensor, faults }
    }
}

fn fault(random: &mut Random, gpus: usize) -> Fault {
    let mut below = |limit: usize| random.below(limit as u64) as usize;
    let (gpu, other, node, daemon, after) = (below(gpus), below(gpus), below(2), below(3), below(12));
    let way = [Way::Both, Way::There, Way::Back][below(3)];
    let longest = [200, 1_200, 4_000][below(3)];
    let ms = 1 + below(longest) as u64;
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
    match below(100) {
        0..=13 => Fault::KillWorker { gpu },
        14..=19 => Fault::FreezeWorker { gpu, ms },
        20..=23 => Fault::BreakWorkerSession { gpu },
        24..=27 => Fault::RestartAgent { node, ms },
        28..=30 => Fault::FreezeAgent { node, ms },
        31..=32 => Fault::BreakAgentSession { node },
        33..=34 => Fault::CrashNode { node, ms },
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
        94..=96 => Fault::Restore { gpu },
        97..=98 => Fault::Rebalance,
        _ => {
            if below(4) == 0 {
                Fault::Stop
            } else {
                Fault::Restore { gpu }
            }
        }
    }
}
