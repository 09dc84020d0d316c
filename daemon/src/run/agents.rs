//! The loop's dealings with agents that are not the engine's: who may open a session, which transitions are new, and
//! what operators ask of a node.

use super::Coordinator;
use crate::agents::{Greeting, Novelty};
use crate::failure::Failure;
use crate::input::{Ask, Reply, Wish};
use crate::rpc::convert;
use crate::sessions::Session;
use reknit_engine::{Event, Refusal};
use reknit_layout::{GpuId, NodeName};
use reknit_proto::v1;
use tonic::Status;

impl Coordinator {
    /// A second agent under one name is refused for as long as the first is heard; one that has fallen silent has no
    /// session any more.
    pub(super) async fn open_agent(
        &mut self,
        node: NodeName,
        session: Session<v1::AgentOrder>,
        hello: Event,
        greeting: Greeting,
    ) -> Result<(), Failure> {
        let other = self.known.get(&node).is_some_and(|agent| agent.instance != greeting.instance);
        if other && self.agents.is_open(&node) {
            tracing::warn!(%node, "a second agent under this name is refused");
            session.refuse(Status::already_exists(format!(
                "another agent is connected as {node}: stop it, or give each its own --node"
            )));
            return Ok(());
        }
        session.send(convert::agent_welcome(&self.timeouts));
        self.agents.open(node.clone(), session);
        self.known.opened(&node, greeting);
        self.feed(hello).await
    }

    /// Taken once, and acknowledged as often as it comes.
    pub(super) async fn transition(
        &mut self,
        node: NodeName,
        event: Event,
        told: v1::HealthTransition,
    ) -> Result<(), Failure> {
        let sequence = told.sequence;
        let novelty = self.known.take(&node, &told);
        match novelty {
            Novelty::Repeated => {}
            Novelty::History | Novelty::New => {
                let (gpu, cause) = (&told.gpu, &told.cause);
                tracing::info!(%node, gpu, health = ?told.health(), cause, ?novelty, sequence, "GPU health");
                self.show(convert::gpu_health_changed(self.clock.now(), &node, told));
            }
        }
        match novelty {
            Novelty::Repeated | Novelty::History => {}
            Novelty::New => self.feed(event).await?,
        }
        match self.order_agent(node, convert::health_ack(sequence)) {
            Some(closed) => self.feed(closed).await,
            None => Ok(()),
        }
    }

    /// An operator's word counts here, and at the agent, which may hold the GPU back for reasons of its own.
    pub(super) async fn restore_gpu(
        &mut self,
        gpu: GpuId,
        reply: Reply<Result<String, Refusal>>,
    ) -> Result<(), Failure> {
        let refusal = self.state.refuse_restore(&gpu);
        let node = self.state.node_of(&gpu).filter(|node| self.agents.is_open(node));
        let done = refusal.is_none();
        if done {
            self.feed(Event::RestoreGpu { gpu: gpu.clone() }).await?;
        }
        match (node, refusal) {
            (Some(node), _) => self.send_ask(Ask { node, wish: Wish::Release { gpu }, reply }, done).await,
            (None, Some(refusal)) => {
                let _ = reply.send(Err(refusal));
                Ok(())
            }
            (None, None) => {
                let _ = reply.send(Ok(String::new()));
                Ok(())
            }
        }
    }

    pub(super) async fn ask_agent(&mut self, ask: Ask, force: bool) -> Result<(), Failure> {
        match self.refuse_ask(&ask, force) {
            Some(refusal) => {
                let _ = ask.reply.send(Err(refusal));
                Ok(())
            }
            None => self.send_ask(ask, false).await,
        }
    }

    fn refuse_ask(&self, ask: &Ask, force: bool) -> Option<Refusal> {
        let node = &ask.node;
        if self.known.get(node).is_none() {
            return Some(Refusal::NotFound(format!("no agent was ever heard of a node {node}")));
        }
        if !self.agents.is_open(node) {
            let problem = format!("the agent of {node} is not connected: see `reknit node list`");
            return Some(Refusal::FailedPrecondition(problem));
        }
        let blinding = match ask.wish {
            Wish::Quiesce { .. } => true,
            Wish::EndQuiesce | Wish::Probe | Wish::PowerLimit { .. } | Wish::Release { .. } => false,
        };
        let workers = self.state.workers_on(node);
        if !blinding || force || workers.is_empty() {
            return None;
        }
        let workers: Vec<_> = workers.iter().map(|(job, key)| format!("{key} of job {job}")).collect();
        Some(Refusal::FailedPrecondition(format!(
            "workers run on {node}, and faults of their GPUs would go unseen: {}; drain those GPUs first, or give --force",
            workers.join(", ")
        )))
    }

    async fn send_ask(&mut self, ask: Ask, done: bool) -> Result<(), Failure> {
        let node = ask.node.clone();
        tracing::info!(%node, wish = ?ask.wish, "an operator asks");
        let order = self.known.ask(ask, done);
        match self.order_agent(node, order) {
            Some(closed) => self.feed(closed).await,
            None => Ok(()),
        }
    }
}
