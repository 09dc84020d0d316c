//! The stream of each node's agent.

use super::stream::{Orders, first, pump, tell};
use super::{Gate, convert};
use crate::input::Input;
use crate::sessions::{Peer, session};
use reknit_proto::v1;
use tonic::{Request, Response, Status, Streaming};

/// A node's GPUs may all be spawned and fenced several times before the agent takes the first order.
const BACKLOG: usize = 1024;
/// Heartbeats that may be missing in a row.
const MISSED_HEARTBEATS: u32 = 3;

#[derive(Debug)]
pub struct Agent {
    gate: Gate,
}

impl Agent {
    pub fn new(gate: Gate) -> Self {
        Self { gate }
    }
}

#[tonic::async_trait]
impl v1::agent_server::Agent for Agent {
    type SessionStream = Orders<v1::AgentOrder>;

    async fn session(
        &self,
        request: Request<Streaming<v1::AgentReport>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let to_loop = self.gate.to_loop().await?;
        let mut inbound = request.into_inner();
        let (node, hello, greeting) = convert::agent_hello(first(&mut inbound).await?)?;
        let (session, end) = session(BACKLOG);
        let inputs = to_loop.inputs.clone();
        let opened = Input::AgentOpened { node: node.clone(), session, hello, greeting };
        tell(&inputs, opened).await?;
        let silence = to_loop.timeouts.heartbeat() * MISSED_HEARTBEATS;
        let peer = Peer::Agent(node.clone());
        let translate = move |report| convert::agent_report(&node, report);
        let orders = pump(inbound, end, inputs, peer, Some(silence), translate);
        Ok(Response::new(orders))
    }
}
