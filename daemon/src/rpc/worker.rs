//! The stream of each worker.

use super::stream::{Orders, first, pump, tell};
use super::{Gate, convert};
use crate::input::Input;
use crate::sessions::{Peer, session};
use reknit_proto::v1;
use tonic::{Request, Response, Status, Streaming};

/// A worker takes its orders at once; a few epochs' worth may pile up while it is stuck.
const BACKLOG: usize = 64;

#[derive(Debug)]
pub struct Worker {
    gate: Gate,
}

impl Worker {
    pub fn new(gate: Gate) -> Self {
        Self { gate }
    }
}

#[tonic::async_trait]
impl v1::worker_server::Worker for Worker {
    type SessionStream = Orders<v1::WorkerOrder>;

    async fn session(
        &self,
        request: Request<Streaming<v1::WorkerReport>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let to_loop = self.gate.to_loop().await?;
        let mut inbound = request.into_inner();
        let (job, worker, connection, hello) = convert::worker_hello(first(&mut inbound).await?)?;
        let (session, end) = session(BACKLOG);
        let inputs = to_loop.inputs.clone();
        let opened =
            Input::WorkerOpened { job: job.clone(), worker: worker.clone(), connection, session, hello };
        tell(&inputs, opened).await?;
        let peer = Peer::Worker(job.clone(), worker.clone());
        let translate = move |report| convert::worker_report(&job, &worker, report);
        // A stuck worker is the engine's business: it misses its progress.
        let orders = pump(inbound, end, inputs, peer, None, translate);
        Ok(Response::new(orders))
    }
}
