//! What ranks write while they train, ranks of any layout go on from.

use crate::crew::{Crew, TIMEOUTS, job};
use crate::fault::{Fault, How};
use reknit_checkpoint::{Checkpoint, Heading, Snapshot, Store};
use reknit_layout::job::RunSpec;
use reknit_layout::{Axis, Epoch, JobSpec, Place, Step, Units};
use reknit_model::Shard;

use reknit_worker::control;
use reknit_worker::messages::{Order, Report};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

fn saving(dir: &Path, tensor: u32, steps: u64) -> JobSpec {
    let mut job = job(dir, "f64", 2, tensor, steps);
    job.checkpoint.dir = dir.join("checkpoints").display().to_string();
    job.checkpoint.every_steps = 4;
    job
}

fn complete(job: &JobSpec) -> Vec<(Step, PathBuf)> {
    let store = Store::new(job.checkpoint.folder(&job.name).unwrap());
    let ids = store.complete_ids().unwrap();
    ids.into_iter().map(|id| (id.step, store.path().join(id.to_string()))).collect()
}

/// Ranks that are dropped end what they write first: nothing is awaited.
#[test]
fn another_layout_goes_on_from_a_checkpoint_as_if_nothing_had_happened() {
    let dir = tempfile::tempdir().unwrap();
    let clean = {
        let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 2, 12));
        assert!(crew.train_to(12));
        crew.losses
    };
    let mut crew = Crew::<f64>::start(saving(dir.path(), 2, 12));
    assert!(crew.train_to(6));
    let job = JobSpec::clone(&crew.job);
    drop(crew);
    let found = complete(&job);
    let [(Step(4), folder)] = found.as_slice() else { panic!("{found:?}") };
    let checkpoint = Checkpoint::open(folder).unwrap();
    assert_eq!(checkpoint.verify(|_, _, problem| assert!(problem.is_none(), "{problem:?}")), 0);
    let loss = checkpoint.manifest().heading.vote.unwrap().loss;
    assert!((loss - clean[3]).abs() < 1e-12, "{loss}");

    // Three slots a replica instead of two, one of them lost.
    let mut crew = Crew::<f64>::hired(saving(dir.path(), 3, 12));
    crew.dismiss(Place::new(1, 0, 1));
    crew.restore(folder, Step(4)).unwrap();
    assert_eq!(crew.degrees, [[3, 2]]);
    crew.digest();
    assert!(crew.train_to(12));
    crew.check_losses_from(5, &clean);
    drop(crew);
    let steps: Vec<_> = complete(&job).into_iter().map(|(step, _)| step.0).collect();
    assert!(steps.contains(&12), "the last step's waits for its turn: {steps:?}");
}

#[test]
fn who_trains_can_go_back_and_a_damaged_checkpoint_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(saving(dir.path(), 2, 12));
    assert!(crew.train_to(6));
    let (job, before) = (JobSpec::clone(&crew.job), crew.losses.clone());
    // The others write while this rank's writer ends: then the checkpoint is complete.
    let left: Vec<_> = crew.seats.drain(..).collect();
    drop(left);
    let (step, folder) = complete(&job).remove(0);
    for replica in 0..2 {
        for slot in 0..2 {
            crew.hire(Place::new(replica, 0, slot));
        }
    }
    crew.restore(&folder, step).unwrap();
    assert!(crew.train_to(7));
    let held = crew.digest();

    let broken = dir.path().join(folder.file_name().unwrap());
    std::fs::create_dir(&broken).unwrap();
    for file in std::fs::read_dir(&folder).unwrap().flatten() {
        let mut bytes = std::fs::read(file.path()).unwrap();
        if file.file_name().to_string_lossy().starts_with("vocab") {
            *bytes.last_mut().unwrap() ^= 1;
        }
        std::fs::write(broken.join(file.file_name()), bytes).unwrap();
    }
    let why = crew.restore(&broken, step).unwrap_err();
    assert!(why.contains("its checksum is wrong"), "{why}");
    assert_eq!(crew.digest(), held, "what they hold is as it was");
    crew.seats.iter_mut().for_each(|seat| seat.rank.discard_next());

    crew.restore(&folder, step).unwrap();
    assert_ne!(crew.digest(), held);
    assert!(crew.train_to(7));
    assert_eq!(crew.digest(), held, "the same steps again, bit for bit");
    crew.check_losses_from(5, &before[..6]);
}

/// Of the steps in the job's folder: whether their checkpoints are complete.
fn steps(job: &JobSpec) -> Vec<(u64, bool)> {
    let found = Store::new(job.checkpoint.folder(&job.name).unwrap()).list().unwrap();
    let mut steps: Vec<_> = found.into_iter().map(|found| (found.id.step.0, found.complete)).collect();
    steps.sort_unstable();
    steps
}

#[test]
fn a_step_that_some_rolled_forward_has_its_checkpoint_a_step_later() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(saving(dir.path(), 2, 20));
    assert!(crew.train_to(3));
    let unlucky = Place::new(1, 0, 1);
    let answer = |op: &str| op == "Broadcast";
    crew.arm(unlucky, Fault { group: "tensor", op: answer, at: 1, how: How::LoseAnswer });
    assert!(!crew.train_to(8));
    assert_eq!(crew.committed.0, 4, "the others committed step 4, and saved it");
    for seat in &mut crew.seats {
        assert!(seat.rank.has_saved_within(TIMEOUTS.join));
    }
    assert_eq!(steps(&crew.job), [(4, false)]);
    crew.reform(false).unwrap();
    assert_eq!(crew.rolled_forward, 1);
    assert!(crew.train_to(6));
    let job = JobSpec::clone(&crew.job);
    drop(crew);
    assert_eq!(steps(&job), [(5, true)], "half a checkpoint is cleared away by the next whole one");
}

#[test]
fn the_last_steps_checkpoint_is_made_again_by_those_who_are_left() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(saving(dir.path(), 2, 5));
    assert!(crew.train_to(5));
    crew.seats.iter_mut().for_each(|seat| assert!(seat.rank.has_saved_within(TIMEOUTS.join)));
    let job = JobSpec::clone(&crew.job);
    let (_, folder) = complete(&job).remove(0);
    // As if one had died before it had written.
    std::fs::remove_file(folder.join("manifest.json")).unwrap();
    let gone = crew.dismiss(Place::new(1, 0, 1));
    let mine = format!("part-{}-{}.json", gone.worker.gpu, gone.worker.incarnation);
    std::fs::remove_file(folder.join(mine)).unwrap();
    drop(gone);
    crew.reform(false).unwrap();
    drop(crew);
    assert_eq!(complete(&job)[0].0, Step(5));
}

#[test]
fn a_job_is_complete_when_its_last_checkpoint_is() {
    let dir = tempfile::tempdir().unwrap();
    let mut alone = saving(dir.path(), 1, 5);
    alone.parallel.data = 1;
    let mut crew = Crew::<f64>::hired(alone);
    let orders = crew.plan(true).unwrap();
    let seat = crew.dismiss(Place::new(0, 0, 0));
    let desk = seat.desk();
    let (sender, inbox) = mpsc::sync_channel(8);
    let prepare = orders.of(&seat.worker);
    let deadline = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        // Dropped when the test fails, so that the worker ends then too.
        let sender = sender;
        let desk = &desk;
        let worker = scope.spawn(move || control::run(desk, &inbox));
        sender.send(Order::Welcome { job: Box::new((*crew.job).clone()), timeouts: TIMEOUTS }).unwrap();
        sender.send(Order::Prepare(Box::new(prepare))).unwrap();
        sender.send(Order::Resume { epoch: orders.epoch }).unwrap();
        let mut known = Vec::new();
        loop {
            match desk.outbox.pop() {
                Some(Report::Checkpoints { ids, .. }) => known = ids,
                Some(Report::Completed { step, .. }) => {
                    assert_eq!(step, Step(5));
                    break;
                }
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(1)),
            }
            assert!(Instant::now() < deadline, "it never completes");
        }
        assert!(known.iter().any(|id| id.step == Step(5)), "not written: {known:?}");
        sender.send(Order::Stop { epoch: Epoch(1), reason: "the test is over".to_owned() }).unwrap();
        worker.join().unwrap().unwrap();
    });
}

/// Of one rank, which has written nothing but the replicated parameters and then died.
fn unfinished(job: &JobSpec, step: u64) -> PathBuf {
    let mut state = Vec::new();
    let owned = [(Axis::vocab(), Units::range(0, 1))].into();
    Shard::<f64>::init(&job.model, 1, &owned).export_replicated(&mut state);
    let heading = Heading::new(job, Step(step), "of a dead worker", None);
    let snapshot = Snapshot { heading, pieces: vec![(None, Units::new())], state };
    let store = Store::new(job.checkpoint.folder(&job.name).unwrap());
    assert!(!store.write(&snapshot, "dead", |_, _| {}).unwrap().complete);
    store.path().join(snapshot.heading.id().to_string())
}

#[test]
fn what_dead_workers_left_of_this_job_alone_goes_with_the_next_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let job = saving(dir.path(), 2, 12);
    let other = JobSpec { run: RunSpec { seed: job.run.seed + 1, ..job.run.clone() }, ..job.clone() };
    let (own, of_another, later) = (unfinished(&job, 3), unfinished(&other, 3), unfinished(&job, 9));
    let mut crew = Crew::<f64>::start(job);
    assert!(crew.train_to(4));
    let job = JobSpec::clone(&crew.job);
    drop(crew);
    assert_eq!(complete(&job).len(), 1);
    assert!(!own.exists() && of_another.exists());
    assert!(later.exists(), "those who went on from it may write it again");
}
