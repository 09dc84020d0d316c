//! The gRPC services.

pub mod admin;
pub mod agent;
pub mod convert;
mod standing;
mod stream;
pub mod worker;

pub use standing::{Gate, Standing};

use crate::clock::Clock;
use crate::input::Inputs;
use reknit_engine::Timeouts;
use reknit_proto::v1;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

/// A plan of a large cluster is some megabytes.
const LARGEST_MESSAGE: usize = 64 << 20;
/// What a node's agent says at once: its hello, with 128 GPUs whose verdicts are long and 1,024 workers, is some 200 KiB.
pub const LARGEST_OF_AGENT: usize = 1 << 20;
/// What a worker says at once: what it holds, in pieces of a single unit, is 2.3 MiB for a whole model of 126 layers.
pub const LARGEST_OF_WORKER: usize = 4 << 20;

/// The loop, as the services see it.
#[derive(Debug, Clone)]
pub struct Loop {
    pub inputs: Inputs,
    /// Dropped with the loop, which ends every watch.
    pub watchers: broadcast::WeakSender<Arc<v1::JobEvent>>,
    pub timeouts: Timeouts,
    pub clock: Clock,
    /// The number of the leadership.
    pub term: u64,
}

/// Every service, with reflection and health beside them. The reporter is told what this daemon serves at present.
pub fn services(gate: Gate) -> Result<(Routes, HealthReporter), tonic_reflection::server::Error> {
    let admin = v1::admin_server::AdminServer::new(admin::Admin::new(gate.clone()))
        .max_decoding_message_size(LARGEST_MESSAGE)
        .max_encoding_message_size(LARGEST_MESSAGE);
    let agent = v1::agent_server::AgentServer::new(agent::Agent::new(gate.clone()))
        .max_decoding_message_size(LARGEST_OF_AGENT)
        .max_encoding_message_size(LARGEST_MESSAGE);
    let worker = v1::worker_server::WorkerServer::new(worker::Worker::new(gate))
        .max_decoding_message_size(LARGEST_OF_WORKER)
        .max_encoding_message_size(LARGEST_MESSAGE);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(reknit_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (reporter, health) = tonic_health::server::health_reporter();
    let mut routes = Routes::builder();
    routes
        .add_service(admin)
        .add_service(agent)
        .add_service(worker)
        .add_service(health)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?);
    Ok((routes.routes(), reporter))
}

/// In stand-by it answers operators, and nobody else.
pub async fn report_health(reporter: &HealthReporter, leading: bool) {
    let sessions = if leading { ServingStatus::Serving } else { ServingStatus::NotServing };
    for (name, status) in [
        ("", ServingStatus::Serving),
        ("reknit.v1.Admin", ServingStatus::Serving),
        ("reknit.v1.Agent", sessions),
        ("reknit.v1.Worker", sessions),
    ] {
        reporter.set_service_status(name, status).await;
    }
}

/// A peer that has connected says who it is within this time.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
