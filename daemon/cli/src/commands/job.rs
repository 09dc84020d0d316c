//! `reknit job`

use crate::admin::{connect, refused};
use crate::failure::Failure;
use crate::output::print_lines;
use crate::table::Table;
use crate::{Format, Remote};
use reknit_layout::{JobSpec, Layout};
use reknit_proto::v1::{GetJobRequest, Job, ListJobsRequest, StopJobRequest, SubmitJobRequest};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum JobCommand {
    /// Start the job that a file describes.
    Submit {
        file: PathBuf,
        #[command(flatten)]
        remote: Remote,
    },
    /// Every job.
    List {
        #[command(flatten)]
        remote: Remote,
    },
    /// One job with its workers.
    Show {
        name: String,
        #[command(flatten)]
        remote: Remote,
    },
    /// End a job.
    Stop {
        name: String,
        #[command(flatten)]
        remote: Remote,
    },
    /// Print a job file to start from.
    Example,
}

pub(crate) async fn run(command: JobCommand) -> Result<(), Failure> {
    match command {
        JobCommand::Submit { file, remote } => {
            let job_toml = prepare(&file)?;
            let request = SubmitJobRequest { job_toml };
            let answer = connect(&remote.daemon).await?.submit_job(request).await.map_err(refused)?;
            show(&answer.into_inner(), &remote)
        }
        JobCommand::List { remote } => {
            let answer =
                connect(&remote.daemon).await?.list_jobs(ListJobsRequest {}).await.map_err(refused)?;
            let jobs = answer.into_inner().jobs;
            let json: Value = jobs.iter().map(as_json).collect();
            remote.format.print(&json, &as_table(&jobs))
        }
        JobCommand::Show { name, remote } => {
            let request = GetJobRequest { name };
            let answer = connect(&remote.daemon).await?.get_job(request).await.map_err(refused)?;
            show(&answer.into_inner(), &remote)
        }
        JobCommand::Stop { name, remote } => {
            let request = StopJobRequest { name };
            let answer = connect(&remote.daemon).await?.stop_job(request).await.map_err(refused)?;
            show(&answer.into_inner(), &remote)
        }
        JobCommand::Example => print_lines(&[reknit_layout::job::EXAMPLE.trim_end().to_owned()]),
    }
}

/// Reads and checks a job file. Its data files become absolute, since workers run elsewhere.
fn prepare(file: &Path) -> Result<String, Failure> {
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file)
        .map_err(|error| Failure::Usage(format!("{name}: {error}; name a job file that can be read")))?;
    let mut spec = JobSpec::parse(&text, &name).map_err(|error| Failure::Usage(error.to_string()))?;
    let absolute = std::path::absolute(file).map_err(Failure::failed(&name))?;
    let folder = absolute.parent().unwrap_or(Path::new("/"));
    for pattern in &mut spec.data.files {
        *pattern = resolve(folder, pattern)
            .map_err(|problem| Failure::Usage(format!("{name}: data.files: {problem}")))?;
    }
    Ok(spec.to_toml())
}

/// The pattern from the root on. It must match at least one file here, and each must be readable.
fn resolve(folder: &Path, pattern: &str) -> Result<String, String> {
    let joined = if Path::new(pattern).is_absolute() {
        pattern.to_owned()
    } else {
        let folder = folder.to_str().ok_or("the folder's name is not UTF-8; move the job file")?;
        format!("{}/{pattern}", glob::Pattern::escape(folder))
    };
    let matches = glob::glob(&joined).map_err(|error| format!("{pattern}: {error}; correct the pattern"))?;
    let mut found = false;
    for path in matches {
        let opened =
            path.map_err(std::io::Error::from).and_then(|path| std::fs::File::open(path).map(|_| ()));
        opened.map_err(|error| format!("{pattern}: {error}; make the files readable"))?;
        found = true;
    }
    if found {
        Ok(joined)
    } else {
        Err(format!("{pattern}: no such file; paths are taken from the job file's folder"))
    }
}

fn show(job: &Job, remote: &Remote) -> Result<(), Failure> {
    match remote.format {
        Format::Json => print_lines(&[as_json(job).to_string()]),
        Format::Text => {
            let mut lines = as_table(std::slice::from_ref(job)).lines();
            if !job.workers.is_empty() {
                lines.push(String::new());
                lines.extend(workers(job).lines());
            }
            print_lines(&lines)
        }
    }
}

fn as_table(jobs: &[Job]) -> Table {
    let mut table = Table::new(["NAME", "PHASE", "EPOCH", "STEP", "LOSS", "DEGREES", "EXPLANATION"]);
    for job in jobs {
        let degrees = layout(job).map_or("-".to_owned(), |layout| format!("{:?}", layout.degrees()));
        table.row([
            job.name.clone(),
            job.phase.clone(),
            job.epoch.to_string(),
            job.committed_step.to_string(),
            if job.committed_step == 0 { "-".to_owned() } else { format!("{:.4}", job.last_loss) },
            degrees,
            job.explanation.clone(),
        ]);
    }
    table
}

fn workers(job: &Job) -> Table {
    let mut table = Table::new(["PLACE", "NODE", "GPU", "PID", "STATE"]);
    for worker in &job.workers {
        table.row([
            if worker.place.is_empty() { "-".to_owned() } else { worker.place.clone() },
            worker.node.clone(),
            worker.worker.as_ref().map_or("-".to_owned(), |key| key.gpu.clone()),
            worker.pid.to_string(),
            worker.state.clone(),
        ]);
    }
    table
}

fn as_json(job: &Job) -> Value {
    let workers = job.workers.iter().map(|worker| {
        json!({
            "gpu": worker.worker.as_ref().map(|key| key.gpu.as_str()),
            "incarnation": worker.worker.as_ref().map(|key| key.incarnation),
            "place": worker.place, "node": worker.node, "pid": worker.pid, "state": worker.state,
        })
    });
    json!({
        "name": job.name, "phase": job.phase, "explanation": job.explanation, "epoch": job.epoch,
        "committed_step": job.committed_step, "last_loss": job.last_loss, "layout": layout(job),
        "workers": workers.collect::<Vec<_>>(),
    })
}

/// `None` before the first one.
fn layout(job: &Job) -> Option<Layout> {
    serde_json::from_slice(&job.layout).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_files_are_taken_from_the_job_files_folder() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.txt"), "text").unwrap();
        let resolved = resolve(dir.path(), "*.txt").unwrap();
        assert_eq!(resolved, format!("{}/*.txt", dir.path().display()));
        assert_eq!(resolve(Path::new("/elsewhere"), &resolved).unwrap(), resolved);
        assert!(resolve(dir.path(), "*.md").unwrap_err().contains("no such file"));
    }

    #[test]
    fn a_missing_job_file_is_wrong_usage() {
        let error = prepare(Path::new("/nowhere/job.toml")).unwrap_err();
        assert_eq!(error.exit_status(), 64);
        assert!(error.to_string().contains("/nowhere/job.toml"));
    }
}
