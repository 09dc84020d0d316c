//! The checks bite: whatever is broken on purpose is found at once, and within a few seeds by the invariant that is about
//! it.

use reknit_control_sim::{Sabotage, Script, replay};

/// How many seeds may be needed.
const SEEDS: u64 = 300;

fn is_found(sabotage: Sabotage, by: &str) {
    let run = |seed| match std::panic::catch_unwind(|| replay(&Script::draw(seed), sabotage, false)) {
        Ok(outcome) => outcome.err(),
        Err(_) => Some("panic".to_owned()),
    };
    let broken: Vec<_> = (0..SEEDS).filter_map(run).take(5).collect();
    assert!(broken.iter().any(|broken| broken.starts_with(by)), "{broken:#?}");
}

#[test]
fn a_daemon_that_does_not_store() {
    is_found(Sabotage::SkipPersist, "ONE-EPOCH");
}

#[test]
fn leaders_that_are_not_fenced() {
    is_found(Sabotage::NoFencing, "ONE-EPOCH");
}

#[test]
fn a_resume_before_all_are_ready() {
    is_found(Sabotage::ResumeEarly, "ONE-EPOCH");
}

#[test]
fn a_plan_from_what_nobody_holds() {
    is_found(Sabotage::StaleHoldings, "NO-GUESS");
}

#[test]
fn a_start_from_the_seed_after_a_commit() {
    is_found(Sabotage::ForgetCommits, "NO-GUESS");
}

#[test]
fn steps_that_are_run_again() {
    is_found(Sabotage::StepsBack, "SAMPLES");
}

#[test]
fn an_incident_that_blames_another_gpu() {
    is_found(Sabotage::BlameAnother, "ATTRIBUTED");
}

#[test]
fn a_worker_that_goes_on_with_garbage() {
    is_found(Sabotage::KeepGarbage, "NO-GUESS");
}

#[test]
fn a_worker_that_keeps_what_it_gave_away() {
    is_found(Sabotage::KeepAll, "COVER");
}

#[test]
fn a_worker_that_makes_room_before_the_commit() {
    is_found(Sabotage::DropEarly, "ONLY-COPY");
}

#[test]
fn a_worker_that_takes_a_step_alone() {
    is_found(Sabotage::RunAhead, "SAME-STEP");
}

#[test]
fn replicated_parameters_that_drift_apart() {
    is_found(Sabotage::LocalReplicated, "REPLICATED");
}

#[test]
fn a_random_stream_that_depends_on_the_layout() {
    is_found(Sabotage::StreamOfSlot, "RNG");
}
