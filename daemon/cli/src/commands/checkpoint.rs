//! `reknit checkpoint`: works on the files alone, without a daemon.

use crate::failure::Failure;
use crate::output::{Progress, bytes_text, print_lines, second_text};
use crate::table::Table;
use crate::{Format, tell};
use reknit_checkpoint::{Checkpoint, CheckpointError, Found, Store, export};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum CheckpointCommand {
    /// The checkpoints of a job, the last written first.
    Ls {
        /// The folder of the job in its checkpoint.dir, or of one checkpoint.
        folder: PathBuf,
        #[arg(long, value_enum, default_value_t = Format::Table)]
        format: Format,
    },
    /// Read all of a checkpoint and check it against its checksums. Exit status 1 when something is wrong with it.
    Verify {
        /// Of the checkpoint, or of the job: its last complete one.
        folder: PathBuf,
        #[arg(long, value_enum, default_value_t = Format::Table)]
        format: Format,
    },
    /// Write the weights into one safetensors file, with the names and the orientation that Hugging Face's Llama models have.
    Export {
        /// Of the checkpoint, or of the job: its last complete one.
        folder: PathBuf,
        /// The file to write, such as model.safetensors.
        out: PathBuf,
    },
}

pub(crate) fn run(command: &CheckpointCommand) -> Result<(), Failure> {
    match command {
        CheckpointCommand::Ls { folder, format } => list(folder, *format),
        CheckpointCommand::Verify { folder, format } => verify(folder, *format),
        CheckpointCommand::Export { folder, out } => {
            let checkpoint = newest_in(folder)?;
            let progress = Progress::default();
            let tensors = export::export(&checkpoint, out, |name| progress.show(name)).map_err(failed)?;
            drop(progress);
            let step = checkpoint.manifest().heading.step;
            print_lines(&[format!("{}: {tensors} tensors of step {step}", out.display())])
        }
    }
}

/// A checkpoint's folder, or a job's: its last complete one.
pub(super) fn newest_in(folder: &Path) -> Result<Checkpoint, Failure> {
    let inside = Store::new(folder).complete_ids().map_err(failed)?;
    match inside.first() {
        Some(newest) => Checkpoint::open(&folder.join(newest.to_string())),
        None => Checkpoint::open(folder),
    }
    .map_err(failed)
}

/// A job's checkpoints, or the one of this folder.
fn found_in(folder: &Path) -> Result<Vec<Found>, Failure> {
    let found = Store::new(folder).list().map_err(failed)?;
    if !found.is_empty() {
        return Ok(found);
    }
    let folder = std::path::absolute(folder).map_err(Failure::failed(folder.display()))?;
    let beside = folder.parent().and_then(|of_job| Store::new(of_job).list().ok()).unwrap_or_default();
    Ok(beside.into_iter().filter(|found| found.folder == folder).collect())
}

fn list(folder: &Path, format: Format) -> Result<(), Failure> {
    let found = found_in(folder)?;
    if found.is_empty() && !folder.is_dir() {
        return Err(Failure::Usage(format!("{}: there is no such folder", folder.display())));
    }
    if let Some(beneath) = Store::new(folder).beneath().filter(|_| found.is_empty()) {
        return Err(Failure::Usage(format!("{}: no checkpoint lies here; {beneath}", folder.display())));
    }
    let mut table = Table::new(["STEP", "WRITTEN", "BYTES", "STATE", "FOLDER"]);
    for Found { id, folder, complete, written_us, bytes, .. } in &found {
        table.row([
            id.step.to_string(),
            second_text(*written_us),
            if *complete { bytes_text(*bytes) } else { "-".to_owned() },
            if *complete { "complete" } else { "incomplete" }.to_owned(),
            folder.display().to_string(),
        ]);
    }
    let json: Value = found
        .iter()
        .map(|found| {
            json!({
                "step": found.id.step, "digest": found.id.digest, "complete": found.complete,
                "written_us": found.written_us, "bytes": found.complete.then_some(found.bytes),
                "folder": found.folder,
            })
        })
        .collect();
    format.print(&json, &table)
}

fn verify(folder: &Path, format: Format) -> Result<(), Failure> {
    let checkpoint = newest_in(folder)?;
    let progress = Progress::default();
    let mut problems = Vec::new();
    checkpoint.verify(|done, all, problem| {
        progress.show(&format!("{done} of {all} files"));
        problems.extend(problem.map(ToString::to_string));
    });
    drop(progress);
    let manifest = checkpoint.manifest();
    let (step, files, bytes) = (manifest.heading.step, manifest.files.len(), manifest.bytes());
    for problem in &problems {
        tell(problem);
    }
    let folder = checkpoint.folder().display();
    let whole = problems.is_empty();
    match format {
        Format::Table if !whole => {}
        Format::Table => {
            print_lines(&[format!("{folder}: step {step}, {files} files, {bytes} bytes: whole")])?
        }
        Format::Json => {
            let json = json!({
                "folder": checkpoint.folder(), "step": step, "files": files, "bytes": bytes, "whole": whole,
                "problems": problems,
            });
            print_lines(&[json.to_string()])?;
        }
    }
    let bad = problems.len();
    if whole {
        Ok(())
    } else {
        Err(Failure::Failed(format!("{folder}: step {step}: {bad} of {files} files are damaged")))
    }
}

fn failed(error: CheckpointError) -> Failure {
    Failure::Failed(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_layout::{CheckpointId, Step};

    #[test]
    fn a_checkpoint_is_found_in_its_jobs_folder_and_in_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let name = |step| {
            let id = CheckpointId { step: Step(step), digest: "0123456789abcdef".to_owned() };
            dir.path().join(id.to_string())
        };
        let names = [4, 8].map(name);
        names.iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
        let folders = |folder: &Path| -> Vec<PathBuf> {
            found_in(folder).unwrap_or_default().into_iter().map(|found| found.folder).collect()
        };
        assert_eq!(folders(dir.path()).len(), 2);
        assert_eq!(folders(&names[0]), [names[0].clone()]);
        assert_eq!(folders(&name(9)), [] as [PathBuf; 0]);
    }
}
