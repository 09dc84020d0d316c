//! The job, and what is done to it.

use super::Blow;
use super::job::NAME;
use super::stand_in::StandIn;
use crate::admin::{Admin, refused};
use crate::failure::Failure;
use crate::local::{Cluster, FaultKind, Feed, Phases, Record, Woken, now_us};
use crate::output::Progress;
use reknit_layout::{JobSpec, Place};
use reknit_proto::v1::job_event::Event;
use reknit_proto::v1::{GetJobRequest, JobEvent, StopJobRequest, SubmitJobRequest, WorkerChanged};
use rustix::process::Signal;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Far more than any step, recovery or return takes: what takes longer hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// Steps of the whole job before each loss. With fewer, the daemon would take one GPU's losses for relapses and hold it back
/// longer each time.
const SETTLED: usize = 12;
/// Steps over which throughput is measured.
const MEASURED: usize = 30;
/// Where the next moment of the step lies: multiples of the golden ratio fill it evenly, however many there are.
const GOLDEN: f64 = 0.618_033_988_749_895;

/// What was seen in all.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) record: Record,
    pub(super) losses: Vec<Loss>,
    /// Losses and returns up to this step are accounted for.
    pub(super) until: u64,
    pub(super) throughput: Option<Throughput>,
}

/// One loss. Times in milliseconds.
#[derive(Debug)]
pub(super) struct Loss {
    /// From the signal until the first step of a new layout was seen here.
    pub(super) to_commit: f64,
    pub(super) phases: Phases,
    /// What the daemon took it for, and where.
    pub(super) kind: String,
    pub(super) named: bool,
    pub(super) steps_lost: u64,
    pub(super) bytes_moved: u64,
    pub(super) comeback: Option<Comeback>,
}

/// How the lost worker's place was filled again. Times in milliseconds.
#[derive(Debug)]
pub(super) struct Comeback {
    /// From the start of the new process until it answered.
    pub(super) startup: f64,
    /// Until the first committed step that it took part in was seen here: from then, or from the first step without it if
    /// that came later.
    pub(super) rejoin: f64,
    /// The same from the signal.
    pub(super) whole_again: f64,
    /// Between the last step without it and the first with it.
    pub(super) gap: f64,
}

/// Tokens a second, and processor time in seconds a second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Throughput {
    pub(super) before: f64,
    pub(super) after: f64,
    /// What the lost worker took while it trained.
    pub(super) lost_cores: f64,
    /// What took its place.
    pub(super) stand_in_cores: f64,
}

/// When a loss happened, as seen here.
#[derive(Debug, Clone, Copy)]
struct Times {
    struck: Instant,
    /// The first step without the lost worker was committed.
    trains: Instant,
}

pub(super) struct Trial<'a> {
    cluster: &'a mut Cluster,
    admin: Admin,
    feed: Feed,
    record: Record,
    places: Vec<Place>,
    blow: Blow,
    progress: &'a Progress,
    newcomer: Newcomer,
}

/// The worker that fills the place of the lost one.
#[derive(Debug, Default)]
struct Newcomer {
    gpu: String,
    /// When it said Hello, and how long ago it had been started by then.
    up: Option<(Instant, Duration)>,
}

impl<'a> Trial<'a> {
    pub(super) async fn start(
        cluster: &'a mut Cluster,
        spec: &JobSpec,
        blow: Blow,
        progress: &'a Progress,
    ) -> Result<Self, Failure> {
        progress.show("the cluster starts");
        cluster.start().await?;
        let mut admin = cluster.admin()?;
        let feed = Feed::open(&mut admin, LIMIT).await?;
        admin.submit_job(SubmitJobRequest { job_toml: spec.to_toml() }).await.map_err(refused)?;
        let (data, tensor) = (spec.parallel.data, spec.parallel.tensor);
        let record = Record::new(vec![tensor; data as usize], spec.batch.global);
        // Neighbours in this order are of different replicas.
        let places = (0..tensor).flat_map(|slot| (0..data).map(move |replica| Place::new(replica, 0, slot)));
        Ok(Self {
            cluster,
            admin,
            feed,
            record,
            places: places.collect(),
            blow,
            progress,
            newcomer: Newcomer::default(),
        })
    }

    /// Loses a worker `repeats` times, each time when the one before is back.
    pub(super) async fn losses(mut self, repeats: u32) -> Result<Seen, Failure> {
        let mut losses = Vec::new();
        for number in 0..repeats {
            let place = self.places[number as usize % self.places.len()];
            self.progress.show(&format!("loss {} of {repeats}: {place}", number + 1));
            self.settle(SETTLED).await?;
            let (mut loss, times) = self.lose(place, f64::from(number) * GOLDEN).await?;
            let comeback = self.comeback(times).await?;
            self.progress.note(&format!(
                "loss {} of {repeats}: {place}, {:.0} ms to the next step, whole again after {:.0} ms",
                number + 1,
                loss.to_commit,
                comeback.whole_again
            ));
            loss.comeback = Some(comeback);
            losses.push(loss);
        }
        self.finish(losses, None).await
    }

    /// Loses one worker for good; something else has its share of the cores from then on, as large as it was.
    pub(super) async fn leave(mut self) -> Result<Seen, Failure> {
        let place = self.places[self.places.len() - 1];
        self.progress.show("the whole job trains");
        self.settle(SETTLED).await?;
        let (_, pid, _) = self.worker_at(place).await?;
        let (computed, start) = (self.processor_time(pid)?, Instant::now());
        self.settle(MEASURED).await?;
        let lost_cores = (self.processor_time(pid)? - computed).div_duration_f64(start.elapsed());
        let before = self.tokens_per_second()?;
        let (loss, _) = self.lose(place, GOLDEN).await?;
        let stand_in = StandIn::start(lost_cores);
        let stand_in = stand_in.map_err(Failure::failed("a thread could not be started"))?;
        self.progress.show(&format!("the job trains without {place}"));
        self.settle(SETTLED + MEASURED).await?;
        let after = self.tokens_per_second()?;
        let stand_in_cores = stand_in.rate();
        drop(stand_in);
        let throughput = Throughput { before, after, lost_cores, stand_in_cores };
        self.finish(vec![loss], Some(throughput)).await
    }

    fn processor_time(&mut self, pid: u32) -> Result<Duration, Failure> {
        let time = self.cluster.worker(pid)?.processor_time();
        time.map_err(Failure::failed("what the worker has computed"))
    }

    /// The job's epoch, and the worker's process and GPU.
    async fn worker_at(&mut self, place: Place) -> Result<(u64, u32, String), Failure> {
        let request = GetJobRequest { name: NAME.to_owned() };
        let job = self.admin.get_job(request).await.map_err(refused)?.into_inner();
        let worker = job.workers.into_iter().find(|worker| worker.place == place.to_string());
        let found = worker.and_then(|worker| Some((job.epoch, worker.pid, worker.worker?.gpu)));
        found.ok_or_else(|| Failure::Failed(format!("no worker is at {place}")))
    }

    fn tokens_per_second(&self) -> Result<f64, Failure> {
        let rate = self.record.tokens_per_second(MEASURED);
        rate.ok_or_else(|| Failure::Failed("no step's time is known".to_owned()))
    }

    /// Reads on until an event, or its time, answers.
    async fn until<T>(
        &mut self,
        what: &str,
        mut answer: impl FnMut(&Record, &JobEvent, Instant) -> Option<T>,
    ) -> Result<T, Failure> {
        self.feed.allow(LIMIT);
        loop {
            match self.feed.next(self.cluster).await? {
                Woken::Event(event) => {
                    let at = Instant::now();
                    self.record.observe(&event);
                    if let Some(Event::Worker(worker)) = &event.event {
                        self.came(worker, at);
                    }
                    if let Some(answer) = answer(&self.record, &event, at) {
                        return Ok(answer);
                    }
                    if matches!(self.record.phase.as_str(), "Failed" | "Stopped" | "Completed") {
                        let Record { phase, explanation, .. } = &self.record;
                        return Err(Failure::Failed(format!("the job is {phase}: {explanation}")));
                    }
                }
                Woken::Stalled => {
                    let Record { phase, explanation, .. } = &self.record;
                    return Err(Failure::Failed(format!(
                        "{what} was not seen within {} s after step {}: the job is {phase} ({explanation})",
                        LIMIT.as_secs(),
                        self.record.committed()
                    )));
                }
            }
        }
    }

    /// A worker's process has come up, or is in another state.
    fn came(&mut self, worker: &WorkerChanged, at: Instant) {
        // It may have ended by now; then there is nothing to look after.
        let Some(Ok(process)) = (worker.pid != 0).then(|| self.cluster.worker(worker.pid)) else { return };
        let newcomer = &mut self.newcomer;
        let awaited = worker.worker.as_ref().is_some_and(|key| key.gpu == newcomer.gpu);
        // "started" is its agent's word, the others are its own.
        if awaited && newcomer.up.is_none() && matches!(worker.state.as_str(), "opening" | "idle") {
            newcomer.up = process.age().ok().map(|age| (at, age));
        }
    }

    /// Waits for so many steps of the newest layout; the last of them is committed just now.
    async fn settle(&mut self, steps: usize) -> Result<(), Failure> {
        let (mut left, mut of) = (steps, 0);
        while left > 0 {
            let epoch = self.until("a step", |record, event, _| {
                let Some(Event::Step(step)) = &event.event else { return None };
                let newest = record.layouts.last().map(|layout| layout.epoch);
                (!step.complete && newest == Some(step.epoch)).then_some(step.epoch)
            });
            let epoch = epoch.await?;
            if epoch != of {
                (left, of) = (steps, epoch);
            }
            left -= 1;
        }
        Ok(())
    }

    /// `moment`: how far into the step, in steps.
    async fn lose(&mut self, place: Place, moment: f64) -> Result<(Loss, Times), Failure> {
        let (epoch, pid, gpu) = self.worker_at(place).await?;
        let (signal, kind) = match self.blow {
            Blow::Kill => (Signal::KILL, FaultKind::WorkerKilled),
            Blow::Stop => (Signal::STOP, FaultKind::Frozen),
        };
        let step = self.record.whole_step_ms().last().copied().unwrap_or(0.0);
        sleep(Duration::from_secs_f64(step * moment.fract() / 1e3)).await;
        let process = self.cluster.worker(pid)?;
        let (time_us, struck) = (now_us(), Instant::now());
        process.signal(signal).map_err(Failure::failed("the signal"))?;
        let fault = self.record.faults.len();
        self.newcomer = Newcomer { gpu: gpu.clone(), ..Newcomer::default() };
        self.record.fault(kind, place.to_string(), gpu, time_us);
        let committed = self.until("the first step after the loss", |_, event, at| match &event.event {
            Some(Event::Step(step)) if step.epoch > epoch => Some(at),
            Some(_) | None => None,
        });
        let times = Times { struck, trains: committed.await? };
        let over = |record: &Record| {
            let incident = record.faults.get(fault)?.incident.clone()?;
            Some((record.phases(fault)?, incident))
        };
        let (phases, incident) = match over(&self.record) {
            Some(over) => over,
            None => self.until("the incident's end", |record, _, _| over(record)).await?,
        };
        let loss = Loss {
            to_commit: ms(times.trains - struck),
            phases,
            named: incident.kind == kind.name() && incident.place == place.to_string(),
            kind: incident.kind,
            steps_lost: incident.steps_lost,
            bytes_moved: incident.bytes_moved,
            comeback: None,
        };
        Ok((loss, times))
    }

    /// Waits until the job is whole again and has committed a step.
    async fn comeback(&mut self, times: Times) -> Result<Comeback, Failure> {
        let (at, gap) = self
            .until("the return of the lost worker", |record, event, at| match &event.event {
                Some(Event::Step(step)) if !step.complete && record.standing().whole => {
                    let newest = record.layouts.last().is_some_and(|layout| layout.epoch == step.epoch);
                    newest.then(|| (at, record.gap_before(step.step)))
                }
                Some(_) | None => None,
            })
            .await?;
        let unseen = || Failure::Failed("the job is whole again, but nobody came up".to_owned());
        let (up, age) = self.newcomer.up.take().ok_or_else(unseen)?;
        Ok(Comeback {
            startup: ms(age),
            rejoin: ms(at - up.max(times.trains)),
            whole_again: ms(at - times.struck),
            gap: gap.unwrap_or(0.0),
        })
    }

    /// Waits until the samples of all steps so far are accounted for, and stops the job.
    async fn finish(mut self, losses: Vec<Loss>, throughput: Option<Throughput>) -> Result<Seen, Failure> {
        let until = self.record.committed();
        let accounted = |record: &Record| record.steps.get(&until).is_some_and(|step| step.completed > 0);
        if !accounted(&self.record) {
            self.until("the account of the last step", |record, _, _| accounted(record).then_some(()))
                .await?;
        }
        let request = StopJobRequest { name: NAME.to_owned() };
        self.admin.stop_job(request).await.map_err(refused)?;
        Ok(Seen { record: self.record, losses, until, throughput })
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
