//! `reknit gpu`

use crate::admin::{Admin, connect, refused};
use crate::failure::Failure;
use crate::output::print_lines;
use crate::{Format, Remote};
use reknit_layout::Place;
use reknit_proto::v1::{DrainGpuRequest, Job, ListJobsRequest, ListNodesRequest, Node, RestoreGpuRequest};
use serde_json::json;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum GpuCommand {
    /// Take a GPU out at a step boundary; no work is lost.
    Drain {
        #[command(flatten)]
        gpu: Named,
        #[command(flatten)]
        remote: Remote,
    },
    /// Let a drained GPU take part again.
    Restore {
        #[command(flatten)]
        gpu: Named,
        #[command(flatten)]
        remote: Remote,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Named {
    /// NODE/INDEX or a UUID, as `reknit node list` prints them, or the place in a running job, such as 1.0.3.
    gpu: String,
}

pub(crate) async fn run(command: GpuCommand) -> Result<(), Failure> {
    match command {
        GpuCommand::Drain { gpu: Named { gpu: name }, remote } => {
            let mut admin = connect(&remote.daemon).await?;
            let gpu = find(&mut admin, &name).await?;
            admin.drain_gpu(DrainGpuRequest { gpu: gpu.clone() }).await.map_err(refused)?;
            done(&remote, &name, &gpu, "drained", "leaves at the next step boundary")
        }
        GpuCommand::Restore { gpu: Named { gpu: name }, remote } => {
            let mut admin = connect(&remote.daemon).await?;
            let gpu = find(&mut admin, &name).await?;
            admin.restore_gpu(RestoreGpuRequest { gpu: gpu.clone() }).await.map_err(refused)?;
            done(&remote, &name, &gpu, "restored", "may take part again")
        }
    }
}

fn done(remote: &Remote, name: &str, gpu: &str, key: &str, words: &str) -> Result<(), Failure> {
    let said = if name == gpu { name.to_owned() } else { format!("{name} ({gpu})") };
    print_lines(&[match remote.format {
        Format::Text => format!("{said} {words}"),
        Format::Json => json!({ key: gpu }).to_string(),
    }])
}

/// The UUID of the GPU that an operator names.
async fn find(admin: &mut Admin, name: &str) -> Result<String, Failure> {
    let nodes = admin.list_nodes(ListNodesRequest {}).await.map_err(refused)?.into_inner().nodes;
    if let Some(gpu) = on_node(&nodes, name) {
        return Ok(gpu);
    }
    match name.parse::<Place>() {
        Ok(place) => {
            let jobs = admin.list_jobs(ListJobsRequest {}).await.map_err(refused)?.into_inner().jobs;
            at_place(&jobs, place)
        }
        // It may be one of a node that is away; the daemon knows.
        Err(_) => Ok(name.to_owned()),
    }
}

fn on_node(nodes: &[Node], name: &str) -> Option<String> {
    let mut gpus = nodes.iter().flat_map(|node| node.gpus.iter().map(move |gpu| (node, gpu)));
    let named = gpus.find(|(node, gpu)| gpu.uuid == name || format!("{}/{}", node.name, gpu.index) == name);
    named.map(|(_, gpu)| gpu.uuid.clone())
}

fn at_place(jobs: &[Job], place: Place) -> Result<String, Failure> {
    let place = place.to_string();
    let here = jobs.iter().flat_map(|job| {
        let workers = job.workers.iter().filter(|worker| worker.place == place);
        workers.filter_map(|worker| Some((job.name.as_str(), &worker.worker.as_ref()?.gpu)))
    });
    match here.collect::<Vec<_>>().as_slice() {
        [] => Err(Failure::Failed(format!(
            "no running job has a worker at {place}: name the GPU as `reknit node list` prints it"
        ))),
        [(_, gpu)] => Ok((*gpu).clone()),
        several => {
            let jobs: Vec<_> = several.iter().map(|(job, _)| *job).collect();
            Err(Failure::Failed(format!(
                "{place} is a place in {}: name the GPU as `reknit node list` prints it",
                jobs.join(" and in ")
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_proto::v1::{JobWorker, NodeGpu, WorkerKey};

    fn node(name: &str, uuids: &[&str]) -> Node {
        let gpus = uuids.iter().zip(0..).map(|(uuid, index)| NodeGpu {
            uuid: (*uuid).to_owned(),
            index,
            ..NodeGpu::default()
        });
        Node { name: name.to_owned(), gpus: gpus.collect(), ..Node::default() }
    }

    fn job(name: &str, place: &str, gpu: &str) -> Job {
        let key = WorkerKey { gpu: gpu.to_owned(), ..WorkerKey::default() };
        let worker = JobWorker { place: place.to_owned(), worker: Some(key), ..JobWorker::default() };
        Job { name: name.to_owned(), workers: vec![worker], ..Job::default() }
    }

    #[test]
    fn by_node_and_index_or_uuid() {
        let nodes = [node("n-0", &["GPU-a", "GPU-b"]), node("n-1", &["GPU-c"])];
        assert_eq!(on_node(&nodes, "n-0/1").as_deref(), Some("GPU-b"));
        assert_eq!(on_node(&nodes, "GPU-c").as_deref(), Some("GPU-c"));
        assert_eq!(on_node(&nodes, "n-1/1"), None);
    }

    #[test]
    fn by_place_when_it_is_the_only_one() {
        let jobs = [job("a", "0.0.1", "GPU-a"), job("b", "0.0.2", "GPU-b"), job("c", "0.0.2", "GPU-c")];
        assert_eq!(at_place(&jobs, Place::new(0, 0, 1)).unwrap(), "GPU-a");
        let error = at_place(&jobs, Place::new(0, 0, 2)).unwrap_err();
        assert!(error.to_string().contains("a place in b and in c"), "{error}");
        let error = at_place(&jobs, Place::new(7, 0, 0)).unwrap_err();
        assert_eq!(error.exit_status(), 1);
        assert!(error.to_string().contains("reknit node list"), "{error}");
    }
}
