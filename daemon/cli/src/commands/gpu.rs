//! `reknit gpu`

mod show;

use super::node::{said, seconds};
use crate::admin::{Admin, connect, refused};
use crate::failure::Failure;
use crate::output::print_lines;
use crate::{Format, Remote};
use reknit_layout::Place;
use reknit_proto::v1::{
    DrainGpuRequest, Job, ListIncidentsRequest, ListJobsRequest, ListNodesRequest, Node, RestoreGpuRequest,
    SetPowerLimitRequest,
};
use serde_json::json;
use std::collections::BTreeSet;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum GpuCommand {
    /// Everything that is known of a GPU.
    Show {
        #[command(flatten)]
        gpu: Named,
        #[command(flatten)]
        remote: Remote,
    },
    /// Take a GPU out at a step boundary; no work is lost.
    Drain {
        #[command(flatten)]
        gpu: Named,
        #[command(flatten)]
        remote: Remote,
    },
    /// Let a GPU take part again that was drained, or that its agent holds back.
    Restore {
        #[command(flatten)]
        gpu: Named,
        #[command(flatten)]
        remote: Remote,
    },
    /// Limit a GPU's power for a time; then its default holds again.
    Power {
        #[command(flatten)]
        gpu: Named,
        /// In watts, clamped to what the GPU allows, or `default`.
        #[arg(value_name = "WATTS|default", value_parser = milliwatts)]
        limit: u32,
        /// How long the limit holds.
        #[arg(long = "for", value_name = "TIME", default_value = "10m", value_parser = seconds)]
        duration: u32,
        #[command(flatten)]
        remote: Remote,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Named {
    /// NODE/INDEX or a UUID, as `reknit node list` prints them, or its place in a job, such as 1.0.3.
    gpu: String,
}

pub(crate) async fn run(command: GpuCommand) -> Result<(), Failure> {
    match command {
        GpuCommand::Show { gpu: Named { gpu: name }, remote } => {
            let mut admin = connect(&remote.daemon).await?;
            let gpu = find(&mut admin, &name, training_or_drained).await?;
            show::show(&mut admin, &gpu, &remote).await
        }
        GpuCommand::Drain { gpu: Named { gpu: name }, remote } => {
            let mut admin = connect(&remote.daemon).await?;
            let gpu = find(&mut admin, &name, training).await?;
            admin.drain_gpu(DrainGpuRequest { gpu: gpu.clone() }).await.map_err(refused)?;
            done(&remote, &name, &gpu, "drained", "leaves at the next step boundary")
        }
        GpuCommand::Restore { gpu: Named { gpu: name }, remote } => {
            let mut admin = connect(&remote.daemon).await?;
            let gpu = find(&mut admin, &name, drained).await?;
            let answer = admin.restore_gpu(RestoreGpuRequest { gpu: gpu.clone() }).await.map_err(refused)?;
            let message = answer.into_inner().message;
            let words = if message.is_empty() {
                "may take part again".to_owned()
            } else {
                format!("may take part again; its agent: {message}")
            };
            done(&remote, &name, &gpu, "restored", &words)
        }
        GpuCommand::Power { gpu: Named { gpu: name }, limit: limit_mw, duration: lease_seconds, remote } => {
            let mut admin = connect(&remote.daemon).await?;
            let gpu = find(&mut admin, &name, training).await?;
            let request = SetPowerLimitRequest { gpu, limit_mw, lease_seconds };
            let answer = admin.set_power_limit(request).await.map_err(refused)?;
            said(&remote, answer.into_inner())
        }
    }
}

/// 0 for the default.
fn milliwatts(text: &str) -> Result<u32, String> {
    if text == "default" {
        return Ok(0);
    }
    let watts = text.parse::<u32>().ok().filter(|watts| *watts > 0);
    watts
        .and_then(|watts| watts.checked_mul(1_000))
        .ok_or_else(|| "write a whole number of watts, or `default`".to_owned())
}

fn done(remote: &Remote, name: &str, gpu: &str, key: &str, words: &str) -> Result<(), Failure> {
    let said = if name == gpu { name.to_owned() } else { format!("{name} ({gpu})") };
    print_lines(&[match remote.format {
        Format::Table => format!("{said} {words}"),
        Format::Json => json!({ key: gpu }).to_string(),
    }])
}

/// The UUID of the GPU that an operator names. For a place, `at_place` tells who is or was there: job and GPU.
async fn find<F>(admin: &mut Admin, name: &str, at_place: F) -> Result<String, Failure>
where
    F: AsyncFnOnce(&mut Admin, &[Node], &str) -> Result<Vec<(String, String)>, Failure>,
{
    let nodes = admin.list_nodes(ListNodesRequest {}).await.map_err(refused)?.into_inner().nodes;
    if let Some(gpu) = on_node(&nodes, name) {
        return Ok(gpu);
    }
    match name.parse::<Place>() {
        Ok(place) => {
            let place = place.to_string();
            only_one(&place, at_place(admin, &nodes, &place).await?)
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

async fn jobs(admin: &mut Admin) -> Result<Vec<Job>, Failure> {
    Ok(admin.list_jobs(ListJobsRequest {}).await.map_err(refused)?.into_inner().jobs)
}

/// Whose workers are at the place.
async fn training(admin: &mut Admin, _: &[Node], place: &str) -> Result<Vec<(String, String)>, Failure> {
    let mut found = Vec::new();
    for job in jobs(admin).await? {
        let workers = job.workers.into_iter().filter(|worker| worker.place == place);
        found.extend(workers.filter_map(|worker| Some((job.name.clone(), worker.worker?.gpu))));
    }
    Ok(found)
}

/// Which drained GPUs were at the place. They have no worker, but an incident tells of their leaving.
async fn drained(admin: &mut Admin, nodes: &[Node], place: &str) -> Result<Vec<(String, String)>, Failure> {
    let gpus = nodes.iter().flat_map(|node| &node.gpus).filter(|gpu| !gpu.drained_by.is_empty());
    let drained: BTreeSet<&str> = gpus.map(|gpu| gpu.uuid.as_str()).collect();
    let mut found = Vec::new();
    for job in jobs(admin).await? {
        let request = ListIncidentsRequest { job: job.name.clone() };
        let incidents = admin.list_incidents(request).await.map_err(refused)?.into_inner().incidents;
        let mut here = incidents.into_iter().rev().filter(|incident| incident.place == place);
        let last = here.find(|incident| drained.contains(incident.gpu.as_str()));
        found.extend(last.map(|incident| (job.name, incident.gpu)));
    }
    Ok(found)
}

async fn training_or_drained(
    admin: &mut Admin,
    nodes: &[Node],
    place: &str,
) -> Result<Vec<(String, String)>, Failure> {
    let found = training(admin, nodes, place).await?;
    if found.is_empty() { drained(admin, nodes, place).await } else { Ok(found) }
}

fn only_one(place: &str, mut found: Vec<(String, String)>) -> Result<String, Failure> {
    let jobs: Vec<_> = found.iter().map(|(job, _)| job.clone()).collect();
    found.dedup_by(|a, b| a.1 == b.1);
    match found.as_slice() {
        [] => Err(Failure::Failed(format!(
            "no such GPU at {place} in any job: name it as `reknit node list` prints it"
        ))),
        [(_, gpu)] => Ok(gpu.clone()),
        [_, _, ..] => Err(Failure::Failed(format!(
            "{place} is a place in {}: name the GPU as `reknit node list` prints it",
            jobs.join(" and in ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_proto::v1::NodeGpu;

    fn node(name: &str, uuids: &[&str]) -> Node {
        let gpus = uuids.iter().zip(0..).map(|(uuid, index)| NodeGpu {
            uuid: (*uuid).to_owned(),
            index,
            ..NodeGpu::default()
        });
        Node { name: name.to_owned(), gpus: gpus.collect(), ..Node::default() }
    }

    #[test]
    fn by_node_and_index_or_uuid() {
        let nodes = [node("n-0", &["GPU-a", "GPU-b"]), node("n-1", &["GPU-c"])];
        assert_eq!(on_node(&nodes, "n-0/1").as_deref(), Some("GPU-b"));
        assert_eq!(on_node(&nodes, "GPU-c").as_deref(), Some("GPU-c"));
        assert_eq!(on_node(&nodes, "n-1/1"), None);
    }

    #[test]
    fn limits() {
        assert_eq!(["default", "350"].map(milliwatts), [Ok(0), Ok(350_000)]);
        for wrong in ["0", "-1", "350W", "5000000", ""] {
            assert!(milliwatts(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_place_names_one_gpu_or_is_refused() {
        let found = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter().map(|(job, gpu)| ((*job).to_owned(), (*gpu).to_owned()));
            only_one("0.0.2", pairs.collect())
        };
        assert_eq!(found(&[("a", "GPU-a")]).unwrap(), "GPU-a");
        assert_eq!(found(&[("a", "GPU-a"), ("b", "GPU-a")]).unwrap(), "GPU-a");
        let error = found(&[("a", "GPU-a"), ("b", "GPU-b")]).unwrap_err();
        assert!(error.to_string().contains("0.0.2 is a place in a and in b"), "{error}");
        let error = found(&[]).unwrap_err();
        assert_eq!(error.exit_status(), 1);
        assert!(error.to_string().contains("reknit node list"), "{error}");
    }
}
