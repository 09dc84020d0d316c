//! What the loop keeps of each node's agent beside the engine's view: who it is, how far its transitions were taken,
//! what it last said of its GPUs, and what operators have asked of it.

use crate::input::{Ask, Reply, Wish};
use reknit_engine::{Refusal, Time};
use reknit_layout::{GpuId, NodeName};
use reknit_proto::v1;
use std::collections::BTreeMap;
use std::time::Duration;

/// What an agent says of itself when it opens its session.
#[derive(Debug, Clone, Default)]
pub struct Greeting {
    pub instance: String,
    pub connection: u64,
    pub version: String,
    pub observability: v1::Observability,
    pub gaps: Vec<String>,
    /// Zero: it is not quiesced.
    pub quiesce_left: Duration,
    /// 0: it numbers nothing.
    pub next_sequence: u64,
    pub gpus: Vec<v1::Gpu>,
}

#[derive(Debug, Clone, Default)]
pub struct Agent {
    pub instance: String,
    pub version: String,
    pub observability: v1::Observability,
    pub gaps: Vec<String>,
    pub quiesced_until: Option<Time>,
    /// As its hello told them, with what it said of them since.
    pub gpus: BTreeMap<GpuId, v1::Gpu>,
    /// From the last heartbeat, and when that came.
    pub states: BTreeMap<GpuId, v1::GpuState>,
    pub heard: Time,
    /// The instance of another agent under this name that was refused last.
    refused: String,
    /// The highest number of a transition that was taken.
    taken: u64,
    /// Lower numbers are history: the hello told already what came of them.
    live_from: u64,
}

/// What a numbered transition is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Novelty {
    /// Taken before; its acknowledgement was lost.
    Repeated,
    /// Not heard of, but older than the last hello, which tells what came of it.
    History,
    New,
}

/// What an operator waits for.
#[derive(Debug)]
pub struct Asked {
    pub wish: Wish,
    /// The operator's own drain was lifted here, whatever the agent says.
    pub lifted: bool,
    pub reply: Reply<Result<String, Refusal>>,
}

/// Nodes that are known at once, far more than a cluster has: names that come and go must not fill the memory.
const MOST_NODES: usize = 1 << 16;

/// Every agent that was heard and is not forgotten, and the questions under way.
#[derive(Debug, Default)]
pub struct Agents {
    known: BTreeMap<NodeName, Agent>,
    asked: BTreeMap<u64, (NodeName, Asked)>,
    last_request: u64,
}

impl Agents {
    pub fn get(&self, node: &NodeName) -> Option<&Agent> {
        self.known.get(node)
    }

    /// Whether the node is known, or one more can be.
    ///
    /// # Errors
    /// Says how many are known.
    pub fn has_room_for(&self, node: &NodeName) -> Result<(), String> {
        if self.known.contains_key(node) || self.known.len() < MOST_NODES {
            return Ok(());
        }
        Err(format!(
            "{MOST_NODES} nodes are known, and no more are taken: one that is gone is forgotten after a day, and a \
             restart of the daemon forgets all that are away"
        ))
    }

    /// It has been gone for long.
    pub fn forget(&mut self, node: &NodeName) {
        self.known.remove(node);
    }

    /// Whether another agent under this name is refused for the first time since one was welcomed.
    pub fn refuses_first(&mut self, node: &NodeName, instance: &str) -> bool {
        let agent = self.known.get_mut(node);
        agent.is_none_or(|agent| std::mem::replace(&mut agent.refused, instance.to_owned()) != instance)
    }

    /// Its hello: the first of a session, or a later one.
    pub fn greeted(&mut self, node: &NodeName, now: Time, greeting: Greeting) {
        let agent = self.known.entry(node.clone()).or_default();
        // One that has lost its memory counts from somewhere else: its numbers say nothing about those taken.
        if greeting.next_sequence <= agent.taken {
            agent.taken = 0;
        }
        agent.live_from = greeting.next_sequence;
        agent.refused.clear();
        agent.instance = greeting.instance;
        agent.version = greeting.version;
        agent.observability = greeting.observability;
        agent.gaps = greeting.gaps;
        agent.quiesced_until = end_of_quiesce(now, greeting.quiesce_left);
        let gpus = greeting.gpus.into_iter();
        agent.gpus = gpus.map(|gpu| (GpuId(gpu.uuid.clone()), gpu)).collect();
        agent.states.retain(|gpu, _| agent.gpus.contains_key(gpu));
    }

    /// Whether a transition is to be taken. Numbers grow within one agent.
    pub fn take(&mut self, node: &NodeName, told: &v1::HealthTransition) -> Novelty {
        let agent = self.known.entry(node.clone()).or_default();
        if told.sequence <= agent.taken {
            return Novelty::Repeated;
        }
        agent.taken = told.sequence;
        if told.sequence < agent.live_from {
            return Novelty::History;
        }
        if let Some(gpu) = agent.gpus.get_mut(&GpuId(told.gpu.clone())) {
            gpu.verdict.clone_from(&told.verdict);
        }
        Novelty::New
    }

    pub fn heartbeat(&mut self, node: &NodeName, now: Time, beat: v1::AgentHeartbeat) {
        let Some(agent) = self.known.get_mut(node) else {
            return;
        };
        agent.heard = now;
        agent.observability = beat.observability();
        agent.gaps = beat.gaps;
        agent.quiesced_until = end_of_quiesce(now, Duration::from_millis(beat.quiesce_left_ms));
        let states = beat.gpus.into_iter().map(|state| (GpuId(state.uuid.clone()), state));
        agent.states = states.filter(|(gpu, _)| agent.gpus.contains_key(gpu)).collect();
        for (gpu, state) in &agent.states {
            if let Some(gpu) = agent.gpus.get_mut(gpu) {
                gpu.risk = state.risk;
            }
        }
    }

    /// Keeps the asker until the agent answers; returns the order to send.
    pub fn ask(&mut self, ask: Ask, lifted: bool) -> v1::AgentOrder {
        let Ask { node, wish, reply } = ask;
        // Of askers who went away.
        self.asked.retain(|_, (_, asked)| !asked.reply.is_closed());
        self.last_request += 1;
        let request = self.last_request;
        let order = order(request, wish.clone());
        self.asked.insert(request, (node, Asked { wish, lifted, reply }));
        order
    }

    /// Who waits for this answer. One that nobody waits for, or of another node's agent, is dropped.
    pub fn answered(&mut self, node: &NodeName, now: Time, answer: &v1::OrderDone) -> Option<Asked> {
        self.asked.get(&answer.request).filter(|(of, _)| of == node)?;
        let (_, asked) = self.asked.remove(&answer.request)?;
        if let Some(agent) = self.known.get_mut(node).filter(|_| answer.ok) {
            // The next heartbeat says so too, later.
            match asked.wish {
                Wish::Quiesce { seconds } => {
                    agent.observability = v1::Observability::Quiesced;
                    agent.quiesced_until = end_of_quiesce(now, Duration::from_secs(seconds.into()));
                }
                Wish::EndQuiesce => agent.quiesced_until = None,
                Wish::Probe | Wish::PowerLimit { .. } | Wish::Release { .. } => {}
            }
        }
        Some(asked)
    }

    /// Its session has ended: what it was asked will not be answered any more.
    pub fn give_up(&mut self, node: &NodeName) {
        let (ended, others) =
            std::mem::take(&mut self.asked).into_iter().partition(|(_, (of, _))| of == node);
        self.asked = others;
        for (_, (_, asked)) in BTreeMap::into_iter(ended) {
            let _ = asked.reply.send(if asked.lifted {
                Ok(String::new())
            } else {
                Err(Refusal::FailedPrecondition(format!(
                    "the session of {node}'s agent ended before it answered; whether it was done is unknown: look \
                     with `reknit node list` and try again"
                )))
            });
        }
    }
}

fn end_of_quiesce(now: Time, left: Duration) -> Option<Time> {
    (!left.is_zero()).then(|| now.after(left))
}

fn order(request: u64, wish: Wish) -> v1::AgentOrder {
    use v1::agent_order::Order;
    let order = match wish {
        Wish::Quiesce { seconds } => Order::Quiesce(v1::Quiesce { request, seconds }),
        Wish::EndQuiesce => Order::EndQuiesce(v1::EndQuiesce { request }),
        Wish::Probe => Order::ProbeNow(v1::ProbeNow { request }),
        Wish::PowerLimit { gpu, limit_mw, lease_seconds } => {
            Order::SetPowerLimit(v1::SetPowerLimit { request, gpu: gpu.0, limit_mw, lease_seconds })
        }
        Wish::Release { gpu } => Order::ReleaseGpu(v1::ReleaseGpu { request, gpu: gpu.0 }),
    };
    v1::AgentOrder { order: Some(order) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transition(sequence: u64) -> v1::HealthTransition {
        v1::HealthTransition { sequence, gpu: "GPU-0".to_owned(), ..v1::HealthTransition::default() }
    }

    fn greeting(next_sequence: u64) -> Greeting {
        Greeting { next_sequence, ..Greeting::default() }
    }

    #[test]
    fn each_transition_is_taken_once_and_one_before_the_hello_is_history() {
        let (mut agents, node) = (Agents::default(), NodeName::from("n0"));
        agents.greeted(&node, Time(0), greeting(10));
        let taken = [8, 9, 9, 10, 10, 11].map(|number| agents.take(&node, &transition(number)));
        use Novelty::{History, New, Repeated};
        assert_eq!(taken, [History, History, Repeated, New, Repeated, New]);
        // The same agent again: its acknowledgements were lost.
        agents.greeted(&node, Time(0), greeting(13));
        let taken = [10, 11, 12, 13].map(|number| agents.take(&node, &transition(number)));
        assert_eq!(taken, [Repeated, Repeated, History, New]);
        // It lost its state folder, and its clock is behind.
        agents.greeted(&node, Time(0), greeting(5));
        assert_eq!(agents.take(&node, &transition(5)), New);
    }

    #[test]
    fn one_node_too_many_is_refused_until_another_is_forgotten() {
        let mut agents = Agents::default();
        let node = |number: usize| NodeName(format!("n{number}"));
        for number in 0..MOST_NODES {
            assert_eq!(agents.has_room_for(&node(number)), Ok(()));
            agents.greeted(&node(number), Time(0), greeting(1));
        }
        let refused = agents.has_room_for(&node(MOST_NODES)).unwrap_err();
        assert!(refused.contains("65536 nodes are known"), "{refused}");
        assert_eq!(agents.has_room_for(&node(7)), Ok(()), "one that is known may come back");
        agents.forget(&node(7));
        assert!(agents.get(&node(7)).is_none());
        assert_eq!(agents.has_room_for(&node(MOST_NODES)), Ok(()));
    }

    #[test]
    fn an_answer_goes_to_who_asked_and_only_from_the_node_that_was_asked() {
        let mut agents = Agents::default();
        let (node, other) = (NodeName::from("n0"), NodeName::from("n1"));
        let mut ask = |wish, done| {
            let (reply, answer) = tokio::sync::oneshot::channel();
            (agents.ask(Ask { node: node.clone(), wish, reply }, done), answer)
        };
        let (_, mut first) = ask(Wish::Probe, false);
        let (order, mut second) = ask(Wish::Quiesce { seconds: 60 }, false);
        let (_, mut third) = ask(Wish::Release { gpu: GpuId::from("GPU-0") }, true);
        let Some(v1::agent_order::Order::Quiesce(quiesce)) = order.order else { panic!("{order:?}") };
        let answer = v1::OrderDone { request: quiesce.request, ok: true, message: String::new() };
        agents.greeted(&node, Time(0), greeting(1));
        let asked = agents.answered(&node, Time(1), &answer).unwrap();
        assert_eq!(asked.wish, Wish::Quiesce { seconds: 60 });
        assert_eq!(agents.get(&node).unwrap().quiesced_until, Some(Time(60_000_001)));
        assert!(agents.answered(&node, Time(1), &answer).is_none(), "answered once");
        drop(asked);
        assert!(second.try_recv().is_err());
        agents.give_up(&other);
        assert!(first.try_recv().is_err(), "still under way");
        agents.give_up(&node);
        assert!(first.try_recv().unwrap().unwrap_err().to_string().contains("is unknown"));
        assert_eq!(third.try_recv().unwrap(), Ok(String::new()));
    }
}
