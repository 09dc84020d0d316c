//! Writers that die, disks that are full, files that are damaged: what was complete stays whole, and what is not is told.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{job, snapshots, split, trained};
use reknit_checkpoint::{Checkpoint, CheckpointError, Snapshot, Store, job_sha256};
use reknit_layout::job::{Dtype, ModelSpec};
use reknit_layout::{JobSpec, Step};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn write_all(store: &Store, snapshots: &[(String, Snapshot)]) {
    for (writer, snapshot) in snapshots {
        store.write(snapshot, writer, |_, _| {}).unwrap();
    }
}

fn folder(store: &Store, snapshots: &[(String, Snapshot)]) -> PathBuf {
    store.path().join(snapshots[0].1.heading.id().to_string())
}

/// The model of `steps` steps as two replicas of two write it.
fn ranks(job: &JobSpec, steps: u64) -> Vec<(String, Snapshot)> {
    let whole = trained::<f32>(&job.model, steps);
    snapshots(job, &whole, &[split(&job.model, 2), split(&job.model, 2)], steps)
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn load(checkpoint: &Checkpoint, owned: &common::Owned) -> Result<(), CheckpointError> {
    checkpoint.load(owned, |_, _, _| Ok(()))
}

fn first_file(folder: &Path) -> PathBuf {
    let files = names(folder);
    folder.join(files.iter().find(|name| name.starts_with("ffn-1-")).unwrap())
}

#[test]
fn a_missing_part_is_named_and_the_older_checkpoint_stays() {
    let (dir, job) = (tempfile::tempdir().unwrap(), job());
    let store = Store::new(dir.path());
    let (old, new) = (ranks(&job, 1), ranks(&job, 2));
    write_all(&store, &old);
    write_all(&store, &new[..3]);
    assert_eq!(store.complete_ids().unwrap(), [old[0].1.heading.id()]);
    let error = Checkpoint::open(&folder(&store, &new)).unwrap_err();
    let CheckpointError::Incomplete { missing, .. } = &error else { panic!("{error}") };
    assert!(missing.contains("units"), "{missing}");
    assert!(matches!(Checkpoint::open(&dir.path().join("none")), Err(CheckpointError::NotOne { .. })));
    // The rank that was late completes it.
    assert!(store.write(&new[3].1, &new[3].0, |_, _| {}).unwrap().complete);
    assert_eq!(store.complete_ids().unwrap(), [new[0].1.heading.id(), old[0].1.heading.id()]);
}

#[test]
fn damage_is_found_wherever_it_is() {
    let (dir, job) = (tempfile::tempdir().unwrap(), job());
    let store = Store::new(dir.path());
    let ranks = ranks(&job, 1);
    write_all(&store, &ranks);
    let folder = folder(&store, &ranks);
    let (file, manifest) = (first_file(&folder), folder.join("manifest.json"));
    let whole = std::fs::read(&file).unwrap();
    let everything = common::everything(&job.model);
    type Spoil = fn(Vec<u8>) -> Option<Vec<u8>>;
    let spoils: [(&str, Spoil); 4] = [
        ("checksum", |mut bytes| {
            *bytes.last_mut().unwrap() ^= 1;
            Some(bytes)
        }),
        ("checksum", |mut bytes| {
            bytes[9] ^= 1;
            Some(bytes)
        }),
        ("bytes instead of", |mut bytes| {
            bytes.pop();
            Some(bytes)
        }),
        ("No such file", |_| None),
    ];
    for (says, spoil) in spoils {
        std::fs::remove_file(&file).unwrap();
        if let Some(bytes) = spoil(whole.clone()) {
            std::fs::write(&file, bytes).unwrap();
        }
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let mut told = Vec::new();
        assert_eq!(checkpoint.verify(|_, _, problem| told.extend(problem.map(ToString::to_string))), 1);
        assert!(told[0].contains(says) && told[0].contains("ffn-1-"), "{told:?}");
        let error = load(&checkpoint, &everything).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        std::fs::write(&file, &whole).unwrap();
    }
    let text = std::fs::read_to_string(&manifest).unwrap();
    for (from, to, says) in [
        ("\"version\": 1", "\"version\": 0", "has format 0, and this Reknit reads format 1"),
        ("\"version\": 1", "\"version\": 2", "has format 2"),
        ("\"layers\": 2", "\"layers\": 0", "model.layers = 0 is out of range"),
        ("\"layers\": 2", "\"layers\": 3", "it lacks attn/2 units 0-5, ffn/2 units 0-5"),
        ("\"ffn-1-", "\"../ffn-1-", "is no file name"),
        ("{", "", "damaged"),
    ] {
        assert!(text.contains(from), "{from}");
        std::fs::write(&manifest, text.replacen(from, to, 1)).unwrap();
        let result = Checkpoint::open(&folder).and_then(|checkpoint| load(&checkpoint, &everything));
        let error = result.unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn a_checkpoint_of_another_model_is_refused_with_what_differs() {
    let (dir, job) = (tempfile::tempdir().unwrap(), job());
    let store = Store::new(dir.path());
    let ranks = ranks(&job, 1);
    write_all(&store, &ranks);
    let checkpoint = Checkpoint::open(&folder(&store, &ranks)).unwrap();
    let mut other = job.model.clone();
    (other.seq_len, other.dropout, other.recompute, other.dtype) = (99, 0.5, true, Dtype::Bf16);
    checkpoint.fits(&other).unwrap();
    let differs = |change: fn(&mut ModelSpec)| {
        let mut other = other.clone();
        change(&mut other);
        checkpoint.fits(&other).unwrap_err().to_string()
    };
    assert!(
        differs(|model| model.tie_embeddings = true).contains("tie_embeddings is false, and the job's true")
    );
    assert!(differs(|model| model.dtype = Dtype::F64).contains("dtype is f32, and the job's f64"));
    other.kv_heads = 12;
    let error = checkpoint.fits(&other).unwrap_err().to_string();
    assert!(error.contains("kv_heads is 6, and the job's 12"), "{error}");
}

#[test]
fn the_folder_above_says_which_one_in_it_has_checkpoints() {
    let (dir, job) = (tempfile::tempdir().unwrap(), job());
    let above = Store::new(dir.path());
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    assert_eq!(above.beneath(), None);
    for name in ["mine-a", "mine-b"] {
        write_all(&Store::new(dir.path().join(name)), &ranks(&job, 1));
    }
    let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(error.ends_with("any part-*.json; the folders mine-a, mine-b in it have checkpoints"), "{error}");
}

#[test]
fn what_has_not_changed_is_linked() {
    let (dir, job) = (tempfile::tempdir().unwrap(), job());
    let store = Store::new(dir.path());
    let old = ranks(&job, 1);
    write_all(&store, &old);
    // The same state but for one number of one unit, at a later step.
    let mut new = ranks(&job, 1);
    for (_, snapshot) in &mut new {
        snapshot.heading.step.0 = 2;
    }
    new[1].1.state[0] ^= 1;
    let (mut bytes, mut linked) = (0, 0);
    for (writer, snapshot) in &new {
        let written = store.write(snapshot, writer, |_, _| {}).unwrap();
        (bytes, linked) = (bytes + written.bytes, linked + written.linked);
    }
    let checkpoint = Checkpoint::open(&folder(&store, &new)).unwrap();
    assert_eq!(bytes + linked, checkpoint.manifest().bytes());
    let links = |name: &str| std::fs::metadata(folder(&store, &new).join(name)).unwrap().nlink();
    let written: Vec<_> = checkpoint.manifest().files.iter().filter(|file| links(&file.file) == 1).collect();
    assert_eq!(written.len(), 1, "one file was written anew");
    assert_eq!(written[0].bytes, bytes);
    // Removing the older one takes nothing from the newer.
    assert_eq!(store.prune(&job_sha256(&job), 1).unwrap(), 1);
    assert_eq!(checkpoint.verify(|_, _, _| {}), 0);
}

#[test]
fn what_is_damaged_is_written_again_and_not_linked_on() {
    let (dir, job) = (tempfile::tempdir().unwrap(), job());
    let store = Store::new(dir.path());
    let (old, mut new) = (ranks(&job, 1), ranks(&job, 1));
    write_all(&store, &old);
    let spoil = |file: &Path| {
        let mut bytes = std::fs::read(file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(file, bytes).unwrap();
    };
    spoil(&first_file(&folder(&store, &old)));
    for (_, snapshot) in &mut new {
        snapshot.heading.step.0 = 2;
    }
    // Of an earlier try at the same checkpoint too.
    write_all(&store, &new[..3]);
    let folder = folder(&store, &new);
    spoil(&folder.join(names(&folder).iter().find(|name| name.starts_with("attn-0-")).unwrap()));
    write_all(&store, &new);
    assert_eq!(Checkpoint::open(&folder).unwrap().verify(|_, _, _| {}), 0);
}

#[test]
fn pruning_keeps_the_last_written() {
    let (dir, job) = (tempfile::tempdir().unwrap(), job());
    let store = Store::new(dir.path());
    let all: Vec<_> = (1..=3).map(|steps| ranks(&job, steps)).collect();
    // The job went back from step 3 to step 1 and then wrote step 2: that is the newest.
    write_all(&store, &all[2]);
    write_all(&store, &all[0]);
    write_all(&store, &all[1]);
    let others = ["not ours", "removed-by-a-user", "removed-step-9"];
    others.iter().for_each(|name| std::fs::create_dir(dir.path().join(name)).unwrap());
    assert_eq!(store.prune(&job_sha256(&job), 2).unwrap(), 1);
    let ids = |ranks: &Vec<(String, Snapshot)>| ranks[0].1.heading.id();
    assert_eq!(store.complete_ids().unwrap(), [ids(&all[1]), ids(&all[0])]);
    let left = [ids(&all[1]).to_string(), ids(&all[0]).to_string()];
    assert_eq!(names(dir.path()), left.into_iter().chain(others.map(str::to_owned)).collect());
}

#[test]
fn another_jobs_checkpoints_in_the_same_folder_are_apart_and_stay() {
    let (dir, job) = (tempfile::tempdir().unwrap(), job());
    let store = Store::new(dir.path());
    let mut other = job.clone();
    other.run.steps += 1;
    // The same states at the same steps, as when a job starts anew with more steps; the last of the others is not complete.
    let others: Vec<_> = (1..=3).map(|steps| ranks(&other, steps)).collect();
    write_all(&store, &others[0]);
    write_all(&store, &others[1]);
    write_all(&store, &others[2][..3]);
    let before = names(dir.path());
    let own: Vec<_> = (1..=4).map(|steps| ranks(&job, steps)).collect();
    own.iter().for_each(|ranks| write_all(&store, ranks));
    assert_eq!(store.prune(&job_sha256(&job), 2).unwrap(), 2);
    assert_eq!(store.clear(&job_sha256(&job), Step(5)).unwrap(), 0);
    let newest = own[2..].iter().map(|ranks| ranks[0].1.heading.id().to_string());
    assert_eq!(names(dir.path()), before.into_iter().chain(newest).collect());
}

#[test]
fn what_dead_writers_left_is_cleared_once_a_later_step_is_written() {
    let (dir, job) = (tempfile::tempdir().unwrap(), job());
    let store = Store::new(dir.path());
    let (old, new) = (ranks(&job, 1), ranks(&job, 2));
    write_all(&store, &old);
    let folder = folder(&store, &old);
    let whole = names(&folder);
    let stray = format!("ffn-1-{}.safetensors", "0".repeat(32));
    let of_users = ["model.safetensors", "notes.partial", "part.json"];
    let strays = [stray.clone(), format!("{stray}.gpu-3.partial"), "manifest.json.gpu-3.partial".to_owned()];
    for name in strays.iter().map(String::as_str).chain(of_users) {
        std::fs::write(folder.join(name), "x").unwrap();
    }
    let mut child = start(dir.path(), "");
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.by_ref().map(Result::unwrap).find(|line| line.starts_with("at ")).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let dead = self::folder(&store, &new);
    assert!(dead.exists());
    // Others may still be at this step.
    assert_eq!(store.clear(&job_sha256(&job), Step(2)).unwrap(), 0);
    assert!(dead.exists());
    assert_eq!(names(&folder), whole.into_iter().chain(of_users.map(str::to_owned)).collect());
    assert_eq!(store.clear(&job_sha256(&job), Step(3)).unwrap(), 1);
    assert_eq!(names(dir.path()), [old[0].1.heading.id().to_string()].into());
}

/// Not a test by itself: what the others start as a process of its own, told by the environment.
#[test]
fn writer() {
    let Some(dir) = std::env::var_os("REKNIT_TEST_CHECKPOINTS") else { return };
    let store = Store::new(PathBuf::from(dir));
    let mut snapshots = ranks(&job(), 2);
    let (writer, snapshot) = snapshots.remove(0);
    let result = store.write(&snapshot, &writer, |done, _| {
        println!("at {done}");
        // Until who started it goes on.
        let _ = std::io::stdin().read_line(&mut String::new());
    });
    println!("done {result:?}");
    println!("left {:?}", names(&folder(&store, &[(writer, snapshot)])));
}

/// `prelude` in a shell that then becomes the writer.
fn start(dir: &Path, prelude: &str) -> std::process::Child {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{prelude} exec \"$0\" writer --exact --nocapture"));
    command.arg(std::env::current_exe().unwrap()).env("REKNIT_TEST_CHECKPOINTS", dir);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_writer_that_is_killed_leaves_the_older_one_whole_and_the_next_try_goes_through() {
    let (dir, job) = (tempfile::tempdir().unwrap(), job());
    let store = Store::new(dir.path());
    let (old, new) = (ranks(&job, 1), ranks(&job, 2));
    write_all(&store, &old);
    write_all(&store, &new[1..]);
    let mut child = start(dir.path(), "");
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // In the middle: some of its files are there.
    lines.by_ref().map(Result::unwrap).find(|line| line.starts_with("at ")).unwrap();
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "it must die before it is done");
    let folder = folder(&store, &new);
    assert!(!names(&folder).contains("manifest.json"));
    assert_eq!(store.complete_ids().unwrap(), [old[0].1.heading.id()]);
    let open = |ranks| Checkpoint::open(&self::folder(&store, ranks)).unwrap();
    assert_eq!(open(&old).verify(|_, _, _| {}), 0);
    let again = store.write(&new[0].1, &new[0].0, |_, _| {}).unwrap();
    assert!(again.complete && again.linked > 0, "{again:?}");
    assert_eq!(open(&new).verify(|_, _, _| {}), 0);
}

#[test]
fn a_file_that_cannot_be_written_is_told_and_leaves_nothing_half_done() {
    let (dir, job) = (tempfile::tempdir().unwrap(), job());
    let store = Store::new(dir.path());
    let (old, new) = (ranks(&job, 1), ranks(&job, 2));
    write_all(&store, &old);
    write_all(&store, &new[1..]);
    let of_others = names(&folder(&store, &new));
    // Of no more than 4 blocks of 512 bytes; what the kernel does then is an error and not a death.
    let mut child = start(dir.path(), "ulimit -f 4; trap '' XFSZ;");
    drop(child.stdin.take());
    let said = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    assert!(said.contains("FileTooLarge") && said.contains("done Err"), "{said}");
    assert_eq!(names(&folder(&store, &new)), of_others, "neither whole files nor halves");
    assert_eq!(store.complete_ids().unwrap(), [old[0].1.heading.id()]);
    assert_eq!(Checkpoint::open(&folder(&store, &old)).unwrap().verify(|_, _, _| {}), 0);
    assert!(store.write(&new[0].1, &new[0].0, |_, _| {}).unwrap().complete);
    assert_eq!(Checkpoint::open(&folder(&store, &new)).unwrap().verify(|_, _, _| {}), 0);
}

#[test]
fn a_full_disk_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let inner = format!(
        "mount -t tmpfs -o size=32k none '{}' && echo mounted && exec \"$0\" writer --exact --nocapture",
        dir.path().display()
    );
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", &inner]).arg(std::env::current_exe().unwrap());
    command.env("REKNIT_TEST_CHECKPOINTS", dir.path()).stdin(Stdio::null());
    let output = command.output().expect("util-linux is there");
    let said = String::from_utf8(output.stdout).unwrap();
    if !said.contains("mounted") {
        eprintln!("left out: nobody may make a small disk here: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    // Some files went through before it was full.
    assert!(said.contains("at ") && said.contains("done Err(Full {"), "{said}");
    assert!(said.contains("left {}"), "the room is free again: {said}");
}
