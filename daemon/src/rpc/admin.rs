//! What operators and their tools call.

use super::{Gate, convert};
use crate::input::{Ask as AgentAsk, Input, Reply, Request as Ask, Wish};
use reknit_engine::{Incident, JobName, JobView, Refusal, Time};
use reknit_layout::{GpuId, JobSpec, NodeName, Step};
use reknit_proto::v1;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

/// Longer than a store's slowest write.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Of a quiesce and of a power limit, in seconds: a week.
const LONGEST_LEASE: u32 = 7 * 24 * 3600;

/// In characters. A client takes 16 KiB of a status, in which a byte may be written as three.
const LONGEST_ERROR: usize = 1_000;

#[derive(Debug)]
pub struct Admin {
    gate: Gate,
}

impl Admin {
    pub fn new(gate: Gate) -> Self {
        Self { gate }
    }

    async fn ask<T>(&self, question: impl FnOnce(Reply<T>) -> Ask) -> Result<T, Status> {
        let to_loop = self.gate.to_loop().await?;
        let (reply, answer) = oneshot::channel();
        let asked = async {
            let input = Input::Asked(question(reply));
            to_loop.inputs.tell(input).await.then_some(())?;
            answer.await.ok()
        };
        match timeout(ANSWER_TIMEOUT, asked).await {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(Status::unavailable("the daemon is stopping; try again")),
            Err(_) => Err(Status::deadline_exceeded(
                "no answer in time; whether the request was carried out is unknown",
            )),
        }
    }

    async fn ask_node(
        &self,
        node: String,
        wish: Wish,
        force: bool,
    ) -> Result<Response<v1::AgentAnswer>, Status> {
        let node = NodeName(node);
        let answer = self.ask(|reply| Ask::Agent { ask: AgentAsk { node, wish, reply }, force }).await?;
        let message = answer.map_err(refused)?;
        Ok(Response::new(v1::AgentAnswer { message }))
    }

    /// Answered with the job as it is when the wish was carried out.
    async fn ask_job(
        &self,
        name: String,
        question: impl FnOnce(JobName, Reply<Result<Option<JobView>, Refusal>>) -> Ask,
    ) -> Result<Response<v1::Job>, Status> {
        let name = JobName(name);
        let answer = self.ask(|reply| question(name.clone(), reply)).await?;
        job(&name, answer.map_err(refused)?)
    }
}

type Watch = Pin<Box<dyn Stream<Item = Result<v1::JobEvent, Status>> + Send>>;

#[tonic::async_trait]
impl v1::admin_server::Admin for Admin {
    async fn get_daemon(&self, _: Request<v1::GetDaemonRequest>) -> Result<Response<v1::Daemon>, Status> {
        Ok(Response::new(self.gate.daemon().await))
    }

    async fn submit_job(&self, request: Request<v1::SubmitJobRequest>) -> Result<Response<v1::Job>, Status> {
        let spec = JobSpec::parse_trainable(&request.into_inner().job_toml, "job")
            .map_err(|error| Status::invalid_argument(told_back(&error.to_string())))?;
        self.ask_job(spec.name.clone(), |_, reply| Ask::Submit(Box::new(spec), reply)).await
    }

    async fn get_job(&self, request: Request<v1::GetJobRequest>) -> Result<Response<v1::Job>, Status> {
        let name = JobName(request.into_inner().name);
        let view = match self.gate.stored().await? {
            Some(stored) => stored.jobs.into_iter().find(|record| record.name == name).map(JobView::stored),
            None => self.ask(|reply| Ask::GetJob(name.clone(), reply)).await?,
        };
        job(&name, view)
    }

    async fn list_jobs(
        &self,
        _: Request<v1::ListJobsRequest>,
    ) -> Result<Response<v1::ListJobsResponse>, Status> {
        let jobs = match self.gate.stored().await? {
            Some(stored) => stored.jobs.into_iter().map(JobView::stored).collect(),
            None => self.ask(Ask::ListJobs).await?,
        };
        let jobs = jobs.into_iter().map(convert::job).collect::<Result<_, _>>();
        let jobs = jobs.map_err(no_json)?;
        Ok(Response::new(v1::ListJobsResponse { jobs }))
    }

    async fn rebalance_job(
        &self,
        request: Request<v1::RebalanceJobRequest>,
    ) -> Result<Response<v1::Job>, Status> {
        self.ask_job(request.into_inner().name, Ask::RebalanceJob).await
    }

    async fn restore_job(
        &self,
        request: Request<v1::RestoreJobRequest>,
    ) -> Result<Response<v1::Job>, Status> {
        let v1::RestoreJobRequest { name, step } = request.into_inner();
        self.ask_job(name, |job, reply| Ask::RestoreJob(job, step.map(Step), reply)).await
    }

    async fn stop_job(&self, request: Request<v1::StopJobRequest>) -> Result<Response<v1::Job>, Status> {
        self.ask_job(request.into_inner().name, Ask::StopJob).await
    }

    async fn list_nodes(
        &self,
        _: Request<v1::ListNodesRequest>,
    ) -> Result<Response<v1::ListNodesResponse>, Status> {
        let nodes = self.ask(Ask::ListNodes).await?;
        Ok(Response::new(v1::ListNodesResponse { nodes }))
    }

    async fn drain_gpu(
        &self,
        request: Request<v1::DrainGpuRequest>,
    ) -> Result<Response<v1::DrainGpuResponse>, Status> {
        let gpu = GpuId(request.into_inner().gpu);
        let answer = self.ask(|reply| Ask::DrainGpu(gpu, reply)).await?;
        answer.map_err(refused)?;
        Ok(Response::new(v1::DrainGpuResponse {}))
    }

    async fn restore_gpu(
        &self,
        request: Request<v1::RestoreGpuRequest>,
    ) -> Result<Response<v1::RestoreGpuResponse>, Status> {
        let gpu = GpuId(request.into_inner().gpu);
        let answer = self.ask(|reply| Ask::RestoreGpu(gpu, reply)).await?;
        let message = answer.map_err(refused)?;
        Ok(Response::new(v1::RestoreGpuResponse { message }))
    }

    async fn quiesce_node(
        &self,
        request: Request<v1::QuiesceNodeRequest>,
    ) -> Result<Response<v1::AgentAnswer>, Status> {
        let v1::QuiesceNodeRequest { node, seconds, force } = request.into_inner();
        if !(1..=LONGEST_LEASE).contains(&seconds) {
            let problem = format!("seconds = {seconds}: must be from 1 to {LONGEST_LEASE}");
            return Err(Status::invalid_argument(problem));
        }
        self.ask_node(node, Wish::Quiesce { seconds }, force).await
    }

    async fn resume_node(
        &self,
        request: Request<v1::ResumeNodeRequest>,
    ) -> Result<Response<v1::AgentAnswer>, Status> {
        self.ask_node(request.into_inner().node, Wish::EndQuiesce, false).await
    }

    async fn probe_node(
        &self,
        request: Request<v1::ProbeNodeRequest>,
    ) -> Result<Response<v1::AgentAnswer>, Status> {
        self.ask_node(request.into_inner().node, Wish::Probe, false).await
    }

    async fn set_power_limit(
        &self,
        request: Request<v1::SetPowerLimitRequest>,
    ) -> Result<Response<v1::AgentAnswer>, Status> {
        let v1::SetPowerLimitRequest { gpu, limit_mw, lease_seconds } = request.into_inner();
        if limit_mw > 0 && !(1..=LONGEST_LEASE).contains(&lease_seconds) {
            let problem = format!("lease_seconds = {lease_seconds}: must be from 1 to {LONGEST_LEASE}");
            return Err(Status::invalid_argument(problem));
        }
        let gpu = GpuId(gpu);
        let answer = self.ask(|reply| Ask::SetPowerLimit { gpu, limit_mw, lease_seconds, reply }).await?;
        let message = answer.map_err(refused)?;
        Ok(Response::new(v1::AgentAnswer { message }))
    }

    async fn list_incidents(
        &self,
        request: Request<v1::ListIncidentsRequest>,
    ) -> Result<Response<v1::ListIncidentsResponse>, Status> {
        let job = JobName(request.into_inner().job);
        let incidents = match self.gate.stored().await? {
            Some(stored) => {
                let known = stored.jobs.iter().any(|record| record.name == job);
                let own = stored.incidents.into_iter().filter(|incident| incident.job == job);
                known.then(|| own.collect())
            }
            None => self.ask(|reply| Ask::ListIncidents(job.clone(), reply)).await?,
        };
        let incidents: Vec<Incident> = incidents.ok_or_else(|| refused(Refusal::no_job(&job)))?;
        let incidents = incidents.into_iter().map(convert::incident).collect();
        Ok(Response::new(v1::ListIncidentsResponse { incidents }))
    }

    type WatchEventsStream = Watch;

    async fn watch_events(
        &self,
        request: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Watch>, Status> {
        let job = request.into_inner().job;
        let to_loop = self.gate.to_loop().await?;
        let watchers = to_loop.watchers.upgrade();
        let watchers = watchers.ok_or_else(|| Status::unavailable("the daemon is stopping; try again"))?;
        let clock = to_loop.clock;
        let events = BroadcastStream::new(watchers.subscribe());
        let events = events.filter_map(move |event| watched(&job, clock.now(), event).map(Ok));
        Ok(Response::new(Box::pin(events)))
    }
}

/// What a watcher of `job` (empty: of all) is shown.
fn watched(
    job: &str,
    now: Time,
    event: Result<Arc<v1::JobEvent>, BroadcastStreamRecvError>,
) -> Option<v1::JobEvent> {
    match event {
        Ok(event) if job.is_empty() || event.job.is_empty() || event.job == job => {
            Some(Arc::unwrap_or_clone(event))
        }
        Ok(_) => None,
        Err(BroadcastStreamRecvError::Lagged(missed)) => Some(v1::JobEvent {
            time_us: now.0,
            job: job.to_owned(),
            event: Some(v1::job_event::Event::Note(v1::Note {
                text: format!("{missed} events were missed here: the watcher was too slow"),
            })),
        }),
    }
}

/// An error that quotes what it was given: neither control characters nor more than a status can carry.
fn told_back(text: &str) -> String {
    let mut shown: String = text
        .chars()
        .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
        .take(LONGEST_ERROR)
        .collect();
    if text.chars().nth(LONGEST_ERROR).is_some() {
        shown.push_str("...");
    }
    shown
}

fn job(name: &JobName, view: Option<JobView>) -> Result<Response<v1::Job>, Status> {
    let view = view.ok_or_else(|| refused(Refusal::no_job(name)))?;
    convert::job(view).map(Response::new).map_err(no_json)
}

fn no_json(error: serde_json::Error) -> Status {
    Status::internal(format!("the layout has no JSON form: {error}"))
}

fn refused(refusal: Refusal) -> Status {
    let text = refusal.to_string();
    match refusal {
        Refusal::AlreadyExists(_) => Status::already_exists(text),
        Refusal::NotFound(_) => Status::not_found(text),
        Refusal::FailedPrecondition(_) => Status::failed_precondition(text),
    }
}
