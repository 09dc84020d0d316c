//! A fixed share of the simulator's runs; `make soak SEEDS=n START=k` runs as many as asked.

use reknit_control_sim::{Ending, Sabotage, Script, Statistics, replay};

const SEEDS: u64 = 600;

#[test]
fn the_invariants_hold_and_the_job_trains_again() {
    let mut sum = Statistics::default();
    let mut trained = 0;
    for seed in 0..SEEDS {
        match replay(&Script::draw(seed), Sabotage::None, false) {
            Ok(outcome) => {
                trained += u64::from(outcome.ending == Ending::Training);
                sum.add(&outcome.statistics);
            }
            Err(broken) => panic!("{broken}\nreplay: make soak SEEDS=1 START={seed} TRACE=1"),
        }
    }
    assert!(trained > SEEDS * 3 / 4, "only {trained} of {SEEDS} trained on");
    assert!(sum.takeovers > SEEDS / 3, "{sum:?}");
    assert!(sum.refused_writes > 0 && sum.rolled_forward > 0, "{sum:?}");
    assert!(sum.faults.len() >= 20 && sum.faults.values().all(|count| *count > 0), "{sum:?}");
}

#[test]
fn a_script_always_tells_the_same_story() {
    let told = || replay(&Script::draw(7), Sabotage::None, false).map(|outcome| outcome.statistics.events);
    let first = told().expect("a good end");
    assert_eq!(told(), Ok(first));
}
