//! The gRPC services.

pub mod admin;
pub mod agent;
pub mod convert;
mod stream;
pub mod worker;

use crate::clock::Clock;
use crate::input::Input;
use reknit_engine::Timeouts;
use reknit_proto::v1;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{broadcast, mpsc};
use tonic::service::Routes;
use tonic_health::ServingStatus;

/// A plan of a large cluster is some megabytes.
const LARGEST_MESSAGE: usize = 64 << 20;

/// The loop, as the services see it.
#[derive(Debug, Clone)]
pub struct Loop {
    pub inputs: mpsc::Sender<Input>,
    /// Dropped with the loop, which ends every watch.
    pub watchers: broadcast::WeakSender<Arc<v1::JobEvent>>,
    pub timeouts: Timeouts,
    pub clock: Clock,
}

/// Every service, with reflection and health beside them.
pub async fn services(to_loop: Loop) -> Result<Routes, tonic_reflection::server::Error> {
    let admin = v1::admin_server::AdminServer::new(admin::Admin::new(to_loop.clone()))
        .max_decoding_message_size(LARGEST_MESSAGE)
        .max_encoding_message_size(LARGEST_MESSAGE);
    let agent = v1::agent_server::AgentServer::new(agent::Agent::new(to_loop.clone()))
        .max_decoding_message_size(LARGEST_MESSAGE)
        .max_encoding_message_size(LARGEST_MESSAGE);
    let worker = v1::worker_server::WorkerServer::new(worker::Worker::new(to_loop))
        .max_decoding_message_size(LARGEST_MESSAGE)
        .max_encoding_message_size(LARGEST_MESSAGE);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(reknit_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (reporter, health) = tonic_health::server::health_reporter();
    for name in ["", "reknit.v1.Admin", "reknit.v1.Agent", "reknit.v1.Worker"] {
        reporter.set_service_status(name, ServingStatus::Serving).await;
    }
    let mut routes = Routes::builder();
    routes
        .add_service(admin)
        .add_service(agent)
        .add_service(worker)
        .add_service(health)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?);
    Ok(routes.routes())
}

/// A peer that has connected says who it is within this time.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
