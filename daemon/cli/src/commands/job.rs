//! `reknit job`

mod origin;

use crate::admin::{connect, refused};
use crate::failure::Failure;
use crate::output::{or_none, print_lines};
use crate::table::Table;
use crate::{Format, Remote, files, tell};
use origin::JobFile;
use reknit_layout::job::Tokens;
use reknit_layout::{JobSpec, Layout};
use reknit_proto::v1::{
    GetJobRequest, Job, ListJobsRequest, RebalanceJobRequest, RestoreJobRequest, StopJobRequest,
    SubmitJobRequest,
};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The phase in which a new leader hears what there is: it knows no more of a job than the store.
const REBUILDING: &str = "Rebuilding";

#[derive(Debug, clap::Subcommand)]
pub(crate) enum JobCommand {
    /// Start the job that a file describes.
    Submit {
        file: PathBuf,
        /// The checkpoint to start from in place of the seed: its folder, or that of a job, whose last complete one it is then.
        #[arg(long, value_name = "FOLDER")]
        from: Option<PathBuf>,
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
    /// Share the work of a running job anew among its members, at a step boundary.
    Rebalance {
        name: String,
        #[command(flatten)]
        remote: Remote,
    },
    /// Go back to a checkpoint: of a job that waits since no live GPU holds some units, or that trains. What came after it
    /// is trained again.
    Restore {
        name: String,
        /// The last complete one when not given.
        #[arg(long)]
        step: Option<u64>,
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
        JobCommand::Submit { file, from, remote } => {
            let spec = prepare(&file, from.as_deref())?;
            let request = SubmitJobRequest { job_toml: spec.to_toml() };
            let answer = connect(&remote.daemon).await?.submit_job(request).await.map_err(refused)?;
            if let Some(warning) = warning(&spec) {
                tell(&warning);
            }
            show(&answer.into_inner(), &remote)
        }
        JobCommand::List { remote } => {
            let answer =
                connect(&remote.daemon).await?.list_jobs(ListJobsRequest {}).await.map_err(refused)?;
            let jobs = answer.into_inner().jobs;
            let json: Value = jobs.iter().map(as_json).collect();
            remote.format.print(&json, &as_table(&jobs))?;
            tell_if_stored(&jobs);
            Ok(())
        }
        JobCommand::Show { name, remote } => {
            let request = GetJobRequest { name };
            let answer = connect(&remote.daemon).await?.get_job(request).await.map_err(refused)?;
            show(&answer.into_inner(), &remote)
        }
        JobCommand::Rebalance { name, remote } => {
            let request = RebalanceJobRequest { name };
            let answer = connect(&remote.daemon).await?.rebalance_job(request).await.map_err(refused)?;
            show(&answer.into_inner(), &remote)
        }
        JobCommand::Restore { name, step, remote } => {
            let request = RestoreJobRequest { name, step };
            let answer = connect(&remote.daemon).await?.restore_job(request).await.map_err(refused)?;
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

/// Reads and checks a job file. Its paths become absolute, since workers run elsewhere.
fn prepare(file: &Path, from: Option<&Path>) -> Result<JobSpec, Failure> {
    let (name, text) = files::read(file, files::LARGEST_JOB)?;
    let mut spec = JobSpec::parse_trainable(&text, &name).map_err(Failure::usage)?;
    let absolute = std::path::absolute(file).map_err(Failure::failed(&name))?;
    let folder = absolute.parent().unwrap_or(Path::new("/"));
    let wrong = |problem| Failure::Usage(format!("{name}: data.files: {problem}"));
    let width = spec.data.tokens().and_then(Tokens::width);
    let mut bytes = 0;
    for pattern in &mut spec.data.files {
        let data = resolve(folder, pattern, width.unwrap_or(1)).map_err(wrong)?;
        *pattern = data.pattern;
        bytes += data.bytes;
    }
    // How many tokens text has is known when they are made.
    let needed = width.map_or(1, |width| width * (u64::from(spec.model.seq_len) + 1));
    if bytes < needed {
        return Err(wrong(format!(
            "{bytes} bytes in all, but one sample of seq_len + 1 tokens takes {needed}; give more text or a smaller seq_len"
        )));
    }
    if let Some(Tokens::Text(tokenizer)) = spec.data.tokens() {
        let path = folder.join(tokenizer);
        let missing = |problem| Failure::Usage(format!("{name}: data.tokenizer: {tokenizer}: {problem}"));
        length(&path).map_err(|error| missing(error.to_string()))?;
        super::tokenizer::check(&path, spec.model.vocab).map_err(missing)?;
        spec.data.tokenizer = text_of(&path).map_err(missing)?;
    }
    origin::settle(&mut spec, &JobFile { name: &name, text: &text, folder }, from)?;
    Ok(spec)
}

/// A path as a job carries it.
fn text_of(path: &Path) -> Result<String, String> {
    path.to_str().map(str::to_owned).ok_or_else(|| format!("{}: its name is not UTF-8", path.display()))
}

/// What the operator should know of a job that is not wrong.
fn warning(spec: &JobSpec) -> Option<String> {
    (spec.parallel.data == 1).then(|| {
        format!(
            "job `{}` has one replica (parallel.data = 1): the loss of a GPU cannot be recovered, as nobody else holds \
             its units",
            spec.name
        )
    })
}

/// The files of one pattern.
#[derive(Debug)]
struct Data {
    /// From the root on.
    pattern: String,
    bytes: u64,
}

/// It must match at least one file here, and each must be readable. Folders among a pattern's matches are left out,
/// as workers do. `width`: bytes of a token.
fn resolve(folder: &Path, pattern: &str, width: u64) -> Result<Data, String> {
    let joined = if Path::new(pattern).is_absolute() {
        pattern.to_owned()
    } else {
        let folder = folder.to_str().ok_or("the folder's name is not UTF-8; move the job file")?;
        format!("{}/{pattern}", glob::Pattern::escape(folder))
    };
    let matches = glob::glob(&joined).map_err(|error| format!("{pattern}: {error}; correct the pattern"))?;
    let mut found = false;
    let mut bytes = 0;
    for path in matches {
        let path = path.map_err(|error| format!("{pattern}: {error}; make the files readable"))?;
        let unreadable = |error| format!("{pattern}: {}: {error}; make the files readable", path.display());
        match length(&path).map_err(unreadable)? {
            Some(length) if length % width != 0 => {
                return Err(format!(
                    "{} has {length} bytes, which is no whole number of {width}-byte tokens; is data.tokenizer right?",
                    path.display()
                ));
            }
            Some(length) => {
                found = true;
                bytes += length;
            }
            None if pattern.contains(['*', '?', '[']) => {}
            None => return Err(format!("{pattern}: it is a folder; name files, such as {pattern}/*.txt")),
        }
    }
    if found {
        Ok(Data { pattern: joined, bytes })
    } else {
        Err(format!("{pattern}: no such file; paths are taken from the job file's folder"))
    }
}

/// Of a file that can be opened; `None`: it is a folder. Looked at first: opening a pipe would wait for its writer.
fn length(path: &Path) -> std::io::Result<Option<u64>> {
    let what = std::fs::metadata(path)?;
    if what.is_dir() {
        return Ok(None);
    }
    if !what.is_file() {
        return Err(std::io::Error::other("it is not a file"));
    }
    std::fs::File::open(path)?;
    Ok(Some(what.len()))
}

fn show(job: &Job, remote: &Remote) -> Result<(), Failure> {
    match remote.format {
        Format::Json => print_lines(&[as_json(job).to_string()]),
        Format::Table => {
            let mut lines = as_table(std::slice::from_ref(job)).lines();
            if !job.workers.is_empty() {
                lines.push(String::new());
                lines.extend(workers(job).lines());
            }
            print_lines(&lines)
        }
    }?;
    tell_if_stored(std::slice::from_ref(job));
    Ok(())
}

/// On stderr, where it is in nobody's way: what is shown is not how things are now.
pub(super) fn tell_if_stored(jobs: &[Job]) {
    if jobs.iter().any(|job| !job.live && job.phase != REBUILDING) {
        tell(
            "no leader answers: as stored, without workers and steps; `reknit daemon list` shows every daemon",
        );
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
            job.committed_step.map_or("-".to_owned(), |step| step.to_string()),
            job.last_loss.map_or("-".to_owned(), |loss| format!("{loss:.4}")),
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
            or_none(&worker.place),
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
        "live": job.live, "committed_step": job.committed_step, "last_loss": job.last_loss,
        "layout": layout(job), "checkpoints": job.checkpoints, "workers": job.live.then(|| workers.collect::<Vec<_>>()),
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
        let resolved = resolve(dir.path(), "*.txt", 1).unwrap().pattern;
        assert_eq!(resolved, format!("{}/*.txt", dir.path().display()));
        assert_eq!(resolve(Path::new("/elsewhere"), &resolved, 1).unwrap().pattern, resolved);
        assert!(resolve(dir.path(), "*.md", 1).unwrap_err().contains("no such file"));
        std::os::unix::fs::symlink("nowhere", dir.path().join("c.txt")).unwrap();
        let error = resolve(dir.path(), "*.txt", 1).unwrap_err();
        assert!(error.contains("c.txt: No such file"), "{error}");
    }

    /// The example with other data.
    fn job(dir: &Path, files: &str) -> PathBuf {
        let text = reknit_layout::job::EXAMPLE.replace(r#"["corpus/*.txt"]"#, files);
        std::fs::write(dir.join("job.toml"), text).unwrap();
        dir.join("job.toml")
    }

    #[test]
    fn a_folder_is_no_data_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("text/more")).unwrap();
        std::fs::write(dir.path().join("text/a"), vec![b'x'; 200]).unwrap();
        let error = prepare(&job(dir.path(), r#"["text"]"#), None).unwrap_err();
        assert_eq!(error.exit_status(), 64);
        assert!(error.to_string().contains("text: it is a folder"), "{error}");
        assert!(prepare(&job(dir.path(), r#"["text/*"]"#), None).is_ok(), "a pattern may meet a folder");
        assert!(
            prepare(&job(dir.path(), r#"["tex?"]"#), None).unwrap_err().to_string().contains("no such file")
        );
    }

    #[test]
    fn data_must_make_one_sample() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), vec![b'x'; 100]).unwrap();
        std::fs::write(dir.path().join("b"), vec![b'x'; 28]).unwrap();
        let error = prepare(&job(dir.path(), r#"["a", "b"]"#), None).unwrap_err();
        assert_eq!(error.exit_status(), 64);
        assert!(
            error.to_string().contains("128 bytes in all") && error.to_string().contains("129"),
            "{error}"
        );
        std::fs::write(dir.path().join("b"), vec![b'x'; 29]).unwrap();
        assert!(prepare(&job(dir.path(), r#"["a", "b"]"#), None).is_ok());
    }

    #[test]
    fn what_no_worker_could_train_on_is_not_submitted() {
        let dir = tempfile::tempdir().unwrap();
        let says = |tokenizer: &str, bytes: usize| {
            std::fs::write(dir.path().join("a"), vec![0; bytes]).unwrap();
            let file = job(dir.path(), r#"["a"]"#);
            let text = std::fs::read_to_string(&file).unwrap();
            std::fs::write(&file, text.replace(r#""bytes""#, &format!("{tokenizer:?}"))).unwrap();
            prepare(&file, None).map(drop).map_err(|error| error.to_string())
        };
        let odd = says("u16", 1001).unwrap_err();
        assert!(odd.contains("/a has 1001 bytes, which is no whole number of 2-byte tokens"), "{odd}");
        assert!(says("u32", 1002).unwrap_err().contains("of 4-byte tokens"));
        assert!(says("u16", 256).unwrap_err().contains("takes 258"));
        assert_eq!((says("u16", 258), says("u32", 516)), (Ok(()), Ok(())));
        std::fs::write(dir.path().join("t.json"), "").unwrap();
        let empty = says("t.json", 1000).unwrap_err();
        assert!(empty.contains("data.tokenizer: t.json: "), "{empty}");
        std::fs::write(dir.path().join("t.json"), r#"{"model": {"vocab": {"a": 256}}}"#).unwrap();
        let large = says("t.json", 1000).unwrap_err();
        assert!(large.contains("its largest token is 256, and model.vocab = 256"), "{large}");
        std::fs::write(dir.path().join("t.json"), r#"{"model": {"vocab": {"a": 255}}}"#).unwrap();
        assert_eq!(says("t.json", 1000), Ok(()));
    }

    #[test]
    fn one_replica_is_warned_of() {
        let mut spec = JobSpec::parse(reknit_layout::job::EXAMPLE, "example").unwrap();
        assert_eq!(warning(&spec), None);
        spec.parallel.data = 1;
        assert!(warning(&spec).unwrap().contains("parallel.data = 1"));
    }

    #[test]
    fn a_missing_job_file_is_wrong_usage() {
        let error = prepare(Path::new("/nowhere/job.toml"), None).unwrap_err();
        assert_eq!(error.exit_status(), 64);
        assert!(error.to_string().contains("/nowhere/job.toml"));
    }
}
