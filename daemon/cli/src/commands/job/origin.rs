//! What a job that is submitted begins with: its seed or a checkpoint, and in a folder where no earlier run's work is.

use super::text_of;
use crate::commands::checkpoint::newest_in;
use crate::failure::Failure;
use reknit_checkpoint::{Found, Store, job_sha256};
use reknit_layout::{FileError, JobSpec};
use std::path::Path;

/// Where a job's spec is from.
pub(super) struct JobFile<'a> {
    pub(super) name: &'a str,
    pub(super) text: &'a str,
    /// Its paths are taken from here.
    pub(super) folder: &'a Path,
}

/// Makes the paths of `[checkpoint]` absolute. `from` goes before the file's own, and becomes one checkpoint's folder.
pub(super) fn settle(spec: &mut JobSpec, file: &JobFile<'_>, from: Option<&Path>) -> Result<(), Failure> {
    let JobFile { name, text, folder } = file;
    let unusable = |problem: String| Failure::Usage(format!("{name}: checkpoint: {problem}"));
    if !spec.checkpoint.dir.is_empty() {
        spec.checkpoint.dir = text_of(&folder.join(&spec.checkpoint.dir)).map_err(unusable)?;
    }
    let named = (!spec.checkpoint.from.is_empty()).then(|| folder.join(&spec.checkpoint.from));
    if let Some(from) = from.map(Path::to_owned).or(named) {
        let from = std::path::absolute(&from).map_err(Failure::failed(name))?;
        let checkpoint = newest_in(&from)?;
        checkpoint.fits(&spec.model).map_err(|error| Failure::Usage(format!("{name}: {error}")))?;
        spec.checkpoint.from = text_of(checkpoint.folder()).map_err(unusable)?;
        spec.validate().map_err(|invalid| Failure::usage(FileError::of(text, name, &invalid)))?;
    }
    no_folder(spec).or_else(|| earlier_run(spec)).map_or(Ok(()), |problem| Err(unusable(problem)))
}

/// What stands where the job's folder shall be, or one above it. It need not be there yet.
fn no_folder(spec: &JobSpec) -> Option<String> {
    let folder = spec.checkpoint.folder(&spec.name)?;
    let there = Path::new(&folder).ancestors().find(|path| path.exists()).filter(|there| !there.is_dir())?;
    Some(format!("dir: {} is not a folder", there.display()))
}

/// Why the job may not use its folder: an earlier run under this name has left checkpoints there, and this one neither
/// goes on from any nor could be told from that run. A folder that cannot be seen from here counts as empty.
fn earlier_run(spec: &JobSpec) -> Option<String> {
    let store = Store::new(spec.checkpoint.folder(&spec.name)?);
    let (begins_anew, own) = (spec.checkpoint.from.is_empty(), job_sha256(spec));
    let met = |found: &Found| found.complete && (begins_anew || found.job_sha256 == own);
    let newest = store.list().ok()?.into_iter().find(met)?;
    let (folder, step, newest) = (store.path().display(), newest.id.step, newest.folder.display());
    let (whose, beginning) = if begins_anew {
        ("an earlier run under this name", "the first step")
    } else {
        ("an earlier run of this very job file", spec.checkpoint.from.as_str())
    };
    Some(format!(
        "{folder} has checkpoints of {whose}, the last of step {step}: is it still running? `reknit job show {name}` tells. \
         To go on from it, submit with `--from {newest}`; to begin with {beginning}, give the job another name or another \
         checkpoint.dir, or remove the checkpoints of a run that has ended",
        name = spec.name
    ))
}

#[cfg(test)]
mod tests {
    use super::super::prepare;
    use super::*;
    use reknit_checkpoint::{Heading, Snapshot};
    use reknit_layout::job::Dtype;
    use reknit_layout::{Step, Units};
    use reknit_model::Shard;
    use std::path::PathBuf;

    /// Writes a small job's file and its text.
    fn job(dir: &Path, change: impl FnOnce(&mut JobSpec)) -> PathBuf {
        std::fs::write(dir.join("text"), [b'x'; 200]).unwrap();
        let mut job = JobSpec::parse(reknit_layout::job::EXAMPLE, "example").unwrap();
        let model = &mut job.model;
        (model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim) = (1, 16, 4, 4, Some(4));
        (model.ffn, model.ffn_block, model.vocab_block) = (16, 4, 64);
        job.data.files = vec!["text".to_owned()];
        job.checkpoint.dir = "checkpoints".to_owned();
        job.checkpoint.every_steps = 20;
        change(&mut job);
        std::fs::write(dir.join("job.toml"), job.to_toml()).unwrap();
        dir.join("job.toml")
    }

    /// Writes the complete checkpoint of `step` of a job, as if it had trained so far: its folder.
    fn trained_to(job: &JobSpec, step: u64) -> PathBuf {
        let axes = job.model.axes().into_iter();
        let owned = axes.map(|axis| (axis, Units::range(0, job.model.units(axis.family)))).collect();
        let shard = Shard::<f32>::init(&job.model, step, &owned);
        let heading = Heading::new(job, Step(step), &shard.replicated_digest(), None);
        let mut snapshot = Snapshot { heading, pieces: vec![(None, Units::new())], state: Vec::new() };
        shard.export_replicated(&mut snapshot.state);
        for (axis, units) in owned {
            shard.export_units(axis, &units, &mut snapshot.state).unwrap();
            snapshot.pieces.push((Some(axis), units));
        }
        let store = Store::new(job.checkpoint.folder(&job.name).unwrap());
        assert!(store.write(&snapshot, "all", |_, _| {}).unwrap().complete);
        store.path().join(snapshot.heading.id().to_string())
    }

    fn refused(file: &Path, from: Option<&Path>) -> String {
        let error = prepare(file, from).unwrap_err();
        assert_eq!(error.exit_status(), 64, "{error}");
        error.to_string()
    }

    #[test]
    fn an_earlier_runs_checkpoints_are_not_begun_over() {
        let dir = tempfile::tempdir().unwrap();
        let file = job(dir.path(), |_| {});
        let first = prepare(&file, None).unwrap();
        trained_to(&first, 680);
        let newest = trained_to(&first, 700);
        let folder = dir.path().join("checkpoints/example").display().to_string();
        for change in [(|_| {}) as fn(&mut JobSpec), |job| job.run.seed = 4] {
            let error = refused(&job(dir.path(), change), None);
            assert!(error.contains(&format!("{folder} has checkpoints of an earlier run")), "{error}");
            assert!(
                error.contains("step 700: is it still running? `reknit job show example` tells."),
                "{error}"
            );
            assert!(error.contains(&format!("submit with `--from {}`", newest.display())), "{error}");
            assert!(error.contains("another name or another checkpoint.dir, or remove"), "{error}");
        }
        assert!(prepare(&job(dir.path(), |job| job.name = "other".to_owned()), None).is_ok());
        assert!(prepare(&job(dir.path(), |job| job.checkpoint.dir = "elsewhere".to_owned()), None).is_ok());

        let file = job(dir.path(), |_| {});
        let second = prepare(&file, Some(Path::new(&folder))).unwrap();
        assert_eq!(Path::new(&second.checkpoint.from), newest);
        // That run trains on, and is begun over in its turn.
        let later = trained_to(&second, 720);
        let error = refused(&file, Some(&newest));
        assert!(error.contains("of an earlier run of this very job file, the last of step 720"), "{error}");
        assert!(prepare(&file, Some(&later)).is_ok());
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(prepare(&file, None).is_ok());
    }

    #[test]
    fn a_file_is_no_place_for_checkpoints() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("taken")).unwrap();
        std::fs::write(dir.path().join("taken/example"), "").unwrap();
        let named = |named: &str| job(dir.path(), |job| job.checkpoint.dir = named.to_owned());
        for (dir, file) in [("text", "/text"), ("text/inner", "/text"), ("taken", "/taken/example")] {
            let error = refused(&named(dir), None);
            assert!(error.contains(&format!("{file} is not a folder")), "{error}");
        }
        assert!(prepare(&named("not/there/yet"), None).is_ok());
    }

    #[test]
    fn a_checkpoint_leaves_steps_to_train() {
        let dir = tempfile::tempdir().unwrap();
        let of_700 = trained_to(&prepare(&job(dir.path(), |_| {}), None).unwrap(), 700);
        for steps in [100, 700] {
            let file = job(dir.path(), |job| job.run.steps = steps);
            let error = refused(&file, Some(&of_700));
            let says =
                format!("run.steps = {steps} leaves nothing to train behind the checkpoint of step 700");
            assert!(error.contains("job.toml: line ") && error.contains(&says), "{error}");
        }
        let file = job(dir.path(), |job| job.run.steps = 701);
        assert!(prepare(&file, Some(&of_700)).is_ok());
    }

    #[test]
    fn a_checkpoint_of_another_model_is_named_once() {
        let dir = tempfile::tempdir().unwrap();
        let of_700 = trained_to(&prepare(&job(dir.path(), |_| {}), None).unwrap(), 700);
        let other = |change: fn(&mut JobSpec)| refused(&job(dir.path(), change), Some(&of_700));
        let error = other(|job| job.model.dtype = Dtype::F64);
        assert!(error.ends_with("is of another model: its dtype is f32, and the job's f64"), "{error}");
        assert_eq!(error.matches("checkpoint: ").count(), 1, "{error}");
        let error = other(|job| job.model.tie_embeddings = true);
        assert!(error.ends_with("its tie_embeddings is false, and the job's true"), "{error}");
        assert!(prepare(&job(dir.path(), |job| job.model.dtype = Dtype::Bf16), Some(&of_700)).is_ok());
    }
}
