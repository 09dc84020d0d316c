//! Carries out the engine's commands.

use super::Coordinator;
use super::prepares::Prepares;
use crate::failure::Failure;
use crate::input::Input;
use crate::rpc::convert::{self, Entry};
use crate::sessions::{Peer, Sent};
use reknit_engine::{Command, Event, JobName, Notice, Participant};
use reknit_layout::{Epoch, NodeName, Plan, PlanRequest, WorkerKey};
use reknit_proto::v1;
use std::sync::Arc;

impl Coordinator {
    /// What the engine must hear of it, if anything.
    pub(super) async fn carry_out(&mut self, command: Command) -> Result<Option<Event>, Failure> {
        match command {
            Command::Persist(record) => {
                let stored = self.store.put_job(&record).await;
                stored.map_err(Failure::Persist)?;
                self.specs.insert(record.name, record.spec);
                Ok(None)
            }
            Command::PersistIncident(incident) => {
                let stored = self.store.put_incident(&incident).await;
                stored.map_err(Failure::Persist)?;
                Ok(None)
            }
            Command::Spawn { node, job, worker, epoch } => {
                Ok(self.order_agent(node, convert::spawn(&job, &worker, epoch)))
            }
            Command::Fence { node, job, worker, epoch } => {
                Ok(self.order_agent(node, convert::fence(&job, &worker, epoch)))
            }
            Command::CloseEpoch { job, worker, epoch, reason } => {
                Ok(self.order_worker(job, worker, convert::close_epoch(epoch, reason)))
            }
            Command::Pause { job, worker, epoch } => {
                Ok(self.order_worker(job, worker, convert::pause(epoch)))
            }
            Command::Prepare { job, worker, epoch, plan, participants, resume_step, vote, checkpoint } => {
                let checkpoint = checkpoint.as_deref();
                let entry = Entry::Now { resume_step, vote, checkpoint };
                self.prepare(job, worker, epoch, &plan, &participants, entry)
            }
            Command::Join { job, worker, epoch, plan, participants } => {
                self.prepare(job, worker, epoch, &plan, &participants, Entry::Ahead)
            }
            Command::Resume { job, worker, epoch } => {
                Ok(self.order_worker(job, worker, convert::resume(epoch)))
            }
            Command::Stop { job, worker, epoch, reason } => {
                let order = convert::stop(self.store.term(), epoch, reason);
                Ok(self.order_worker(job, worker, order))
            }
            Command::Plan { job, epoch, spec, workers, topology, fresh } => {
                let work = move || {
                    reknit_layout::plan(&PlanRequest {
                        job: &spec,
                        topology: &topology,
                        epoch,
                        workers: &workers,
                        fresh,
                    })
                };
                self.plan(job, epoch, work);
                Ok(None)
            }
            Command::Forget { node } => {
                tracing::info!(%node, "forgotten: it has been gone for long, and no job needs it");
                self.agents.forget(&node);
                self.known.forget(&node);
                Ok(None)
            }
            Command::Notify { job, notice } => {
                self.notify(&job, notice);
                Ok(None)
            }
            Command::Announce(text) => {
                tracing::info!(text);
                self.show(convert::announcement(self.clock.now(), text));
                Ok(None)
            }
        }
    }

    fn prepare(
        &mut self,
        job: JobName,
        worker: WorkerKey,
        epoch: Epoch,
        plan: &Arc<Plan>,
        participants: &[Participant],
        entry: Entry<'_>,
    ) -> Result<Option<Event>, Failure> {
        let part = self.part_of(&job, &worker, plan, participants)?;
        let ticket = self.ticket(&job, epoch)?;
        Ok(self.order_worker(job, worker, convert::prepare(epoch, part, ticket, entry)))
    }

    /// The secret of an epoch.
    fn ticket(&mut self, job: &JobName, epoch: Epoch) -> Result<[u8; 32], Failure> {
        let ticket = self.tickets.of(job, epoch);
        let ticket = ticket
            .map_err(|error| Failure::Internal(format!("the kernel gives no random bytes: {error}")))?;
        ticket.ok_or_else(|| {
            Failure::Internal(format!("job {job}: epoch {epoch} was prepared after a newer one (ONE-EPOCH)"))
        })
    }

    /// What of the plan one worker is told.
    fn part_of(
        &mut self,
        job: &JobName,
        worker: &WorkerKey,
        plan: &Arc<Plan>,
        participants: &[Participant],
    ) -> Result<convert::PlanPart, Failure> {
        let bad = |error| Failure::Internal(format!("job {job}: the plan has no JSON form: {error}"));
        let prepares = match self.prepares.take().filter(|prepares| prepares.are_of(plan)) {
            Some(prepares) => prepares,
            None => Prepares::new(job, plan, participants).map_err(bad)?,
        };
        self.prepares.insert(prepares).of(worker).map_err(bad)
    }

    /// Off the loop. A planner that dies is answered by nobody, so the loop is told.
    fn plan<F>(&self, job: JobName, epoch: Epoch, work: F)
    where
        F: FnOnce() -> Result<Plan, reknit_layout::PlanError> + Send + 'static,
    {
        let inputs = self.inputs.clone();
        tokio::spawn(async move {
            let input = match tokio::task::spawn_blocking(work).await {
                Ok(result) => Input::Planned(Event::Planned { job, epoch, result }),
                Err(panic) => Input::PlannerDied(format!("job {job}, epoch {epoch}: {panic}")),
            };
            // The loop has ended when nobody takes it.
            inputs.tell(input).await;
        });
    }

    pub(super) fn order_agent(&mut self, node: NodeName, order: v1::AgentOrder) -> Option<Event> {
        let sent = self.agents.send(&node, order);
        let closed = report(sent, &Peer::Agent(node.clone()));
        if closed {
            self.known.give_up(&node);
        }
        closed.then_some(Event::AgentDisconnected { node })
    }

    fn order_worker(&mut self, job: JobName, worker: WorkerKey, order: v1::WorkerOrder) -> Option<Event> {
        let key = (job, worker);
        let sent = self.workers.send(&key, order);
        let (job, worker) = key;
        let peer = Peer::Worker(job.clone(), worker.clone());
        report(sent, &peer).then_some(Event::WorkerDisconnected { job, worker })
    }

    fn notify(&self, job: &JobName, notice: Notice) {
        match &notice {
            Notice::Step { .. } | Notice::Worker { .. } => {}
            Notice::Phase { phase, explanation } => {
                tracing::info!(%job, phase = convert::phase(*phase), explanation);
            }
            Notice::Layout { epoch, degrees, .. } => {
                tracing::info!(%job, %epoch, ?degrees, "layout committed");
            }
            Notice::Note(text) => tracing::info!(%job, text),
            Notice::Incident(incident) => {
                tracing::info!(%job, id = incident.id, signal = incident.signal, "incident");
            }
        }
        // Starts and halts tell of every single worker: not worth a message that nobody gets.
        if self.watchers.receiver_count() > 0 {
            self.show(convert::job_event(self.clock.now(), job, notice));
        }
    }

    pub(super) fn show(&self, event: v1::JobEvent) {
        // An error says that nobody watches.
        let _ = self.watchers.send(Arc::new(event));
    }
}

/// True when the session was closed by it.
fn report(sent: Sent, peer: &Peer) -> bool {
    match sent {
        Sent::Queued => false,
        Sent::NoSession => {
            tracing::debug!(%peer, "an order was dropped: not connected");
            false
        }
        Sent::Closed => {
            tracing::warn!(%peer, "does not take its orders; its session is closed");
            true
        }
    }
}
