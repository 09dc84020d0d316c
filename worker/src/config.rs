//! The worker's command line. The agent writes it; people may, to look.

use clap::Parser;
use reknit_client::Daemons;
use reknit_layout::{GpuId, Incarnation, NodeName, WorkerKey};
use std::net::IpAddr;

/// One rank of a training job. Started by reknit-agent, one process per GPU.
#[derive(Debug, Clone, Parser)]
#[command(name = "reknit-worker", version)]
pub struct Config {
    /// The daemon's address, such as http://127.0.0.1:7400; several, separated by commas, where there are several daemons.
    #[arg(long = "daemon", value_name = "ADDRESSES", env = "REKNIT_DAEMON")]
    pub daemons: Daemons,
    #[arg(long)]
    pub job: String,
    /// The GPU's UUID.
    #[arg(long)]
    pub gpu: String,
    /// The node's name. Workers of one node talk over Unix sockets, others over TCP.
    #[arg(long)]
    pub node: String,
    /// Which start on this GPU it is.
    #[arg(long)]
    pub incarnation: u64,
    /// Where the data plane listens for other nodes.
    #[arg(long, default_value = "127.0.0.1")]
    pub data_ip: IpAddr,
    /// Threads that compute.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: u32,
    #[arg(long, value_enum, default_value = "human")]
    pub log: LogFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    Human,
    Json,
}

impl Config {
    pub fn worker(&self) -> WorkerKey {
        WorkerKey { gpu: GpuId(self.gpu.clone()), incarnation: Incarnation(self.incarnation) }
    }

    pub fn node(&self) -> NodeName {
        NodeName(self.node.clone())
    }
}
