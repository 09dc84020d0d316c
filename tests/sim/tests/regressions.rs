//! Stories in which something was wrong once.

use reknit_control_sim::Fault::*;
use reknit_control_sim::{Cluster, Ending, Fault, Sabotage, Script, Way, replay};
use reknit_engine::HealthClass;

fn end(seed: u64, cluster: Cluster, faults: &[(u64, Fault)]) -> Vec<Ending> {
    let script = Script { seed, cluster, faults: faults.to_vec() };
    let outcome = replay(&script, Sabotage::None, false).unwrap_or_else(|broken| panic!("{broken}"));
    outcome.endings
}

fn trains_again(seed: u64, tensor: u32, faults: &[(u64, Fault)]) {
    assert_eq!(end(seed, Cluster::pair(tensor), faults), [Ending::Training]);
}

/// The daemon that took over had a clock behind the one that began the record: an incident was quiesced before it was
/// detected.
#[test]
fn an_incident_outlives_a_daemon_whose_clock_was_ahead() {
    let faults = [
        (1032, CrashNode { node: 1, ms: 678 }),
        (1059, FreezeLeader { after: 1, ms: 21 }),
        (1075, Rebalance { job: 0 }),
        (1103, CutAgent { node: 0, daemon: 1, way: Way::Both, ms: 158 }),
        (1114, RestartAgent { node: 1, ms: 24 }),
        (1114, KillWorker { gpu: 5 }),
        (1143, CrashLeader { after: 4, ms: 1195 }),
        (1162, Drain { gpu: 5 }),
        (1183, Health { gpu: 2, health: HealthClass::Drain }),
        (1211, Restore { gpu: 3 }),
        (1233, StoreDown { ms: 55 }),
    ];
    end(29, Cluster::pair(4), &faults);
}

/// Its agent came back and told of the end a second time. That was taken for a new fault, whose record never ended, and
/// no GPU could rejoin any more.
#[test]
fn a_drained_worker_left_while_its_agent_was_away() {
    let faults = [
        (1103, CrashLeader { after: 5, ms: 1142 }),
        (1127, FreezeLeader { after: 11, ms: 383 }),
        (1131, Drain { gpu: 0 }),
        (1131, KillWorker { gpu: 4 }),
        (1150, BreakAgentSession { node: 0 }),
    ];
    trains_again(843, 4, &faults);
}

/// The new leader heard a worker only after it had given everyone up. What the worker held was the last copy, and its
/// answer, which came while a plan was made without it, was not listened to.
#[test]
fn the_last_copy_is_heard_of_while_a_plan_is_made_without_it() {
    let faults = [
        (2488, CutPeers { gpu: 3, other: 4, way: Way::Back, ms: 505 }),
        (2488, Health { gpu: 0, health: HealthClass::Unknown }),
        (2513, StoreSlow { ms: 2309 }),
        (2537, CutStore { daemon: 0, way: Way::There, ms: 835 }),
        (2560, KillWorker { gpu: 4 }),
        (2586, CutAgent { node: 1, daemon: 0, way: Way::Back, ms: 1188 }),
        (2586, CutAgent { node: 0, daemon: 2, way: Way::Back, ms: 2679 }),
        (2590, CutPeers { gpu: 2, other: 5, way: Way::Back, ms: 1154 }),
        (2601, FreezeLeader { after: 7, ms: 3181 }),
        (2604, StoreSlow { ms: 771 }),
    ];
    trains_again(81008, 4, &faults);
}

/// A daemon that woke up let a deadline pass before it heard an answer that had come by then; of members that waited for
/// another, one whose operation had run out was taken for who held them up; a hang that was told was never over, since the
/// job had gone back to a checkpoint meanwhile.
#[test]
fn drawn_stories() {
    for seed in [4_140, 7_454, 201_431] {
        let outcome = replay(&Script::draw(seed), Sabotage::None, false);
        assert!(outcome.is_ok(), "seed {seed}: {outcome:?}");
    }
}
