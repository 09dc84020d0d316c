//! What a daemon in stand-by answers operators and their tool.

use anyhow::{Context, Result, ensure};
use reknit_proto::v1::daemon::Role;
use reknit_proto::v1::{
    DrainGpuRequest, GetDaemonRequest, GetJobRequest, ListIncidentsRequest, ListJobsRequest,
    ListNodesRequest, StopJobRequest, SubmitJobRequest, WatchEventsRequest,
};
use reknit_tests::job::TestJob;
use reknit_tests::lab::{Lab, LabOptions, eventually, program};
use reknit_tests::process::kill_now;
use rustix::process::Signal;
use std::path::Path;
use std::process::Command;
use tonic::{Code, Status};

/// The tool's exit status, output and error, told one daemon alone.
fn reknit(lab: &Lab, daemon: usize, args: &[&str]) -> Result<(Option<i32>, String, String)> {
    let output =
        Command::new(program("reknit")?).args(args).env("REKNIT_DAEMON", lab.address(daemon)).output()?;
    Ok((output.status.code(), String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?))
}

/// Everything but reading what is stored.
async fn refusals(lab: &Lab, daemon: usize) -> Result<Vec<Status>> {
    let mut admin = lab.admin_of(daemon).await?;
    let (name, gpu) = ("test".to_owned(), "GPU-0".to_owned());
    let answers = [
        admin.list_nodes(ListNodesRequest {}).await.err(),
        admin
            .submit_job(SubmitJobRequest { job_toml: TestJob::default().toml(Path::new("corpus.txt")) })
            .await
            .err(),
        admin.stop_job(StopJobRequest { name }).await.err(),
        admin.drain_gpu(DrainGpuRequest { gpu }).await.err(),
        admin.watch_events(WatchEventsRequest::default()).await.err(),
    ];
    answers.into_iter().map(|answer| answer.context("a stand-by carried it out")).collect()
}

fn leader_named(status: &Status) -> Option<&str> {
    status.metadata().get("reknit-leader")?.to_str().ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_answers_what_is_stored_and_points_to_the_leader() -> Result<()> {
    let mut lab = Lab::start(LabOptions { daemons: 2, ..LabOptions::default() }).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_step(5).await?;
    kill_now(lab.pid("0.0.3").await?).await?;
    watch.until_degrees(&[3, 4]).await?;
    watch.until_whole(&mut lab, 8).await?;
    watch.steps(2).await?;
    let leader = lab.leader().await?;
    let other = 1 - leader;
    let address = lab.address(leader);

    let mut standby = lab.admin_of(other).await?;
    let view = standby.get_daemon(GetDaemonRequest {}).await?.into_inner();
    ensure!((view.role(), &view.leader) == (Role::StandBy, &address), "{view:?}");
    let (job, name) = (lab.job().await?, "test".to_owned());
    let stored = standby.get_job(GetJobRequest { name: name.clone() }).await?.into_inner();
    ensure!((&stored.name, stored.epoch) == (&job.name, job.epoch), "{stored:?}");
    ensure!(!stored.live && stored.committed_step.is_none(), "{stored:?}");
    let missing = standby.get_job(GetJobRequest { name: "none".to_owned() }).await.err();
    ensure!(missing.is_some_and(|status| status.code() == Code::NotFound), "a job that is not there");
    let jobs = standby.list_jobs(ListJobsRequest {}).await?.into_inner().jobs;
    ensure!(jobs.len() == 1 && jobs[0].name == name, "{jobs:?}");
    let incidents = standby.list_incidents(ListIncidentsRequest { job: name }).await?.into_inner().incidents;
    ensure!(incidents.iter().any(|incident| incident.kind == "worker_killed"), "{incidents:?}");
    for status in refusals(&lab, other).await? {
        ensure!(status.code() == Code::Unavailable && leader_named(&status) == Some(&address), "{status:?}");
        ensure!(status.message().contains(&address), "{status:?}");
    }
    // The tool finds the leader from here.
    let (status, out, error) = reknit(&lab, other, &["node", "list"])?;
    ensure!(status == Some(0) && out.contains("node-1"), "{out}{error}");

    // The leader ends, and what is left of another that died keeps the one in stand-by from leading. No agent's or
    // worker's word is needed for what follows.
    let mut etcd = lab.etcd.as_ref().context("several daemons have an etcd")?.client().await?;
    lab.kill_daemon_at(other)?;
    let dead = "http://127.0.0.1:1";
    eventually("the key of the daemon that was killed to go", async || {
        let candidates = etcd_client::GetOptions::new().with_prefix().with_count_only();
        Ok(etcd.get("/reknit/leader/", Some(candidates)).await?.count() == 1)
    })
    .await?;
    // A key without a lease would be no candidate's.
    let lease = etcd.lease_grant(600, None).await?.id();
    let held = etcd_client::PutOptions::new().with_lease(lease);
    etcd.put("/reknit/leader/0", dead, Some(held)).await?;
    lab.spawn_daemon(other)?;
    eventually("it to stand by", async || Ok(lab.admin_of(other).await.is_ok())).await?;
    lab.signal_daemon_at(leader, Signal::TERM)?;
    eventually("the dead to count as the leader", async || {
        let status = refusals(&lab, other).await?;
        Ok(leader_named(&status[0]) == Some(dead))
    })
    .await?;
    for (args, words) in [
        (&["job", "list"][..], "test"),
        (&["job", "show", "test"], "no leader answers: as stored"),
        (&["incidents", "test"], "signal 9"),
    ] {
        let (status, out, error) = reknit(&lab, other, args)?;
        let said = out + &error;
        ensure!(status == Some(0) && said.contains(words), "{args:?}: {status:?} {said}");
    }
    for args in [&["node", "list"][..], &["job", "stop", "test"]] {
        let (status, _, error) = reknit(&lab, other, args)?;
        ensure!(status == Some(69) && error.contains(dead), "{args:?}: {status:?} {error}");
    }

    // Without etcd nothing is known, not even who leads.
    let etcd_of = |lab: &Lab, with| lab.etcd.as_ref().context("as above")?.signal_quorum(with);
    etcd_of(&lab, Signal::STOP)?;
    eventually("the daemon to notice", async || {
        let status = refusals(&lab, other).await?;
        Ok(status.iter().all(|status| {
            status.message().contains("who leads is not known") && leader_named(status).is_none()
        }))
    })
    .await?;
    for (args, words) in
        [(&["node", "list"][..], "who leads is not known"), (&["job", "list"], "cannot be reached")]
    {
        let (status, _, error) = reknit(&lab, other, args)?;
        ensure!(status == Some(69) && error.contains(words), "{args:?}: {status:?} {error}");
    }
    etcd_of(&lab, Signal::CONT)?;
    eventually("etcd to be back", async || Ok(etcd.delete("/reknit/leader/0", None).await.is_ok())).await?;
    ensure!(lab.leader().await? == other, "the one that ended leads");
    eventually("the agents to be back", async || {
        let (status, out, error) = reknit(&lab, other, &["node", "list"])?;
        ensure!(status == Some(0), "{error}");
        Ok(out.contains("node-1"))
    })
    .await?;
    watch.follow(lab.watch().await?.into_events());
    watch.steps(3).await?;
    lab.stop().await
}
