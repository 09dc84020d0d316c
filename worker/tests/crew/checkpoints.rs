//! What ranks write while they train, ranks of any layout go on from.

use crate::crew::{Crew, job};
use reknit_checkpoint::{Checkpoint, Store};
use reknit_layout::{JobSpec, Place, Step};
use std::path::{Path, PathBuf};

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
