//! A simulated worker: the whole protocol of a training worker over a real session, with a model in the place of the
//! training. All workers commit the steps that the fleet's clock gives.

use super::fleet::{Fleet, endpoint, node_name};
use reknit_layout::{GpuId, Holding, Incarnation, Layout, Step, WorkerKey};
use reknit_proto::Message;
use reknit_proto::v1::worker_client::WorkerClient;
use reknit_proto::v1::worker_order::Order;
use reknit_proto::v1::worker_report::Report;
use reknit_proto::v1::worker_state::Phase;
use reknit_proto::v1::{self, WorkerReport};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval};
use tokio_stream::wrappers::ReceiverStream;

/// Runs until it is told to stop or `killed` is dropped.
pub(super) async fn run(
    fleet: Arc<Fleet>,
    node: u32,
    index: u32,
    key: v1::WorkerKey,
    killed: oneshot::Receiver<()>,
) {
    tokio::select! {
        _ = killed => {}
        ended = Worker::serve(&fleet, node, index, &key) => {
            if let Err(problem) = ended {
                fleet.fail(format!("worker {}#{}: {problem}", key.gpu, key.incarnation));
            }
        }
    }
}

struct Worker<'a> {
    fleet: &'a Fleet,
    key: WorkerKey,
    reports: mpsc::Sender<WorkerReport>,
    state: v1::WorkerState,
    /// What it trains with, and what it has prepared.
    layout: Option<Arc<Layout>>,
    next: Option<(u64, u64, Option<Arc<Layout>>)>,
}

impl Worker<'_> {
    async fn serve(fleet: &Fleet, node: u32, index: u32, key: &v1::WorkerKey) -> Result<(), String> {
        let failed = |status: tonic::Status| status.message().to_owned();
        let number = (node * fleet.gpus + index) as usize;
        let channel = fleet.channels[number % fleet.channels.len()].clone();
        let (reports, stream) = mpsc::channel(64);
        let state = v1::WorkerState { phase: Phase::Idle.into(), ..v1::WorkerState::default() };
        let own = WorkerKey { gpu: GpuId(key.gpu.clone()), incarnation: Incarnation(key.incarnation) };
        let mut worker = Worker { fleet, key: own, reports, state, layout: None, next: None };
        let hello = v1::WorkerHello {
            worker: Some(key.clone()),
            node: node_name(node),
            endpoint: Some(endpoint(node, index)),
            pid: index + 1,
            connection: 1,
            state: Some(worker.state.clone()),
        };
        worker.send(Report::Hello(hello)).await?;
        let mut orders = WorkerClient::new(channel)
            .session(ReceiverStream::new(stream))
            .await
            .map_err(failed)?
            .into_inner();
        let (plane, mut plane_fails) = mpsc::unbounded_channel();
        fleet.tally().planes.insert(key.gpu.clone(), plane);
        let mut steps = fleet.step.subscribe();
        let mut progress = interval(Duration::from_secs(1));
        let mut ticks = 0;
        loop {
            tokio::select! {
                order = orders.message() => match order.map_err(failed)?.and_then(|order| order.order) {
                    Some(Order::Welcome(welcome)) => {
                        let every = welcome.timeouts.unwrap_or_default().progress_ms.max(1);
                        progress = interval(Duration::from_millis(every.into()));
                        progress.set_missed_tick_behavior(MissedTickBehavior::Delay);
                    }
                    Some(Order::Stop(_)) => return Ok(()),
                    Some(order) => worker.obey(order).await?,
                    None => return Err("the daemon ended its session".to_owned()),
                },
                _ = steps.changed() => worker.commit().await?,
                Some(()) = plane_fails.recv() => {
                    if worker.trains() {
                        let failed = v1::PlaneFailed {
                            epoch: worker.state.epoch,
                            reason: "a peer is gone".to_owned(),
                            ..v1::PlaneFailed::default()
                        };
                        worker.send(Report::PlaneFailed(failed)).await?;
                        worker.quiesce().await?;
                    }
                }
                _ = progress.tick() => {
                    ticks += 1;
                    if worker.trains() {
                        let (epoch, step) = (worker.state.epoch, worker.state.committed_step);
                        let report = v1::Progress { epoch, step, ticks, ..v1::Progress::default() };
                        worker.send(Report::Progress(report)).await?;
                    }
                }
            }
        }
    }

    async fn send(&self, report: Report) -> Result<(), String> {
        self.fleet.tally().worker_reports += 1;
        let sent = self.reports.send(WorkerReport { report: Some(report) }).await;
        sent.map_err(|_| "its session has ended".to_owned())
    }

    fn trains(&self) -> bool {
        self.state.phase() == Phase::Training
    }

    async fn obey(&mut self, order: Order) -> Result<(), String> {
        match order {
            Order::CloseEpoch(close) => {
                self.fleet.note(|tally| tally.stops.push(Instant::now()));
                // Whoever has seen the plane fail has answered already.
                if self.trains() && close.epoch >= self.state.epoch {
                    self.quiesce().await?;
                }
            }
            Order::Pause(_) => {
                self.fleet.note(|tally| tally.stops.push(Instant::now()));
                self.quiesce().await?;
            }
            Order::Join(join) => self.send(Report::Joined(v1::Joined { epoch: join.epoch })).await?,
            Order::Prepare(prepare) => {
                let bytes = prepare.encoded_len() as u64;
                self.fleet.note(|tally| {
                    tally.prepares.push(Instant::now());
                    tally.prepare_bytes += bytes;
                });
                self.prepare(prepare).await?;
            }
            Order::Resume(resume) => {
                self.resume(resume.epoch)?;
                self.fleet.note(|tally| tally.resumes.push(Instant::now()));
            }
            Order::Welcome(_) | Order::Stop(_) => {}
        }
        Ok(())
    }

    /// Everyone stops after the same step: the newest of the fleet's clock, which stands still meanwhile.
    async fn quiesce(&mut self) -> Result<(), String> {
        self.commit().await?;
        self.state.phase = Phase::Quiesced.into();
        self.state.holding = self.holding()?;
        self.send(Report::Quiesced(v1::Quiesced { state: Some(self.state.clone()) })).await
    }

    async fn prepare(&mut self, prepare: v1::Prepare) -> Result<(), String> {
        let packed = prepare.layout;
        let layout = (!packed.is_empty()).then(|| self.fleet.layout(packed)).transpose()?;
        self.next = Some((prepare.epoch, prepare.resume_step, layout));
        self.state.phase = Phase::Ready.into();
        self.state.ready_epoch = prepare.epoch;
        self.send(Report::Ready(v1::Ready {
            epoch: prepare.epoch,
            replicated_digest: "the same on all".to_owned(),
            step: prepare.resume_step,
        }))
        .await
    }

    fn resume(&mut self, epoch: u64) -> Result<(), String> {
        let (prepared, step, layout) = self.next.take().ok_or("it was not prepared to resume")?;
        if prepared != epoch {
            return Err(format!("it was prepared for epoch {prepared} and shall resume {epoch}"));
        }
        self.layout = layout;
        self.state.phase = Phase::Training.into();
        self.state.epoch = epoch;
        self.state.ready_epoch = 0;
        self.stand_at(step);
        Ok(())
    }

    fn stand_at(&mut self, step: u64) {
        for at in
            [&mut self.state.committed_step, &mut self.state.prepared_step, &mut self.state.attempted_step]
        {
            *at = step;
        }
    }

    /// All that its place owns, at the step where it stands.
    fn holding(&self) -> Result<Vec<u8>, String> {
        let layout = self.layout.as_ref().ok_or("it has no place")?;
        let place = layout.place_of(&self.key).ok_or("its layout is that of another group")?;
        let group = layout.group(place.replica, place.stage).ok_or("its layout lacks its group")?;
        let holding =
            Holding { step: Step(self.state.committed_step), units: group.owned(place.slot).into() };
        serde_json::to_vec(&holding).map_err(|error| error.to_string())
    }

    /// Commits the fleet's newest step, if it trains and has not.
    async fn commit(&mut self) -> Result<(), String> {
        let step = *self.fleet.step.borrow();
        if !self.trains() || step <= self.state.committed_step {
            return Ok(());
        }
        self.stand_at(step);
        let vote = v1::StepVote { grad_norm_squared: 1.0, loss: 5.0 };
        self.state.vote = Some(vote);
        let samples = self.layout.as_ref().and_then(|layout| {
            let place = layout.place_of(&self.key)?;
            Some(layout.samples_of(place.replica))
        });
        let samples = samples.unwrap_or_default();
        self.send(Report::Committed(v1::Committed {
            epoch: self.state.epoch,
            step,
            vote: Some(vote),
            first_sample: (step - 1) * self.fleet.global_batch + u64::from(samples.start),
            samples: samples.len() as u32,
            step_ms: 1000,
            rolled_forward: false,
            tokens: 1,
        }))
        .await
    }
}
