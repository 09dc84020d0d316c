//! A fixed share of the simulator's runs; `make soak SEEDS=n START=k` runs as many as asked.

use reknit_control_sim::{Ending, Sabotage, Script, Statistics, replay};
use std::collections::BTreeMap;

const SEEDS: u64 = 1_500;

/// Every kind of fault.
const FAULTS: [&str; 36] = [
    "GPU's health changed",
    "agent cut from daemon",
    "agent frozen",
    "agent frozen for ever",
    "agent restarted",
    "agent's session broken",
    "answer of a write lost",
    "connection slow",
    "daemon crashed",
    "daemon cut from store",
    "drain asked for",
    "job submitted again",
    "leader crashed amid its orders",
    "leader frozen",
    "leader frozen amid its orders",
    "leader's clock jumped",
    "node crashed",
    "node lost for ever",
    "rebalance asked for",
    "restore asked for",
    "stop asked for",
    "store gone",
    "store slow",
    "worker cut from daemon",
    "worker frozen",
    "worker frozen for ever",
    "worker killed",
    "worker's pace changed",
    "worker's session broken",
    "workers cut from each other",
    // What follows from them.
    "a late hello of a dead connection was refused",
    "a second agent of a node was refused",
    "a spare took a place",
    "a write of an old leader was refused",
    "an old leader was left by a peer",
    "a worker rolled forward a step",
];

const ENDINGS: [Ending; 6] = [
    Ending::Training,
    Ending::TrainingReduced,
    Ending::Waiting,
    Ending::Pending,
    Ending::Stopped,
    Ending::Completed,
];

#[test]
fn the_invariants_hold_and_every_job_trains_again() {
    let mut sum = Statistics::default();
    let mut endings: BTreeMap<Ending, u64> = BTreeMap::new();
    for seed in 0..SEEDS {
        match replay(&Script::draw(seed), Sabotage::None, false) {
            Ok(outcome) => {
                outcome.endings.iter().for_each(|ending| *endings.entry(*ending).or_default() += 1);
                sum.add(&outcome.statistics);
            }
            Err(broken) => panic!("{broken}\nreplay: make soak SEEDS=1 START={seed} TRACE=1"),
        }
    }
    let happened = |what: &&str| sum.faults.contains_key(what) || sum.deeds.contains_key(what);
    let never: Vec<_> = FAULTS.iter().filter(|what| !happened(what)).collect();
    assert!(never.is_empty(), "these never happened: {never:?}");
    let unknown: Vec<_> = sum.faults.keys().filter(|what| !FAULTS.contains(what)).collect();
    assert!(unknown.is_empty(), "not asked for above: {unknown:?}");
    assert!(ENDINGS.iter().all(|ending| endings.contains_key(ending)), "{endings:?}");
    assert!(endings[&Ending::Training] > SEEDS * 3 / 4, "{endings:?}");
}

#[test]
fn a_script_always_tells_the_same_story() {
    let told = || replay(&Script::draw(7), Sabotage::None, false).map(|outcome| outcome.statistics.events);
    let first = told().expect("a good end");
    assert_eq!(told(), Ok(first));
}
