//! The worker's own state machine: carries out the daemon's orders with a [`Rank`], on the training thread.

use crate::ahead::Summons;
use crate::messages::{Order, Phase, Prepare, Report, Timeouts, WorkerState};
use crate::rank::{Rank, RankError, Setting};
use crate::session::Outbox;
use crate::status::Status;
use reknit_layout::job::Dtype;
use reknit_layout::{Epoch, JobSpec, WorkerKey};
use reknit_model::{Real, Team};
use reknit_plane::{Element, Plane};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;
use tracing::{info, warn};

/// How long the training thread waits for its last checkpoint before it looks for orders again.
const LOOK: Duration = Duration::from_millis(20);

/// What the training thread works with.
#[derive(Clone)]
pub struct Desk {
    pub worker: WorkerKey,
    pub plane: Arc<dyn Plane>,
    pub aborts: Arc<crate::abort::Aborts>,
    pub status: Arc<Status>,
    pub outbox: Arc<Outbox>,
    /// The threads that compute.
    pub threads: Arc<Team>,
    pub summons: Arc<Summons>,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Desk(worker {})", self.worker)
    }
}

/// Runs until the daemon says stop. The error is one that ends the worker.
pub fn run(desk: &Desk, orders: &Receiver<Order>) -> Result<(), RankError> {
    loop {
        match orders.recv() {
            Ok(Order::Welcome { job, timeouts }) => {
                return match job.model.dtype {
                    // With bf16 what is kept and summed is f32 all the same.
                    Dtype::F32 | Dtype::Bf16 => serve::<f32>(desk, orders, *job, timeouts),
                    Dtype::F64 => serve::<f64>(desk, orders, *job, timeouts),
                };
            }
            Ok(Order::Stop { epoch, reason }) => {
                info!(%epoch, reason, "stopped");
                return Ok(());
            }
            Ok(
                Order::CloseEpoch { .. }
                | Order::Pause { .. }
                | Order::Join(_)
                | Order::Prepare(_)
                | Order::Resume { .. },
            ) => {
                warn!("an order came before the welcome; ignored");
            }
            Err(_) => return Err(session_lost()),
        }
    }
}

/// It outlives the training thread unless it panics.
fn session_lost() -> RankError {
    RankError::Refused("the thread that talks to the daemon has died".to_owned())
}

fn serve<T: Real + Element>(
    desk: &Desk,
    orders: &Receiver<Order>,
    job: JobSpec,
    timeouts: Timeouts,
) -> Result<(), RankError> {
    let setting = Setting {
        worker: desk.worker.clone(),
        job: Arc::new(job),
        timeouts,
        plane: Arc::clone(&desk.plane),
        aborts: Arc::clone(&desk.aborts),
        pace: Arc::clone(desk.status.pace()),
        outbox: Arc::clone(&desk.outbox),
        threads: Arc::clone(&desk.threads),
        chunk: crate::reshard::CHUNK,
    };
    let rank = Rank::<T>::new(setting)?;
    desk.summons.answer_with(Arc::clone(rank.joins()), Arc::clone(&desk.outbox));
    let mut control = Control { desk, rank, phase: Phase::Idle };
    control.enter(Phase::Idle);
    control.report_quiesced();
    control.run(orders)
}

struct Control<'a, T: Real> {
    desk: &'a Desk,
    rank: Rank<T>,
    phase: Phase,
}

/// Whether the worker goes on.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Continue,
    Exit,
}

impl<T: Real + Element> Control<'_, T> {
    fn run(mut self, orders: &Receiver<Order>) -> Result<(), RankError> {
        loop {
            let order = match self.phase {
                Phase::Training => match orders.try_recv() {
                    Ok(order) => Some(order),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => return Err(session_lost()),
                },
                Phase::Opening
                | Phase::Idle
                | Phase::Quiesced
                | Phase::Preparing
                | Phase::Ready
                | Phase::Completed => match orders.recv() {
                    Ok(order) => Some(order),
                    Err(_) => return Err(session_lost()),
                },
            };
            match order {
                Some(order) => {
                    if self.carry_out(order)? == Next::Exit {
                        return Ok(());
                    }
                }
                None if self.rank.finished() => self.await_last_checkpoint(),
                None => self.train()?,
            }
        }
    }

    fn carry_out(&mut self, order: Order) -> Result<Next, RankError> {
        match order {
            Order::Welcome { .. } => {}
            Order::CloseEpoch { epoch, reason } => self.close(epoch, &reason),
            Order::Pause { epoch } => {
                // The next vote carries the wish; where there is none to come, the worker says where it stands.
                let votes = self.phase == Phase::Training && !self.rank.finished();
                if !votes && epoch >= self.rank.epoch() {
                    self.pause();
                }
            }
            // It is joined on another thread; who trains does so meanwhile, and who does not allocates.
            Order::Join(prepare) => self.rank.allocate(&prepare),
            Order::Prepare(prepare) => self.prepare(&prepare)?,
            Order::Resume { epoch } => {
                if self.rank.resume(epoch) {
                    info!(%epoch, step = %self.rank.committed(), place = ?self.rank.place().map(|p| p.to_string()), "resumed");
                    self.enter(if self.rank.place().is_some() { Phase::Training } else { Phase::Quiesced });
                    self.complete_if_finished();
                } else {
                    warn!(%epoch, "asked to resume an epoch that is not prepared; ignored");
                }
            }
            Order::Stop { epoch, reason } => {
                info!(%epoch, reason, "stopped");
                self.rank.retire();
                return Ok(Next::Exit);
            }
        }
        Ok(Next::Continue)
    }

    /// ONE-EPOCH: an order about an older epoch than the current one changes nothing.
    fn close(&mut self, epoch: Epoch, reason: &str) {
        if epoch < self.rank.epoch() {
            return;
        }
        info!(%epoch, reason, "epoch closed");
        self.stop();
    }

    fn prepare(&mut self, prepare: &Prepare) -> Result<(), RankError> {
        let epoch = prepare.epoch;
        if epoch <= self.rank.epoch() {
            warn!(%epoch, current = %self.rank.epoch(), "asked to prepare an old epoch; ignored");
            return Ok(());
        }
        if self.rank.ready_epoch() == Some(epoch) {
            // Sent again to a new session; the state in its Hello said that all is ready.
            return Ok(());
        }
        self.rank.leave_epoch();
        let rolled = self.rank.roll_forward(prepare);
        self.phase = Phase::Preparing;
        // The rank knows the epoch to come only once all is prepared; who wants to end this must name it before.
        self.desk.status.set_state(WorkerState { ready_epoch: epoch, ..self.rank.state(Phase::Preparing) });
        let outcome = match rolled {
            Ok(committed) => {
                if let Some(committed) = committed {
                    info!(step = %committed.step, "rolled forward");
                    self.desk.outbox.push(Report::Committed(committed));
                }
                self.rank.prepare(prepare)
            }
            Err(error) => Err(error),
        };
        match outcome {
            Ok(prepared) => {
                info!(%epoch, step = %prepared.step, bytes_received = prepared.bytes_received, "ready");
                self.enter(Phase::Ready);
                self.desk.outbox.push(Report::Ready {
                    epoch,
                    step: prepared.step,
                    replicated_digest: prepared.replicated_digest,
                });
            }
            // Another try would find the same files.
            Err(error @ RankError::Corpus(_)) => return Err(error),
            Err(RankError::Load(error)) => {
                warn!(%epoch, %error, "cannot prepare");
                self.stop_quietly();
                self.desk
                    .outbox
                    .push(Report::NoCheckpoint { step: prepare.resume_step, reason: error.to_string() });
            }
            Err(error) => {
                warn!(%epoch, %error, "cannot prepare");
                let peer = error.plane().and_then(|error| error.peer.clone());
                self.stop_quietly();
                self.desk.outbox.push(Report::PrepareFailed { epoch, reason: error.to_string(), peer });
            }
        }
        Ok(())
    }

    fn train(&mut self) -> Result<(), RankError> {
        let epoch = self.rank.epoch();
        match self.rank.train_step(&|| self.desk.status.pause_asked(epoch)) {
            Ok(done) => {
                self.desk.status.set_committed(done.committed.step, done.committed.vote, done.computed);
                self.desk.outbox.push(Report::Committed(done.committed));
                self.complete_if_finished();
                if done.pause {
                    self.pause();
                }
                Ok(())
            }
            Err(error) => match error.plane() {
                Some(failed) => {
                    let expected = failed.peer.as_ref().and_then(|lost| self.rank.owned_without(lost));
                    if !self.desk.aborts.is_closed(epoch) {
                        warn!(%epoch, %error, "the data plane failed");
                        self.desk.outbox.push(Report::PlaneFailed {
                            epoch,
                            reason: failed.to_string(),
                            peer: failed.peer.clone(),
                        });
                    }
                    self.stop();
                    if let Some(owned) = expected {
                        self.rank.expect(&owned);
                    }
                    Ok(())
                }
                None => Err(error),
            },
        }
    }

    /// At a step boundary.
    fn pause(&mut self) {
        if self.phase == Phase::Training {
            self.rank.retire();
            self.enter(Phase::Quiesced);
        }
        self.report_quiesced();
    }

    /// It still counts as training: whoever is stopped as completed writes nothing more.
    fn await_last_checkpoint(&mut self) {
        if self.rank.has_saved_within(LOOK) {
            self.complete_if_finished();
        } else {
            // It does what is left to do.
            self.desk.status.pace().tick();
        }
    }

    fn complete_if_finished(&mut self) {
        if self.phase == Phase::Training && self.rank.finished() && self.rank.has_saved_within(Duration::ZERO)
        {
            self.enter(Phase::Completed);
            self.desk.outbox.push(Report::Completed {
                epoch: self.rank.epoch(),
                step: self.rank.committed(),
                replicated_digest: self.rank.replicated_digest(),
            });
        }
    }

    /// Leaves everything of any epoch, keeps the state, and says where it stands.
    fn stop(&mut self) {
        self.stop_quietly();
        self.report_quiesced();
    }

    fn stop_quietly(&mut self) {
        self.rank.leave_epoch();
        self.rank.discard_next();
        self.enter(if self.rank.shard().is_some() { Phase::Quiesced } else { Phase::Idle });
    }

    fn report_quiesced(&self) {
        self.desk.outbox.push(Report::Quiesced(self.rank.state(self.phase)));
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.desk.status.set_state(self.rank.state(phase));
    }
}
