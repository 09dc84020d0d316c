//! Gradients leave for the sum while the backward pass runs: the same bits, and nothing lost when it breaks off.

use crate::crew::{Crew, Seat, TIMEOUTS, job};
use crate::fault::{Fault, How};
use reknit_layout::{Place, Step};
use reknit_worker::messages::Phase;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const LOST: Place = Place::new(1, 0, 2);
/// The whole group of four beside one of three.
fn four_and_three(dir: &std::path::Path, steps: u64) -> Crew<f64> {
    let mut crew = Crew::<f64>::start(job(dir, "f64", 2, 4, steps));
    crew.dismiss(LOST);
    crew.reform(false).unwrap();
    assert_eq!(crew.degrees, [[4, 4], [4, 3]]);
    crew
}

fn forget_operations(crew: &Crew<f64>) {
    crew.seats.iter().for_each(|seat| seat.trigger.log.lock().unwrap().clear());
}

#[test]
fn a_death_at_any_stage_of_the_sum_discards_the_step_for_all() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = four_and_three(dir.path(), 40);
    let mut broken = 0;
    for group in ["handover", "column", "giveback"] {
        for parcel in 0..2 {
            forget_operations(&crew);
            assert!(crew.train_to(crew.committed.0 + 2));
            // One of the whole group: all of it hands over, and all but one host a column.
            let takes_part = |seat: &&Seat<f64>| {
                let log = seat.trigger.log.lock().unwrap();
                seat.place.replica.0 == 0 && log.iter().any(|(name, _)| name.starts_with(group))
            };
            let dies = crew.seats.iter().rfind(takes_part).unwrap().place;
            let before = crew.committed;
            crew.arm(dies, Fault { group, op: |_| true, at: parcel, how: How::Die });
            assert!(!crew.train_to(40), "the fault must stop the epoch");
            crew.bury(dies);
            assert_eq!(
                crew.committed, before,
                "{group} {parcel}: a step without all its gradients is never committed"
            );
            // Who needs nothing more of the dead one may have all its gradients; that not everybody does is what counts.
            let states = || crew.seats.iter().map(|seat| seat.rank.state(Phase::Quiesced));
            assert!(states().any(|state| state.prepared == before), "{group} {parcel}: all are prepared");
            for state in states() {
                assert_eq!(state.attempted, Step(before.0 + 1));
                assert!(state.prepared <= state.attempted);
            }
            crew.reform(false).unwrap();
            crew.hire(dies);
            crew.reform(false).unwrap();
            crew.digest();
            assert_eq!(crew.degrees.last().unwrap(), &[4, 3]);
            broken += 1;
        }
    }
    assert_eq!((broken, crew.rolled_forward), (6, 0));
    assert!(crew.train_to(40));
    crew.check_samples();
    let mut clean = Crew::<f64>::start(job(dir.path(), "f64", 2, 4, 40));
    assert!(clean.train_to(40));
    let worst = crew.losses.iter().zip(&clean.losses).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
    println!("six deaths in the sum, f64, 40 steps: worst relative difference of the loss {worst:e}");
    assert!(worst <= 1e-10, "{worst:e}");
}

#[test]
fn when_a_sum_moves_on_does_not_change_a_bit() {
    let run = |blind: &[Place]| {
        let dir = tempfile::tempdir().unwrap();
        let mut crew = four_and_three(dir.path(), 8);
        for place in blind {
            crew.seat(*place).trigger.blind.store(true, Ordering::SeqCst);
        }
        assert!(crew.train_to(8));
        (crew.digest(), crew.losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>())
    };
    let prompt = run(&[]);
    let all: Vec<_> =
        (0..2).flat_map(|replica| (0..4).map(move |slot| Place::new(replica, 0, slot))).collect();
    let all: Vec<_> = all.into_iter().filter(|place| *place != LOST).collect();
    assert_eq!(prompt, run(&all), "everything moves on only after the pass");
    assert_eq!(prompt, run(&[Place::new(0, 0, 1), Place::new(1, 0, 3)]), "some are ahead of others");
}

#[test]
fn gradients_leave_before_the_backward_pass_is_over() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = four_and_three(dir.path(), 4);
    forget_operations(&crew);
    assert!(crew.train_to(1));
    for seat in &crew.seats {
        let log = seat.trigger.log.lock().unwrap();
        let of = |group: &'static str, op: &'static str| {
            let all = log.iter().enumerate();
            all.filter(move |(_, (name, what))| name.starts_with(group) && *what == op).map(|(at, _)| at)
        };
        // After the pass come the replicated gradients, and then the vote.
        let passed_on = of("tensor", "Broadcast").next().unwrap();
        let last_sum = of("tensor", "AllReduce").take_while(|at| *at < passed_on).last().unwrap();
        let first = match seat.place.replica.0 {
            0 => of("handover", "AllToAllV").next(),
            _ => of("column", "AllReduce").next(),
        };
        assert!(first.unwrap() < last_sum, "{}: {log:?}", seat.place);
    }
}

#[test]
fn a_rank_that_waits_for_a_sum_names_whom_it_waits_for() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 1, 4));
    assert!(crew.train_to(1));
    let mut idle = crew.dismiss(Place::new(1, 0, 0));
    let pace = Arc::clone(&crew.seats[0].pace);
    std::thread::scope(|scope| {
        let rank = &mut crew.seats[0].rank;
        let stuck = scope.spawn(|| rank.train_step(&|| false).unwrap_err().to_string());
        let deadline = Instant::now() + TIMEOUTS.operation / 2;
        while pace.activity().waiting_for != [idle.worker.clone()] {
            assert!(Instant::now() < deadline, "{:?}", pace.activity());
            std::thread::sleep(Duration::from_millis(1));
        }
        idle.rank.leave_epoch();
        let error = stuck.join().unwrap();
        assert!(error.contains("column"), "{error}");
    });
}
