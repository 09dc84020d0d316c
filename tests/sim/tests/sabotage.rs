//! The checks bite: whatever is broken on purpose is found within a few seeds, by the invariant that is about it.

use reknit_control_sim::{Sabotage, Script, replay};

/// How many seeds may be needed.
const SEEDS: u64 = 300;

fn found(sabotage: Sabotage) -> String {
    let run = |seed| match std::panic::catch_unwind(|| replay(&Script::draw(seed), sabotage, false)) {
        Ok(outcome) => outcome.err(),
        Err(_) => Some("panic".to_owned()),
    };
    (0..SEEDS).find_map(run).expect("a broken invariant")
}

#[test]
fn a_daemon_that_does_not_store_is_found() {
    let broken = found(Sabotage::SkipPersist);
    assert!(broken.starts_with("ONE-EPOCH"), "{broken}");
}

#[test]
fn leaders_that_are_not_fenced_are_found() {
    let broken = found(Sabotage::NoFencing);
    assert!(broken.starts_with("ONE-EPOCH"), "{broken}");
}

#[test]
fn a_resume_before_all_are_ready_is_found() {
    let broken = found(Sabotage::ResumeEarly);
    assert!(broken.starts_with("ONE-EPOCH"), "{broken}");
}

#[test]
fn a_plan_from_what_nobody_holds_is_found() {
    let broken = found(Sabotage::StaleHoldings);
    assert!(broken.starts_with("NO-GUESS"), "{broken}");
}

#[test]
fn a_start_from_the_seed_after_a_commit_is_found() {
    let broken = found(Sabotage::ForgetCommits);
    assert!(broken.starts_with("NO-GUESS"), "{broken}");
}
