//! Real processes: GPUs are lost in every way, and the job goes on without a lost step or sample.

use anyhow::{Result, ensure};
use reknit_proto::v1::Incident;
use reknit_tests::job::TestJob;
use reknit_tests::lab::{Lab, LabOptions};
use reknit_tests::process::kill_now;

fn find<'a>(incidents: &'a [Incident], kind: &str, place: &str) -> Result<&'a Incident> {
    incidents
        .iter()
        .find(|incident| incident.kind == kind && incident.place == place)
        .ok_or_else(|| anyhow::anyhow!("no {kind} at {place} among {incidents:#?}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_worker_and_a_lost_gpu_cost_at_most_the_step_in_flight() -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_step(5).await?;
    ensure!(watch.degrees() == [4, 4]);

    kill_now(lab.pid("1.0.2").await?).await?;
    watch.until_degrees(&[4, 3]).await?;
    watch.steps(3).await?;
    watch.until_degrees(&[4, 4]).await?;
    watch.steps(3).await?;

    lab.lose_gpu(0, 1)?;
    watch.until_degrees(&[3, 4]).await?;
    watch.steps(5).await?;
    lab.give_back_gpu(0, 1)?;
    watch.until_degrees(&[4, 4]).await?;
    watch.steps(12).await?;

    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0));
    ensure!(watch.complete > 10);
    let incidents = lab.incidents().await?;
    let killed = find(&incidents, "worker_killed", "1.0.2")?;
    ensure!(killed.steps_lost <= 1 && killed.bytes_moved == killed.bytes_lower_bound, "{killed:#?}");
    let lost = find(&incidents, "gpu_lost", "0.0.1")?;
    ensure!(lost.signal.contains("79") && lost.steps_lost <= 1, "{lost:#?}");
    let faults = incidents.iter().filter(|incident| incident.kind != "planned").count();
    ensure!(faults == 2, "nothing else is blamed: {incidents:#?}");
    lab.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spare_takes_the_place_of_a_lost_gpu() -> Result<()> {
    let mut lab = Lab::start(LabOptions { gpus: 5, ..LabOptions::default() }).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob { recovery: "spares = 1", ..TestJob::default() }).await?;
    watch.until_step(5).await?;
    ensure!(watch.degrees() == [4, 4]);
    let gpu = async |lab: &Lab| -> Result<Option<String>> {
        let workers = lab.job().await?.workers;
        Ok(workers
            .into_iter()
            .find(|worker| worker.place == "0.0.1")
            .and_then(|worker| Some(worker.worker?.gpu)))
    };
    let lost = gpu(&lab).await?;

    // It never comes back, and the group is whole again.
    lab.lose_gpu(0, 1)?;
    watch
        .until("a layout with the spare", |seen| {
            let since = seen.layouts.iter().skip(1).map(|layout| &layout.degrees);
            since.eq([&[3, 4], &[4, 4]])
        })
        .await?;
    watch.steps(12).await?;
    let spare = gpu(&lab).await?;
    ensure!(spare.is_some() && spare != lost, "{spare:?} has the place of {lost:?}");
    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0));
    let incidents = lab.incidents().await?;
    let lost = find(&incidents, "gpu_lost", "0.0.1")?;
    ensure!(lost.steps_lost <= 1, "{lost:#?}");
    lab.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_kill_during_the_recovery_ends_in_a_right_layout_too() -> Result<()> {
    let mut lab = Lab::start(LabOptions { rejoin_hold_ms: 1500, ..LabOptions::default() }).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_step(4).await?;
    // The recovery takes some ten milliseconds; a kill on the news that it began lands inside it nearly always.
    for attempt in 0.. {
        ensure!(attempt < 8, "no second kill landed within a recovery");
        let (first, second) = (lab.pid("1.0.2").await?, lab.pid("1.0.0").await?);
        let layouts = watch.layouts.len();
        kill_now(first).await?;
        watch.until("a recovery", |seen| seen.phase == "Resharding" || seen.layouts.len() > layouts).await?;
        kill_now(second).await?;
        watch.until("a layout without both", |seen| seen.degrees() == [4, 2]).await?;
        watch.steps(3).await?;
        let within = watch.layouts[layouts].degrees == [4, 2];
        watch.until_degrees(&[4, 4]).await?;
        watch.steps(3).await?;
        if within {
            break;
        }
    }
    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0));
    let incidents = lab.incidents().await?;
    find(&incidents, "worker_killed", "1.0.2")?;
    find(&incidents, "worker_killed", "1.0.0")?;
    lab.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn losing_both_holders_waits_and_names_the_units() -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_step(4).await?;
    let (one, other) = (lab.pid("0.0.2").await?, lab.pid("1.0.2").await?);
    let (one, other) = tokio::join!(kill_now(one), kill_now(other));
    one?;
    other?;
    watch.until("the job to wait", |seen| seen.phase == "Waiting").await?;
    ensure!(watch.explanation.contains("units 6-8"), "{}", watch.explanation);
    ensure!(watch.explanation.contains("stop"), "it must name the ways out: {}", watch.explanation);
    let job = lab.job().await?;
    ensure!(job.phase == "Waiting" && job.explanation == watch.explanation, "{job:?}");
    lab.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_daemon_costs_no_step_and_the_next_one_goes_on() -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_step(5).await?;
    let before = lab.job().await?;
    let pids: Vec<_> = before.workers.iter().map(|worker| worker.pid).collect();

    lab.kill_daemon()?;
    lab.start_daemon().await?;
    let mut watch = lab.watch().await?;
    watch.until_step(before.committed_step() + 5).await?;
    // Steps go on before it has heard everybody.
    watch.until("everybody to be heard", |seen| seen.phase == "Running").await?;
    let after = lab.job().await?;
    ensure!(after.phase == "Running" && after.epoch == before.epoch, "{after:?}");
    ensure!(after.workers.iter().map(|worker| worker.pid).collect::<Vec<_>>() == pids, "no worker was lost");

    kill_now(lab.pid("0.0.3").await?).await?;
    watch.until_degrees(&[3, 4]).await?;
    watch.steps(2).await?;
    watch.until_degrees(&[4, 4]).await?;
    watch.steps(2).await?;
    lab.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_without_usable_data_says_so() -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    lab.submit_on(TestJob::default(), "short").await?;
    watch.until("the reason", |seen| seen.explanation.contains("5 bytes in all")).await?;
    ensure!(watch.phase == "Starting", "{}", watch.phase);
    ensure!(lab.job().await?.explanation.contains("give more text"));
    lab.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_ends_with_equal_replicas() -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob { steps: 30, dtype: "f64", ..TestJob::default() }).await?;
    watch.until_step(8).await?;
    kill_now(lab.pid("1.0.1").await?).await?;
    // The daemon compares the digests of the replicated parameters of all ranks before it says so.
    watch.until("the end", |seen| seen.phase == "Completed" || seen.phase == "Failed").await?;
    ensure!(watch.phase == "Completed", "{}", watch.explanation);
    ensure!(watch.step == 30 && watch.losses.len() == 30);
    ensure!(watch.losses[&30] < watch.losses[&1]);
    lab.stop().await
}
