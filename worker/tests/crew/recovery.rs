//! A rank is lost at an exact point of a step, the group goes on unevenly, the rank comes back: nothing is lost.

use crate::crew::{Crew, Orders, TIMEOUTS, job, refused};
use crate::fault::{Fault, How};
use reknit_layout::{Epoch, Partitions, Place, Step, SyncColumns, WorkerKey};
use reknit_model::Real;
use reknit_plane::{AbortReason, Element};
use reknit_worker::control;
use reknit_worker::messages::{Order, Phase, Prepare, Report};
use reknit_worker::session::Outbox;
use std::io::Write;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

pub(crate) const LOST: Place = Place::new(1, 0, 2);
/// The first of the same group: it speaks for it.
const SPEAKER: Place = Place::new(1, 0, 0);

fn in_forward(at: u64) -> Fault {
    Fault { group: "tensor", op: |_| true, at, how: How::Die }
}

/// A group passes something on twice in a step: the replicated gradients, then what the vote decided.
pub(crate) fn answer_of_the_vote(how: How) -> Fault {
    Fault { group: "tensor", op: |op| op == "Broadcast", at: 1, how }
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

pub(crate) fn undisturbed<T: Real + Element>(data: u32, tensor: u32, dtype: &str, steps: u64) -> Crew<T> {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<T>::start(job(dir.path(), dtype, data, tensor, steps));
    assert!(crew.train_to(steps));
    crew.check_samples();
    crew
}

pub(crate) fn worst(a: &[f64], b: &[f64]) -> f64 {
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
fn an_order_to_prepare_with_a_gap_is_refused_before_anybody_is_joined() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 2, 10));
    assert!(crew.train_to(2));
    let orders = crew.plan(false).unwrap();
    type Spoil = fn(&mut Prepare);
    fn sync(prepare: &mut Prepare) -> &mut SyncColumns {
        &mut prepare.layout.as_mut().unwrap().sync[0]
    }
    fn partitions(prepare: &mut Prepare) -> &mut Partitions {
        Arc::make_mut(&mut prepare.layout.as_mut().unwrap().groups[0].partitions)
    }
    let spoils: [(&str, Spoil); 16] = [
        ("layout", |prepare| prepare.layout.as_mut().unwrap().sync.clear()),
        ("layout", |prepare| prepare.layout.as_mut().unwrap().batch.fill(u32::MAX)),
        ("layout", |prepare| drop(partitions(prepare).pop_first())),
        ("layout", |prepare| partitions(prepare).clear()),
        ("layout", |prepare| drop(partitions(prepare).first_entry().unwrap().get_mut().pop())),
        ("layout", |prepare| drop(sync(prepare).axes[1].columns.pop())),
        ("layout", |prepare| sync(prepare).columns = 1),
        ("layout", |prepare| sync(prepare).hosts.iter_mut().for_each(Vec::clear)),
        ("layout", |prepare| sync(prepare).hosts.clear()),
        ("tensor", |prepare| prepare.tensor.clear()),
        ("tensor", |prepare| drop(prepare.tensor.pop())),
        ("column", |prepare| prepare.column.clear()),
        ("column", |prepare| prepare.column.truncate(1)),
        ("speakers", |prepare| prepare.speakers.clear()),
        ("speakers", |prepare| prepare.speakers.truncate(1)),
        // As many as there must be, but without this worker.
        ("column", |prepare| prepare.column[1] = prepare.column[0].clone()),
    ];
    let seat = crew.seat(SPEAKER);
    seat.rank.leave_epoch();
    for (number, (group, spoil)) in spoils.into_iter().enumerate() {
        let mut prepare = orders.of(&seat.worker);
        assert!(prepare.column.len() == 2 && prepare.speakers.len() == 2, "it has a part in everything");
        spoil(&mut prepare);
        seat.rank.allocate(&prepare);
        let begun = Instant::now();
        let why = seat.rank.prepare(&prepare).unwrap_err().to_string();
        assert!(why.contains(&format!("group {group}")) && why.contains("gap"), "{number}: {why}");
        assert!(begun.elapsed() < TIMEOUTS.join / 2, "nobody was waited for");
    }
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
    let dies = Fault { group: "speakers", op: |_| true, at: 0, how: How::Die };
    crew.arm(SPEAKER, dies);
    assert!(!crew.train_to(8));
    crew.bury(SPEAKER);
    assert_eq!(crew.committed.0, 3);
    crew.reform(false).unwrap();
    assert_eq!(crew.rolled_forward, 0);
    assert!(crew.train_to(8));
    crew.check_samples();
    let clean = undisturbed::<f64>(2, 4, "f64", 8);
    assert!(worst(&crew.losses, &clean.losses) <= 1e-10);
}

#[test]
fn a_speaker_that_dies_with_the_answer_leaves_its_group_to_roll_forward() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 4, 8));
    assert!(crew.train_to(3));
    crew.arm(SPEAKER, answer_of_the_vote(How::Die));
    assert!(!crew.train_to(8));
    crew.bury(SPEAKER);
    assert_eq!(crew.committed.0, 4, "the other group committed step 4");
    assert_eq!(crew.seat(LOST).rank.committed().0, 3);
    crew.reform(false).unwrap();
    assert_eq!(crew.rolled_forward, 3);
    assert!(crew.train_to(8));
    crew.check_samples();
    crew.digest();
    let clean = undisturbed::<f64>(2, 4, "f64", 8);
    assert!(worst(&crew.losses, &clean.losses) <= 1e-10);
}

#[test]
fn who_missed_the_answer_of_a_vote_that_others_saw_rolls_forward() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 4, 8));
    assert!(crew.train_to(3));
    crew.arm(LOST, answer_of_the_vote(How::LoseAnswer));
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
    crew.arm(second, Fault { group: "reshard", op: |_| true, at: 0, how: How::Die });
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

fn at_chunk(at: u64, how: How) -> Fault {
    Fault { group: "reshard", op: |op| op == "Exchange", at, how }
}

/// A crew of 4 and 4 that has lost a rank.
pub(crate) fn bereaved(dir: &tempfile::TempDir) -> (Crew<f64>, WorkerKey) {
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 4, 12));
    assert!(crew.train_to(4));
    crew.arm(LOST, in_forward(5));
    assert!(!crew.train_to(12));
    let lost = crew.bury(LOST);
    (crew, lost)
}

/// Breaks the reshard off amid every chunk that `place` has a part in, and each time everybody holds what it held, byte
/// by byte; then lets it succeed. Returns how often.
fn break_at_every_chunk(crew: &mut Crew<f64>, place: Place) -> u64 {
    let held = crew.held();
    for at in 0.. {
        crew.arm(place, at_chunk(at, How::Die));
        let outcome = crew.reform(false);
        if outcome.is_ok() {
            assert!(!crew.disarm(place), "it went on after chunk {at}");
            return at;
        }
        assert!(crew.held() == held, "broken off amid chunk {at}, something held has changed");
    }
    unreachable!("a reshard has an end")
}

#[test]
fn a_reshard_that_breaks_off_at_any_chunk_changes_nothing_and_the_next_one_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let (mut crew, _) = bereaved(&dir);
    let times = break_at_every_chunk(&mut crew, Place::new(1, 0, 0));
    assert!(times > 8, "{times} chunks are too few for this test");
    crew.digest();
    assert!(crew.train_to(8));
    // The same when a new rank receives all it shall own.
    crew.hire(LOST);
    let times = break_at_every_chunk(&mut crew, LOST);
    assert!(times > 8, "{times} chunks are too few for this test");
    crew.digest();
    assert!(crew.train_to(12));
    crew.check_samples();
    let clean = undisturbed::<f64>(2, 4, "f64", 12);
    assert!(worst(&crew.losses, &clean.losses) <= 1e-10);
}

#[test]
fn a_damaged_chunk_is_found_named_and_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let (mut crew, _) = bereaved(&dir);
    // Who alone holds what was lost.
    let source = Place::new(0, 0, LOST.slot.0);
    let (held, worker) = (crew.held(), crew.seat(source).worker.clone());
    for at in [0, 3, 6] {
        crew.arm(source, at_chunk(at, How::Damage));
        let why = refused(crew.reform(false));
        assert!(why.contains("its checksum is wrong") && why.contains(&worker.to_string()), "{why}");
        assert!(crew.disarm(source));
        assert!(crew.held() == held, "something held has changed");
    }
    crew.reform(false).unwrap();
    crew.digest();
    assert!(crew.train_to(8));
    crew.check_samples();
}

#[test]
fn a_peer_that_dies_amid_the_chunks_is_gone_on_without() {
    let dir = tempfile::tempdir().unwrap();
    let (mut crew, _) = bereaved(&dir);
    let second = Place::new(1, 0, 0);
    crew.arm(second, at_chunk(5, How::Die));
    refused(crew.reform(false));
    crew.bury(second);
    crew.reform(false).unwrap();
    assert_eq!(crew.degrees, [[4, 4], [4, 2]]);
    crew.digest();
    assert!(crew.train_to(12));
    crew.check_samples();
}

/// Has everybody join in the background, and waits for what they report.
fn join_ahead(crew: &mut Crew<f64>, orders: &Orders) -> Vec<Report> {
    let outboxes: Vec<Arc<Outbox>> = crew.seats.iter().map(|_| Arc::default()).collect();
    for (seat, outbox) in crew.seats.iter_mut().zip(&outboxes) {
        seat.rank.joins().order(Arc::new(orders.of(&seat.worker)), outbox);
    }
    // They train on meanwhile.
    let step = crew.committed.0 + 3;
    assert!(crew.train_to(step));
    let deadline = Instant::now() + TIMEOUTS.join;
    let report = |outbox: &Arc<Outbox>| loop {
        if let Some(report) = outbox.pop() {
            return report;
        }
        assert!(Instant::now() < deadline, "no report");
        std::thread::sleep(Duration::from_millis(1));
    };
    outboxes.iter().map(report).collect()
}

#[test]
fn groups_are_joined_while_the_old_ones_are_trained_with() {
    let dir = tempfile::tempdir().unwrap();
    let (mut crew, _) = bereaved(&dir);
    crew.reform(false).unwrap();
    assert!(crew.train_to(5));
    // Twice: the first newcomer is gone before anybody is told to prepare.
    for newcomer in 0..2 {
        crew.hire(LOST);
        let mut orders = crew.plan(false).unwrap();
        let idle = crew.dismiss(LOST);
        let outbox = Arc::default();
        idle.rank.joins().order(Arc::new(orders.of(&idle.worker)), &outbox);
        let reports = join_ahead(&mut crew, &orders);
        let joined = |report: &Report| matches!(report, Report::Joined { epoch } if *epoch == orders.epoch);
        assert!(reports.iter().all(joined), "{reports:?}");
        if newcomer == 1 {
            crew.seats.push(idle);
            orders.resume_step = crew.committed;
            orders.vote = crew.seat(SPEAKER).rank.state(Phase::Quiesced).vote;
            crew.carry_out(orders).unwrap();
        }
    }
    assert_eq!(crew.degrees, [[4, 4], [4, 3], [4, 4]]);
    crew.digest();
    assert!(crew.train_to(12));
    crew.check_samples();
    let clean = undisturbed::<f64>(2, 4, "f64", 12);
    assert!(worst(&crew.losses, &clean.losses) <= 1e-10);
}

#[test]
fn who_cannot_be_joined_is_named_and_training_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (mut crew, _) = bereaved(&dir);
    crew.reform(false).unwrap();
    crew.hire(LOST);
    let orders = crew.plan(false).unwrap();
    let dead = crew.dismiss(LOST).worker;
    let reports = join_ahead(&mut crew, &orders);
    let failed =
        |report: &Report| matches!(report, Report::PrepareFailed { epoch, .. } if *epoch == orders.epoch);
    assert!(reports.iter().any(failed), "{reports:?}");
    let named =
        |report: &Report| matches!(report, Report::PrepareFailed { peer: Some(peer), .. } if *peer == dead);
    assert!(reports.iter().any(named), "{reports:?}");
    assert!(crew.train_to(12));
    crew.check_samples();
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

#[test]
fn a_worker_that_finds_other_files_takes_no_part() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 2, 8));
    let lost = Place::new(1, 0, 1);
    assert!(crew.train_to(2));
    crew.arm(lost, in_forward(3));
    assert!(!crew.train_to(8));
    crew.bury(lost);
    crew.reform(false).unwrap();
    assert!(crew.train_to(4));

    let text = std::fs::File::options().append(true).open(dir.path().join("text.txt"));
    text.unwrap().write_all(&[b'x'; 1000]).unwrap();
    crew.hire(lost);
    let why = refused(crew.reform(false));
    assert!(why.contains("other workers of the job find other data"), "{why}");
    crew.dismiss(lost);
    crew.reform(false).unwrap();
    assert!(crew.train_to(8));
    crew.check_samples();
    crew.digest();
}

#[test]
fn a_join_that_fails_says_who_is_to_blame_and_not_what_it_cut_short() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 2, 8));
    let orders = crew.plan(false).unwrap();
    let dead = crew.dismiss(Place::new(0, 0, 0)).worker;
    // Two of its groups have the dead one among the members; the other one waits for a peer that does not come yet.
    let seat = crew.seat(Place::new(1, 0, 0));
    seat.rank.leave_epoch();
    let error = seat.rank.prepare(&orders.of(&seat.worker.clone())).unwrap_err();
    assert_eq!(error.plane().unwrap().peer, Some(dead), "{error}");
}

#[test]
fn state_of_another_step_is_not_taken_along() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 2, 8));
    assert!(crew.train_to(2));
    let mut left_out = crew.dismiss(Place::new(1, 0, 1));
    let mut orders = crew.plan(false).unwrap();
    orders.resume_step = Step(3);
    let prepare = orders.of(&left_out.worker);
    left_out.rank.leave_epoch();
    left_out.rank.prepare(&prepare).unwrap();
    assert!(!left_out.rank.state(Phase::Ready).holding.is_empty());
    assert!(left_out.rank.resume(prepare.epoch));
    let state = left_out.rank.state(Phase::Quiesced);
    assert!(state.holding.is_empty() && state.vote.is_none(), "{state:?}");
}

#[test]
fn a_preparation_that_waits_for_peers_is_known_by_its_epoch_and_can_be_closed() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 1, 2, 8));
    let mut orders = crew.plan(true).unwrap();
    orders.epoch = Epoch(7);
    let seat = crew.dismiss(Place::new(0, 0, 1));
    let prepare = orders.of(&seat.worker);
    let desk = seat.desk();
    let until = |phase: Phase| {
        let deadline = Instant::now() + TIMEOUTS.join / 2;
        while desk.status.state().phase != phase {
            assert!(Instant::now() < deadline, "not {phase:?}: {:?}", desk.status.state());
            std::thread::sleep(Duration::from_millis(1));
        }
        desk.status.state()
    };
    let (orders, inbox) = mpsc::sync_channel(8);
    std::thread::scope(|scope| {
        // Dropped when the test fails, so that the worker ends then too.
        let orders = orders;
        let desk = &desk;
        let worker = scope.spawn(move || control::run(desk, &inbox));
        let job = Box::new((*crew.job).clone());
        orders.send(Order::Welcome { job, timeouts: TIMEOUTS }).unwrap();
        orders.send(Order::Prepare(Box::new(prepare))).unwrap();
        // The other member never comes.
        let epoch = until(Phase::Preparing).ready_epoch;
        assert_eq!(epoch, Epoch(7));
        desk.aborts.close(epoch, AbortReason::EpochClosed);
        orders.send(Order::CloseEpoch { epoch, reason: "over".to_owned() }).unwrap();
        assert_eq!(until(Phase::Idle).ready_epoch, Epoch(0));
        orders.send(Order::Stop { epoch: Epoch(9), reason: "the test is over".to_owned() }).unwrap();
        worker.join().unwrap().unwrap();
    });
}
