//! A rank is lost at an exact point of a step, the group goes on unevenly, the rank comes back: nothing is lost.

#![allow(clippy::unwrap_used)] // A failed set-up fails the test.

mod crew;

use crew::fault::{Fault, How};
use crew::{Crew, job, refused};
use reknit_layout::Place;
use reknit_model::Real;
use reknit_plane::Element;

const LOST: Place = Place::new(1, 0, 2);

fn in_forward(at: u64) -> Fault {
    Fault { group: "tensor", at, how: How::Die }
}

/// Steps `1..=steps`; `lost` dies in the middle of step `dies`, and is back after step `back`.
fn with_fault<T: Real + Element>(
    data: u32,
    tensor: u32,
    dtype: &str,
    lost: Place,
    [dies, back, steps]: [u64; 3],
) -> Crew<T> {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<T>::start(job(dir.path(), dtype, data, tensor, steps));
    assert!(crew.train_to(dies - 1));
    crew.arm(lost, in_forward(9));
    assert!(!crew.train_to(steps), "the fault must stop the epoch");
    crew.bury(lost);
    assert_eq!(crew.committed.0, dies - 1, "a step without all its gradients is never committed");
    let plan = crew.reform(false).unwrap();
    assert_eq!(plan.bytes_moved, plan.bytes_lower_bound);
    assert!(crew.train_to(back));
    crew.hire(lost);
    crew.reform(false).unwrap();
    assert!(crew.train_to(steps));
    crew.check_samples();
    crew
}

fn undisturbed<T: Real + Element>(data: u32, tensor: u32, dtype: &str, steps: u64) -> Crew<T> {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<T>::start(job(dir.path(), dtype, data, tensor, steps));
    assert!(crew.train_to(steps));
    crew.check_samples();
    crew
}

fn worst(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / b.abs()).fold(0.0, f64::max)
}

#[test]
fn f64_losses_equal_those_of_an_undisturbed_run_at_4_and_3() {
    let faulty = with_fault::<f64>(2, 4, "f64", LOST, [6, 12, 20]);
    assert_eq!(faulty.degrees, [[4, 4], [4, 3], [4, 4]]);
    let clean = undisturbed::<f64>(2, 4, "f64", 20);
    assert!(faulty.losses[19] < faulty.losses[0], "it must learn");
    let worst = worst(&faulty.losses, &clean.losses);
    println!("TP4+TP3, f64, 20 steps: worst relative difference of the loss {worst:e}");
    assert!(worst <= 1e-10, "{worst:e}");
}

#[test]
fn f64_losses_equal_those_of_an_undisturbed_run_at_2_and_1() {
    let faulty = with_fault::<f64>(2, 2, "f64", Place::new(0, 0, 0), [4, 9, 16]);
    assert_eq!(faulty.degrees, [[2, 2], [1, 2], [2, 2]]);
    let clean = undisturbed::<f64>(2, 2, "f64", 16);
    let worst = worst(&faulty.losses, &clean.losses);
    println!("TP2+TP1, f64, 16 steps: worst relative difference of the loss {worst:e}");
    assert!(worst <= 1e-10, "{worst:e}");
}

#[test]
fn f32_replicas_stay_bit_equal_over_100_steps_with_faults_and_runs_repeat_bit_by_bit() {
    let run = || {
        let dir = tempfile::tempdir().unwrap();
        let mut crew = Crew::<f32>::start(job(dir.path(), "f32", 2, 4, 100));
        let faults = [(10, LOST, 20), (35, Place::new(0, 0, 0), 50), (70, Place::new(1, 0, 3), 80)];
        for (dies, lost, back) in faults {
            assert!(crew.train_to(dies));
            crew.arm(lost, in_forward(13));
            assert!(!crew.train_to(100));
            crew.bury(lost);
            crew.reform(false).unwrap();
            crew.digest();
            assert!(crew.train_to(back));
            crew.hire(lost);
            crew.reform(false).unwrap();
        }
        assert!(crew.train_to(100));
        crew.check_samples();
        (crew.digest(), crew.losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>(), crew.losses)
    };
    let (first, second) = (run(), run());
    assert_eq!(first.0, second.0, "the same faults at the same points give the same bits");
    assert_eq!(first.1, second.1);

    let clean = undisturbed::<f32>(2, 4, "f32", 100);
    let worst = worst(&first.2, &clean.losses);
    println!("three faults, f32, 100 steps: worst relative difference of the loss {worst:e}");
    assert!(worst <= 1e-4, "{worst:e}");
}

#[test]
fn a_death_between_gradients_and_vote_discards_the_step_for_all() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 4, 8));
    assert!(crew.train_to(3));
    crew.arm(LOST, Fault { group: "world", at: 0, how: How::Die });
    assert!(!crew.train_to(8));
    crew.bury(LOST);
    assert_eq!(crew.committed.0, 3);
    crew.reform(false).unwrap();
    assert_eq!(crew.rolled_forward, 0);
    assert!(crew.train_to(8));
    crew.check_samples();
    let clean = undisturbed::<f64>(2, 4, "f64", 8);
    assert!(worst(&crew.losses, &clean.losses) <= 1e-10);
}

#[test]
fn who_missed_the_answer_of_a_vote_that_others_saw_rolls_forward() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 4, 8));
    assert!(crew.train_to(3));
    crew.arm(LOST, Fault { group: "world", at: 0, how: How::LoseAnswer });
    assert!(!crew.train_to(8));
    assert_eq!(crew.committed.0, 4, "the others committed step 4");
    assert_eq!(crew.seat(LOST).rank.committed().0, 3);
    let plan = crew.reform(false).unwrap();
    assert_eq!(crew.rolled_forward, 1);
    assert!(plan.transfers.is_empty(), "everyone still holds what it owns");
    assert!(crew.train_to(8));
    crew.check_samples();
    crew.digest();
    let clean = undisturbed::<f64>(2, 4, "f64", 8);
    assert_eq!(crew.losses, clean.losses, "the same layout throughout: the same bits");
}

#[test]
fn a_second_death_during_the_reshard_leaves_the_old_state_whole() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 4, 12));
    let second = Place::new(1, 0, 0);
    assert!(crew.train_to(4));
    crew.arm(LOST, in_forward(5));
    assert!(!crew.train_to(12));
    crew.bury(LOST);
    crew.arm(second, Fault { group: "reshard", at: 0, how: How::Die });
    refused(crew.reform(false));
    crew.bury(second);
    crew.reform(false).unwrap();
    assert_eq!(crew.degrees, [[4, 4], [4, 2]]);
    crew.digest();
    assert!(crew.train_to(8));
    crew.hire(second);
    crew.hire(LOST);
    crew.reform(false).unwrap();
    assert!(crew.train_to(12));
    crew.check_samples();
    let clean = undisturbed::<f64>(2, 4, "f64", 12);
    assert!(worst(&crew.losses, &clean.losses) <= 1e-10);
}

#[test]
fn units_that_lost_both_holders_are_named_and_nothing_is_guessed() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 4, 8));
    assert!(crew.train_to(2));
    let twin = Place::new(0, 0, 2);
    crew.arm(LOST, in_forward(3));
    crew.arm(twin, in_forward(3));
    assert!(!crew.train_to(8));
    crew.bury(LOST);
    crew.bury(twin);
    let why = refused(crew.reform(false));
    assert!(why.contains("attn/0 units 6-8"), "{why}");
    assert_eq!(crew.committed.0, 2);
}
