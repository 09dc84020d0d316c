//! The loop: the one task that owns the state.

mod agents;
mod orders;
mod prepares;

use crate::agents::Agents;
use crate::clock::Clock;
use crate::failure::Failure;
use crate::input::{Ask, Input, Inputs, Reply, Request, Said, Wish};
use crate::rpc::convert;
use crate::sessions::{Connection, LATE, Peer, Session, SessionId, Sessions};
use crate::store::{Store, StoreError};
use crate::tickets::Tickets;
use prepares::Prepares;
use reknit_engine::{Event, Hold, JobName, JobView, Refusal, State, Time, Timeouts, step};
use reknit_layout::{Epoch, JobSpec, NodeName, WorkerKey};
use reknit_proto::v1;
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{broadcast, mpsc};
use tokio::time::{Instant, sleep_until};
use tonic::Status;

/// Events that a watcher may lag behind before it misses some.
pub const WATCH_BACKLOG: usize = 4096;
/// Commands that are carried out before the streams get their turn.
const ORDERS_AT_ONCE: usize = 256;
/// Between two ticks: the loop never spins on a deadline that stays in the past.
const TICK_PAUSE: Duration = Duration::from_millis(1);
/// The loop wakes at least so often, to notice that it stood still.
const PULSE: Duration = Duration::from_secs(1);

/// Feeds the engine and carries out its commands, in order, one event after the other.
#[derive(Debug)]
pub struct Coordinator {
    state: State,
    timeouts: Timeouts,
    clock: Clock,
    store: Arc<dyn Store>,
    agents: Sessions<NodeName, v1::AgentOrder>,
    known: Agents,
    workers: Sessions<(JobName, WorkerKey), v1::WorkerOrder>,
    tickets: Tickets,
    /// As last stored.
    specs: BTreeMap<JobName, JobSpec>,
    /// Of the plan that was last prepared.
    prepares: Option<Prepares>,
    watchers: broadcast::Sender<Arc<v1::JobEvent>>,
    inputs: Inputs,
    /// When what is in hand came: never backwards.
    now: Time,
    hold: Hold,
}

impl Coordinator {
    /// Loads the store and tells the engine, whose state is new, what it holds. `inputs` leads back to [`Self::run`].
    pub async fn start(
        state: State,
        timeouts: Timeouts,
        clock: Clock,
        store: Arc<dyn Store>,
        watchers: broadcast::Sender<Arc<v1::JobEvent>>,
        inputs: Inputs,
    ) -> Result<Self, Failure> {
        let stored = store.load().await.map_err(Failure::Open)?;
        tracing::info!(jobs = stored.jobs.len(), incidents = stored.incidents.len(), "store loaded");
        let specs = stored.jobs.iter();
        let specs = specs.map(|job| (job.name.clone(), job.spec.clone()));
        let mut coordinator = Self {
            state,
            timeouts,
            clock,
            store,
            agents: Sessions::default(),
            known: Agents::default(),
            workers: Sessions::default(),
            tickets: Tickets::default(),
            specs: specs.collect(),
            prepares: None,
            watchers,
            inputs,
            now: clock.now(),
            hold: Hold::default(),
        };
        coordinator.feed(Event::Started { jobs: stored.jobs, incidents: stored.incidents }).await?;
        Ok(coordinator)
    }

    /// Until `stop`, or until this daemon must not go on. Ends every session.
    pub async fn run(
        mut self,
        mut inputs: mpsc::Receiver<(Time, Input)>,
        stop: impl Future<Output = ()>,
    ) -> Result<(), Failure> {
        let store = self.store.clone();
        let mut lost = std::pin::pin!(store.leadership_lost());
        let mut stop = std::pin::pin!(stop);
        let mut earliest_tick = Instant::now();
        let limit = self.timeouts.suspicion() / 2;
        loop {
            let deadline = self.state.next_deadline();
            // What has come before the deadline is heard before it passes. A flood of inputs does not put it off: the engine
            // sees the time at which each of them came.
            let due = deadline.map(|deadline| Instant::now() + self.clock.until(self.hold.wake(deadline)));
            let due = due.map(|due| due.max(earliest_tick));
            // Whoever waits for longer than this did not run.
            let pulse = Instant::now() + PULSE;
            let in_time = move || {
                let late = pulse.elapsed();
                if late > limit { Err(Failure::StoodStill { late, limit }) } else { Ok(()) }
            };
            tokio::select! {
                biased;
                () = &mut stop => return Ok(()),
                error = &mut lost => return Err(Failure::Leadership(error)),
                input = inputs.recv() => match input {
                    Some((came, input)) => {
                        in_time()?;
                        self.now = self.hold.time(self.clock.now(), self.now, deadline, came);
                        self.take(input).await?;
                    }
                    None => return Ok(()),
                },
                () = sleep_until(due.map_or(pulse, |due| due.min(pulse))) => {
                    in_time()?;
                    if due.is_some_and(|due| due <= Instant::now()) {
                        let now = self.clock.now();
                        self.now = self.hold.time(now, self.now, deadline, now);
                        if deadline.is_some_and(|deadline| deadline <= self.now) {
                            self.feed(Event::Tick).await?;
                        }
                        earliest_tick = Instant::now() + TICK_PAUSE;
                    }
                }
            }
        }
    }

    /// An old leader obeys, tells and answers nobody any more.
    async fn take(&mut self, input: Input) -> Result<(), Failure> {
        self.still_leads()?;
        match input {
            Input::AgentOpened { node, session, hello, greeting } => {
                self.open_agent(node, session, hello, greeting).await
            }
            Input::WorkerOpened { job, worker, connection, session, hello } => {
                self.open_worker(job, worker, connection, session, hello).await
            }
            Input::Said { peer, session, said } => match said {
                _ if !self.is_current(&peer, session) => Ok(()),
                Said::Event(event) => {
                    if let Event::WorkerExited { job, worker, .. } = &event {
                        self.workers.forget(&(job.clone(), worker.clone()));
                    }
                    self.feed(event).await
                }
                Said::Hello(event, greeting) => match peer {
                    Peer::Agent(node) => {
                        self.known.greeted(&node, self.clock.now(), *greeting);
                        self.feed(event).await
                    }
                    Peer::Worker(..) => Ok(()),
                },
                Said::Transition(event, told) => match peer {
                    Peer::Agent(node) => self.transition(node, event, *told).await,
                    Peer::Worker(..) => Ok(()),
                },
                Said::Heartbeat(beat) => {
                    if let Peer::Agent(node) = peer {
                        self.known.heartbeat(&node, self.clock.now(), beat);
                    }
                    Ok(())
                }
                Said::Done(answer) => {
                    if let Peer::Agent(node) = peer {
                        self.answered(&node, answer);
                    }
                    Ok(())
                }
            },
            Input::Closed { peer, session } => match self.close(peer, session) {
                Some(event) => self.feed(event).await,
                None => Ok(()),
            },
            Input::Planned(event) => self.feed(event).await,
            Input::PlannerDied(problem) => Err(Failure::Internal(format!("the planner died: {problem}"))),
            Input::Asked(request) => self.answer(request).await,
        }
    }

    /// To be asked after every wait, before anything is ordered: this process may have slept through its lease.
    fn still_leads(&self) -> Result<(), Failure> {
        if self.store.leads() {
            return Ok(());
        }
        let problem = "the lease ended unnoticed".to_owned();
        Err(Failure::Leadership(StoreError::LeadershipLost { problem }))
    }

    /// Steps the engine until nothing is left to tell it. Whoever gets an `Ok` still leads.
    async fn feed(&mut self, event: Event) -> Result<(), Failure> {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let commands = step(&mut self.state, self.now, event);
            for (number, command) in commands.into_iter().enumerate() {
                self.still_leads()?;
                events.extend(self.carry_out(command).await?);
                // Orders to thousands leave while the rest is made, and what peers say is read meanwhile.
                if number % ORDERS_AT_ONCE == ORDERS_AT_ONCE - 1 {
                    tokio::task::yield_now().await;
                }
            }
        }
        self.still_leads()
    }

    async fn open_worker(
        &mut self,
        job: JobName,
        worker: WorkerKey,
        number: u64,
        session: Session<v1::WorkerOrder>,
        hello: Event,
    ) -> Result<(), Failure> {
        let Some(spec) = self.specs.get(&job) else {
            if self.specs.is_empty() {
                // More likely the wrong store than a superfluous worker, which trains on; the engine tells of it.
                tracing::debug!(%job, %worker, "a worker, and the store knows no job: its session is ended");
                return Ok(());
            }
            tracing::warn!(%job, %worker, "a worker of an unknown job is told to stop");
            let reason = format!("this daemon knows no job {job}");
            session.send(convert::stop(self.store.term(), Epoch(0), reason));
            return Ok(());
        };
        // A worker's process is told apart by its key.
        let (key, connection) = ((job, worker), Connection { instance: String::new(), number });
        if self.workers.is_late(&key, &connection) {
            session.refuse(Status::aborted(LATE));
            return Ok(());
        }
        session.send(convert::worker_welcome(self.store.term(), spec, &self.timeouts));
        self.workers.open(key, session, connection);
        self.feed(hello).await
    }

    fn is_current(&self, peer: &Peer, session: SessionId) -> bool {
        match peer {
            Peer::Agent(node) => self.agents.is_current(node, session),
            Peer::Worker(job, worker) => {
                let key = (job.clone(), worker.clone());
                self.workers.is_current(&key, session)
            }
        }
    }

    /// What the engine must hear of it; nothing when a newer session has replaced this one.
    fn close(&mut self, peer: Peer, session: SessionId) -> Option<Event> {
        match peer {
            Peer::Agent(node) => {
                let closed = self.agents.close(&node, session);
                if closed {
                    self.known.give_up(&node);
                }
                closed.then_some(Event::AgentDisconnected { node })
            }
            Peer::Worker(job, worker) => {
                let key = (job, worker);
                let closed = self.workers.close(&key, session);
                if !self.state.has_worker(&key.0, &key.1) {
                    self.workers.forget(&key);
                }
                let (job, worker) = key;
                closed.then_some(Event::WorkerDisconnected { job, worker })
            }
        }
    }

    async fn answer(&mut self, request: Request) -> Result<(), Failure> {
        // A caller that has gone does not need its answer.
        match request {
            Request::Submit(spec, reply) => {
                let (job, refusal) = (JobName(spec.name.clone()), self.state.refuse_submit(&spec));
                self.wish(refusal, Event::Submit { spec }, &job, reply).await?;
            }
            Request::RebalanceJob(job, reply) => {
                let refusal = self.state.refuse_rebalance(&job);
                self.wish(refusal, Event::Rebalance { job: job.clone() }, &job, reply).await?;
            }
            Request::RestoreJob(job, step, reply) => {
                let refusal = self.state.refuse_restore_job(&job, step);
                self.wish(refusal, Event::RestoreJob { job: job.clone(), step }, &job, reply).await?;
            }
            Request::StopJob(job, reply) => {
                let refusal = self.state.refuse_stop(&job);
                self.wish(refusal, Event::StopJob { job: job.clone() }, &job, reply).await?;
            }
            Request::DrainGpu(gpu, reply) => {
                let answer = match self.state.refuse_drain(&gpu) {
                    Some(refusal) => Err(refusal),
                    None => Ok(self.feed(Event::DrainGpu { gpu }).await?),
                };
                let _ = reply.send(answer);
            }
            Request::RestoreGpu(gpu, reply) => self.restore_gpu(gpu, reply).await?,
            Request::Agent { ask, force } => self.ask_agent(ask, force).await?,
            Request::SetPowerLimit { gpu, limit_mw, lease_seconds, reply } => {
                let Some(node) = self.state.node_of(&gpu) else {
                    drop(reply.send(Err(Refusal::no_gpu(&gpu))));
                    return Ok(());
                };
                let wish = Wish::PowerLimit { gpu, limit_mw, lease_seconds };
                self.ask_agent(Ask { node, wish, reply }, true).await?;
            }
            Request::GetJob(job, reply) => drop(reply.send(self.state.job(&job))),
            Request::ListJobs(reply) => drop(reply.send(self.state.jobs())),
            Request::ListNodes(reply) => {
                let now = self.clock.now();
                let nodes = self.state.nodes().into_iter().map(|view| {
                    let agent = self.known.get(&view.name);
                    convert::node(view, agent, now)
                });
                let _ = reply.send(nodes.collect());
            }
            Request::ListIncidents(job, reply) => {
                let known = self.state.job(&job).is_some();
                let _ = reply.send(known.then(|| self.state.incidents(&job)));
            }
        }
        Ok(())
    }

    /// What an operator wishes of a job is carried out, unless the engine refuses; answered with the job as it is then.
    async fn wish(
        &mut self,
        refusal: Option<Refusal>,
        event: Event,
        job: &JobName,
        reply: Reply<Result<Option<JobView>, Refusal>>,
    ) -> Result<(), Failure> {
        let answer = match refusal {
            Some(refusal) => Err(refusal),
            None => {
                self.feed(event).await?;
                Ok(self.state.job(job))
            }
        };
        let _ = reply.send(answer);
        Ok(())
    }
}
