//! The loop's dealings with agents that are not the engine's: who may open a session, which transitions are new, and
//! what operators ask of a node.

use super::Coordinator;
use crate::agents::{Asked, Greeting, Novelty};
use crate::failure::Failure;
use crate::input::{Ask, Reply, Wish};
use crate::rpc::convert;
use crate::sessions::{Connection, LATE, Session};
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
        if let Err(full) = self.known.has_room_for(&node) {
            tracing::warn!(%node, full, "an agent is refused");
            session.refuse(Status::resource_exhausted(full));
            return Ok(());
        }
        let other = self.known.get(&node).is_some_and(|agent| agent.instance != greeting.instance);
        if other && self.agents.is_open(&node) {
            // It tries again for as long as it lives.
            if self.known.refuses_first(&node, &greeting.instance) {
                tracing::warn!(%node, "a second agent under this name is refused");
            }
            session.refuse(Status::already_exists(format!(
                "another agent is connected as {node}: stop it, or give each its own --node"
            )));
            return Ok(());
        }
        let connection = Connection { instance: greeting.instance.clone(), number: greeting.connection };
        if self.agents.is_late(&node, &connection) {
            session.refuse(Status::aborted(LATE));
            return Ok(());
        }
        session.send(convert::agent_welcome(self.store.term(), &self.timeouts));
        self.agents.open(node.clone(), session, connection);
        // What was asked in the session before will not be answered any more.
        self.known.give_up(&node);
        self.known.greeted(&node, self.clock.now(), greeting);
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
                let (gpu, cause) = (&told.gpu, &told.verdict().cause);
                tracing::info!(%node, gpu, health = ?told.health(), cause, ?novelty, sequence, "GPU health");
                let index = self.state.index_of(&node, &GpuId(told.gpu.clone()));
                self.show(convert::gpu_health_changed(self.clock.now(), &node, index, told));
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
        let lifted = refusal.is_none();
        if lifted {
            self.feed(Event::RestoreGpu { gpu: gpu.clone() }).await?;
        }
        let answer = match (node, refusal) {
            (Some(node), _) => match self.quiesced(&node) {
                None => return self.send_ask(Ask { node, wish: Wish::Release { gpu }, reply }, lifted).await,
                Some(quiesced) => Err(refused_release(&gpu, lifted, &quiesced)),
            },
            (None, Some(refusal)) => Err(refusal),
            (None, None) => Ok(String::new()),
        };
        let _ = reply.send(answer);
        Ok(())
    }

    /// What an agent answers to an operator.
    pub(super) fn answered(&mut self, node: &NodeName, answer: v1::OrderDone) {
        let now = self.clock.now();
        let Some(Asked { wish, lifted, reply }) = self.known.answered(node, now, &answer) else {
            return;
        };
        let v1::OrderDone { request: _, ok, message } = answer;
        let _ = reply.send(match wish {
            _ if ok => Ok(message),
            // The agent held nothing back: lifting the operator's own drain was all there was to do.
            Wish::Release { gpu } if lifted && self.state.may_start(&gpu) => Ok(String::new()),
            Wish::Release { gpu } => {
                Err(refused_release(&gpu, lifted, &format!("agent of {node}: {message}")))
            }
            Wish::Quiesce { .. } | Wish::EndQuiesce | Wish::Probe | Wish::PowerLimit { .. } => {
                Err(Refusal::FailedPrecondition(format!("agent of {node}: {message}")))
            }
        });
    }

    /// That it is, until when, and what to do about it.
    fn quiesced(&self, node: &NodeName) -> Option<String> {
        let now = self.clock.now();
        let until = self.known.get(node)?.quiesced_until.filter(|until| *until > now)?;
        let seconds = (until.0 - now.0).div_ceil(1_000_000);
        Some(format!(
            "node {node} is quiesced for another {seconds} s: `reknit node resume {node}` ends that"
        ))
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
            return Some(Refusal::no_node(node));
        }
        if !self.agents.is_open(node) {
            let problem = format!("the agent of {node} is not connected: see `reknit node list`");
            return Some(Refusal::FailedPrecondition(problem));
        }
        match ask.wish {
            Wish::Quiesce { .. } => {}
            Wish::EndQuiesce => return None,
            Wish::Probe | Wish::PowerLimit { .. } | Wish::Release { .. } => {
                return self.quiesced(node).map(Refusal::FailedPrecondition);
            }
        }
        let workers = self.state.workers_on(node);
        if force || workers.is_empty() {
            return None;
        }
        Some(Refusal::FailedPrecondition(format!(
            "workers run on {node}, and faults of their GPUs would go unseen: {}; drain those GPUs first, or give --force",
            workers.join(", ")
        )))
    }

    async fn send_ask(&mut self, ask: Ask, lifted: bool) -> Result<(), Failure> {
        let node = ask.node.clone();
        tracing::info!(%node, wish = ?ask.wish, "an operator asks");
        let order = self.known.ask(ask, lifted);
        match self.order_agent(node, order) {
            Some(closed) => self.feed(closed).await,
            None => Ok(()),
        }
    }
}

/// `lifted`: the operator's own drain, meanwhile.
fn refused_release(gpu: &GpuId, lifted: bool, why: &str) -> Refusal {
    Refusal::FailedPrecondition(if lifted {
        format!("the operator's drain of GPU {gpu} is lifted, but it may not take part again yet: {why}")
    } else {
        why.to_owned()
    })
}
