//! One run of the job: submits it, follows its events and makes the faults.

use super::job::{NAME, TENSOR};
use super::script::{Action, Script};
use super::view::View;
use crate::admin::{Admin, refused};
use crate::failure::Failure;
use crate::local::{Cluster, FaultKind, Feed, Moment, Record, Woken, now_us};
use reknit_layout::{JobSpec, Place};
use reknit_proto::v1::{GetJobRequest, Job, ListNodesRequest, SubmitJobRequest};
use rustix::process::Signal;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

/// Far more than any step or recovery takes.
const STALL_LIMIT: Duration = Duration::from_secs(60);
const KILL_LIMIT: Duration = Duration::from_secs(5);
const REDRAW: Duration = Duration::from_millis(100);
/// After the last step the accounting of its samples is still to come.
const CLOSING_LIMIT: Duration = Duration::from_secs(5);

/// Trains to the end on a cluster that is started here. The caller stops it.
pub(crate) async fn run(
    cluster: &mut Cluster,
    spec: &JobSpec,
    script: Option<Script>,
    view: &mut View,
) -> Result<Record, Failure> {
    cluster.start().await?;
    view.note("daemon, 2 agents and 8 GPUs are there; submitting the job");
    let mut admin = cluster.admin()?;
    let feed = Feed::open(&mut admin, STALL_LIMIT).await?;
    admin.submit_job(SubmitJobRequest { job_toml: spec.to_toml() }).await.map_err(refused)?;
    let nominal = vec![TENSOR; spec.parallel.data as usize];
    let run =
        Run { record: Record::new(nominal, spec.batch.global), cluster, admin, script, lost: None, view };
    run.follow(feed, spec.run.steps).await
}

struct Run<'a> {
    cluster: &'a mut Cluster,
    admin: Admin,
    record: Record,
    script: Option<Script>,
    /// Node and index of the GPU that is lost now.
    lost: Option<(String, u32)>,
    view: &'a mut View,
}

impl Run<'_> {
    async fn follow(mut self, mut feed: Feed, steps: u64) -> Result<Record, Failure> {
        let mut redraw = interval(REDRAW);
        redraw.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let closing = self.record.phase == "Completed";
            if closing && self.accounted(steps) {
                return self.finish().await;
            }
            let woken = tokio::select! {
                woken = feed.next(self.cluster) => woken?,
                _ = redraw.tick() => {
                    self.view.draw(&self.record);
                    continue;
                }
            };
            match woken {
                Woken::Event(event) => {
                    let moment = self.record.observe(&event);
                    match &moment {
                        Some(Moment::Step(_)) => feed.allow(STALL_LIMIT),
                        Some(Moment::Phase { phase, .. }) if phase == "Completed" => {
                            feed.allow(CLOSING_LIMIT);
                        }
                        Some(_) | None => {}
                    }
                    if let Some(moment) = moment {
                        self.told(&moment)?;
                        self.act().await?;
                    }
                }
                // What was not accounted for counts as lost.
                Woken::Stalled if closing => return self.finish().await,
                Woken::Stalled => return Err(self.stalled()),
            }
        }
    }

    /// Every step's samples were reported, and every fault's recovery.
    fn accounted(&self, steps: u64) -> bool {
        let completed = self.record.steps.values().filter(|step| step.completed > 0).count() as u64;
        completed >= steps && (0..self.record.faults.len()).all(|fault| self.record.phases(fault).is_some())
    }

    fn told(&mut self, moment: &Moment) -> Result<(), Failure> {
        if let Moment::Worker { pid, .. } = moment
            && *pid != 0
        {
            // It may have ended by now; then there is nothing to look after.
            let _ = self.cluster.worker(*pid);
        }
        self.view.moment(&self.record, moment);
        match moment {
            Moment::Phase { phase, explanation } if matches!(phase.as_str(), "Failed" | "Stopped") => {
                Err(Failure::Failed(format!("the job is {phase}: {explanation}")))
            }
            Moment::Phase { .. }
            | Moment::Step(_)
            | Moment::Layout { .. }
            | Moment::Recovered(_)
            | Moment::Changed { .. }
            | Moment::Worker { .. }
            | Moment::Note(_) => Ok(()),
        }
    }

    fn stalled(&self) -> Failure {
        let record = &self.record;
        let explanation = if record.explanation.is_empty() { "no reason given" } else { &record.explanation };
        Failure::Failed(format!(
            "no step was committed for {} s after step {}: the job is {} ({explanation})",
            STALL_LIMIT.as_secs(),
            record.committed(),
            if record.phase.is_empty() { "not started" } else { &record.phase },
        ))
    }

    async fn act(&mut self) -> Result<(), Failure> {
        let standing = self.record.standing();
        while let Some(action) = self.script.as_mut().and_then(|script| script.next(standing)) {
            match action {
                Action::KillWorker(place) => self.kill(place).await?,
                Action::LoseGpu(place) => self.lose(place).await?,
                Action::GiveBack => self.give_back().await?,
            }
        }
        Ok(())
    }

    async fn kill(&mut self, place: Place) -> Result<(), Failure> {
        let job = self.job().await?;
        let worker = job.workers.iter().find(|worker| worker.place == place.to_string());
        let worker = worker.ok_or_else(|| no_worker(place))?;
        let process = self.cluster.worker(worker.pid)?;
        let time_us = now_us();
        process.signal(Signal::KILL).map_err(Failure::failed("SIGKILL"))?;
        if !process.exited_within(KILL_LIMIT).await {
            return Err(Failure::Failed(format!("the worker at {place} survived SIGKILL")));
        }
        let pid = process.pid();
        let gpu = worker.worker.as_ref().map_or(String::new(), |key| key.gpu.clone());
        self.record.fault(FaultKind::WorkerKilled, place.to_string(), gpu, time_us);
        self.view
            .fault(&format!("SIGKILL to the worker at {place} (pid {pid} on {}): it is gone", worker.node));
        Ok(())
    }

    async fn lose(&mut self, place: Place) -> Result<(), Failure> {
        let job = self.job().await?;
        let worker = job.workers.iter().find(|worker| worker.place == place.to_string());
        let key = worker.and_then(|worker| worker.worker.as_ref()).ok_or_else(|| no_worker(place))?;
        let nodes = self.admin.list_nodes(ListNodesRequest {}).await.map_err(refused)?.into_inner().nodes;
        let found = nodes.iter().find_map(|node| {
            let gpu = node.gpus.iter().find(|gpu| gpu.uuid == key.gpu)?;
            Some((node.name.clone(), gpu.index))
        });
        let (node, index) = found.ok_or_else(|| no_worker(place))?;
        let time_us = now_us();
        self.record.fault(FaultKind::GpuLost, place.to_string(), key.gpu.clone(), time_us);
        self.cluster.lose_gpu(&node, index).await?;
        self.view.fault(&format!("the driver of {node} reports GPU {index} (at {place}) lost, XID 79"));
        self.lost = Some((node, index));
        Ok(())
    }

    async fn give_back(&mut self) -> Result<(), Failure> {
        let lost = self.lost.take();
        let (node, index) = lost.ok_or_else(|| Failure::Failed("no GPU is lost".to_owned()))?;
        self.cluster.give_back_gpu(&node, index).await?;
        self.view.mend(&format!("the driver of {node} reports GPU {index} healthy again"));
        Ok(())
    }

    async fn job(&mut self) -> Result<Job, Failure> {
        let request = GetJobRequest { name: NAME.to_owned() };
        Ok(self.admin.get_job(request).await.map_err(refused)?.into_inner())
    }

    /// The job is complete; what the daemon says in the end must agree with what was seen.
    async fn finish(mut self) -> Result<Record, Failure> {
        let job = self.job().await?;
        if job.committed_step() != self.record.committed() {
            return Err(Failure::Failed(format!(
                "the daemon has {} committed steps, but events told of {}",
                job.committed_step(),
                self.record.committed()
            )));
        }
        match self.script.as_ref().and_then(Script::missing) {
            Some(missing) => {
                Err(Failure::Failed(format!("the run ended too early: {missing}; give more --steps")))
            }
            None => Ok(self.record),
        }
    }
}

fn no_worker(place: Place) -> Failure {
    Failure::Failed(format!("no worker is at {place}, where the next fault should be"))
}
