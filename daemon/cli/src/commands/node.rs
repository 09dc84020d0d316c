//! `reknit node`

use crate::Remote;
use crate::admin::{connect, refused};
use crate::failure::Failure;
use crate::table::Table;
use reknit_proto::v1::{HealthClass, ListNodesRequest, Node};
use serde_json::{Value, json};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum NodeCommand {
    /// Every node with its GPUs.
    List {
        #[command(flatten)]
        remote: Remote,
    },
}

pub(crate) async fn run(command: NodeCommand) -> Result<(), Failure> {
    let NodeCommand::List { remote } = command;
    let answer = connect(&remote.daemon).await?.list_nodes(ListNodesRequest {}).await.map_err(refused)?;
    let nodes = answer.into_inner().nodes;
    remote.format.print(&as_json(&nodes), &as_table(&nodes))
}

fn as_table(nodes: &[Node]) -> Table {
    let mut table = Table::new(["NODE", "AGENT", "GPU", "UUID", "NAME", "HEALTH", "CAUSE"]);
    for node in nodes {
        let agent = if node.connected { "connected" } else { "away" };
        if node.gpus.is_empty() {
            table.row([node.name.as_str(), agent, "-", "-", "-", "-", "no GPU"].map(str::to_owned));
        }
        for gpu in &node.gpus {
            let health = health(gpu.health());
            table.row([
                node.name.clone(),
                agent.to_owned(),
                format!("{}/{}", node.name, gpu.index),
                gpu.uuid.clone(),
                gpu.name.clone(),
                if gpu.drained { format!("{health}, drained") } else { health.to_owned() },
                gpu.cause.clone(),
            ]);
        }
    }
    table
}

fn as_json(nodes: &[Node]) -> Value {
    let nodes = nodes.iter().map(|node| {
        let gpus = node.gpus.iter().map(|gpu| {
            json!({
                "uuid": gpu.uuid, "index": gpu.index, "name": gpu.name,
                "health": health(gpu.health()), "cause": gpu.cause, "drained": gpu.drained,
            })
        });
        json!({ "name": node.name, "connected": node.connected, "gpus": gpus.collect::<Vec<_>>() })
    });
    nodes.collect()
}

fn health(class: HealthClass) -> &'static str {
    match class {
        HealthClass::Unspecified | HealthClass::Unknown => "unknown",
        HealthClass::Healthy => "healthy",
        HealthClass::Fatal => "fatal",
        HealthClass::RankDied => "rank_died",
        HealthClass::Drain => "drain",
        HealthClass::Predict => "predict",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_proto::v1::NodeGpu;

    #[test]
    fn a_drained_gpu_is_marked() {
        let gpu = NodeGpu {
            uuid: "GPU-1".to_owned(),
            health: HealthClass::Healthy.into(),
            drained: true,
            ..NodeGpu::default()
        };
        let nodes = [Node { name: "n".to_owned(), connected: true, gpus: vec![gpu] }];
        assert!(as_table(&nodes).lines()[1].contains("healthy, drained"));
        assert_eq!(as_json(&nodes)[0]["gpus"][0]["health"], "healthy");
    }
}
