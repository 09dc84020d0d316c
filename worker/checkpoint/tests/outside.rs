//! What others may have put into a checkpoint's folder, or want written elsewhere: an error, never a wait or a panic.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{everything, job, snapshots, split, trained};
use reknit_checkpoint::{Checkpoint, CheckpointError, Store, export};
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// A checkpoint that four ranks wrote; without the part of the last unless it is `complete`.
fn written(dir: &Path, complete: bool) -> (Store, PathBuf) {
    let (store, job) = (Store::new(dir), job());
    let whole = trained::<f32>(&job.model, 1);
    let all = snapshots(&job, &whole, &[split(&job.model, 2), split(&job.model, 2)], 1);
    for (writer, snapshot) in &all[..if complete { 4 } else { 3 }] {
        store.write(snapshot, writer, |_, _| {}).unwrap();
    }
    let folder = dir.join(all[0].1.heading.id().to_string());
    (store, folder)
}

fn named(folder: &Path, begin: &str) -> PathBuf {
    let mut paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.find(|path| path.file_name().unwrap().to_str().unwrap().starts_with(begin)).unwrap()
}

fn pipe(path: &Path) {
    let _ = fs::remove_file(path);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
}

fn sparse(path: &Path, length: u64) {
    File::create(path).unwrap().set_len(length).unwrap();
}

fn replace(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from}");
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn a_pipe_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (store, folder) = written(dir.path(), true);
    pipe(&named(&folder, "ffn-0-"));
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let mut told = Vec::new();
    assert_eq!(checkpoint.verify(|_, _, problem| told.extend(problem.map(ToString::to_string))), 1);
    assert!(told[0].contains("it is not a regular file"), "{told:?}");
    pipe(&folder.join("manifest.json"));
    assert!(!store.list().unwrap()[0].complete);
    assert!(Checkpoint::open(&folder).unwrap_err().to_string().contains("it is not a regular file"));
    fs::remove_file(folder.join("manifest.json")).unwrap();
    pipe(&named(&folder, "part-"));
    assert!(Checkpoint::open(&folder).unwrap_err().to_string().contains("it is not a regular file"));
}

#[test]
fn what_is_far_too_long_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let (store, folder) = written(dir.path(), true);
    let (file, manifest) = (named(&folder, "ffn-0-"), folder.join("manifest.json"));
    let right = fs::metadata(&file).unwrap().len();
    sparse(&file, 1 << 40);
    assert_eq!(Checkpoint::open(&folder).unwrap().verify(|_, _, _| {}), 1);
    let entry = Checkpoint::open(&folder).unwrap();
    let entry = entry.manifest().files.iter().find(|entry| file.ends_with(&entry.file)).unwrap().clone();
    assert_eq!(entry.bytes, right);
    replace(&manifest, &format!("\"bytes\": {right}"), &format!("\"bytes\": {}", 1u64 << 40));
    let error = Checkpoint::open(&folder).unwrap_err().to_string();
    assert!(error.contains("more than its units"), "{error}");
    sparse(&manifest, 1 << 40);
    let error = Checkpoint::open(&folder).unwrap_err().to_string();
    assert!(error.contains("more than any has"), "{error}");
    assert!(!store.list().unwrap()[0].complete);
}

#[test]
fn a_part_of_a_model_that_cannot_be_is_damaged() {
    for (from, to, says) in [
        ("\"kv_heads\": 6", "\"kv_heads\": 0", "model.kv_heads = 0 is out of range"),
        ("\"ffn_block\": 3", "\"ffn_block\": 0", "model.ffn_block = 0 is out of range"),
        ("\"axis\": \"ffn/0\"", "\"axis\": \"ffn/7\"", "has units that the model has not"),
        ("\"step\": 1", "\"step\": 2", "it is a part of another checkpoint"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (store, folder) = written(dir.path(), false);
        replace(&named(&folder, "part-"), from, to);
        let error = Checkpoint::open(&folder).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert!(!store.list().unwrap()[0].complete);
    }
}

#[test]
fn whoever_takes_a_checkpoint_can_stop() {
    let dir = tempfile::tempdir().unwrap();
    let (_, folder) = written(dir.path(), true);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let mut taken = 0;
    let stopped = checkpoint.load(&everything(&job().model), |_, _, _| {
        taken += 1;
        let stop = || CheckpointError::NotOne { path: folder.clone(), problem: "stop".to_owned() };
        if taken == 2 { Err(stop()) } else { Ok(()) }
    });
    assert!(matches!(stopped, Err(CheckpointError::NotOne { .. })), "{stopped:?}");
    assert_eq!(taken, 2);
}

#[test]
fn a_vote_that_is_no_number_is_written_and_read() {
    let (dir, job) = (tempfile::tempdir().unwrap(), job());
    let store = Store::new(dir.path());
    let whole = trained::<f32>(&job.model, 1);
    let mut all = snapshots(&job, &whole, &[vec![everything(&job.model)]], 1);
    let (writer, snapshot) = &mut all[0];
    snapshot.heading.vote.as_mut().unwrap().loss = f64::NAN;
    assert!(store.write(snapshot, writer, |_, _| {}).unwrap().complete);
    let checkpoint = Checkpoint::open(&store.list().unwrap()[0].folder).unwrap();
    let vote = checkpoint.manifest().heading.vote.unwrap();
    assert!(vote.loss.is_nan() && vote.grad_norm_squared == 1.5, "{vote:?}");
}

#[test]
fn an_export_replaces_files_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (_, folder) = written(&dir.path().join("checkpoints"), true);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let at = |name: &str| dir.path().join(name);
    pipe(&at("pipe"));
    for out in [at("pipe"), PathBuf::from("/dev/null"), at("checkpoints")] {
        let error = export::export(&checkpoint, &out, |_| {}).unwrap_err().to_string();
        assert!(error.contains("is not a regular file"), "{error}");
    }
    fs::write(at("old"), "old").unwrap();
    symlink(at("old"), at("link")).unwrap();
    export::export(&checkpoint, &at("new"), |_| {}).unwrap();
    export::export(&checkpoint, &at("link"), |_| {}).unwrap();
    assert!(at("link").is_symlink());
    let exported = fs::read(at("new")).unwrap();
    assert_eq!(fs::read(at("old")).unwrap(), exported);
    let tensors = safetensors::SafeTensors::deserialize(&exported).unwrap();
    let model = &job().model;
    assert_eq!(tensors.names().len(), 3 + 9 * model.layers as usize);
    let down = tensors.tensor("model.layers.1.mlp.down_proj.weight").unwrap();
    assert_eq!(down.shape(), [model.hidden as usize, model.ffn as usize]);
    // What anything that is made here has.
    File::create(at("usual")).unwrap();
    let mode = |name| fs::metadata(at(name)).unwrap().permissions().mode();
    assert_eq!(mode("new"), mode("usual"));
    let mut names: Vec<_> =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["checkpoints", "link", "new", "old", "pipe", "usual"]);
}

#[test]
fn an_export_that_fails_leaves_what_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let (_, folder) = written(&dir.path().join("checkpoints"), true);
    fs::remove_file(named(&folder, "vocab-")).unwrap();
    let out = dir.path().join("out");
    fs::write(&out, "old").unwrap();
    export::export(&Checkpoint::open(&folder).unwrap(), &out, |_| {}).unwrap_err();
    assert_eq!(fs::read(&out).unwrap(), b"old");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}
