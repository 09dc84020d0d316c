//! One daemon with its state in a file, killed again and again while a job trains and loses workers.

use anyhow::{Context, Result, ensure};
use reknit_tests::job::TestJob;
use reknit_tests::lab::{Lab, LabOptions, eventually};
use reknit_tests::process::kill_now;
use rustix::process::Signal;
use std::time::Duration;
use tokio::time::sleep;

/// Resident, in KiB.
const LARGEST_REST: u64 = 30 << 10;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_killed_again_and_again_costs_no_step_and_no_worker() -> Result<()> {
    kill_and_restart(10).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes a minute: make chaos"]
async fn a_daemon_killed_a_hundred_times_costs_no_step_and_no_worker() -> Result<()> {
    kill_and_restart(100).await
}

/// In every second round a worker is killed just before the daemon is, so that a recovery is under way.
async fn kill_and_restart(rounds: u32) -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_step(5).await?;
    let mut quiet = 0;
    for round in 0..rounds {
        let before = lab.pids().await?;
        let victim = (round % 2 == 1).then_some(["0.0.1", "1.0.2", "0.0.3", "1.0.0"][round as usize / 2 % 4]);
        if let Some(place) = victim {
            kill_now(lab.pid(place).await?).await?;
        }
        lab.kill_daemon()?;
        watch.until_the_end().await?;
        let seen = watch.step;
        lab.start_daemon().await?;
        watch.follow(lab.watch().await?.into_events());
        watch.until_step(seen + 3).await?;
        // A new daemon hears of the workers one by one.
        watch.until_whole(&mut lab, before.len()).await?;
        if victim.is_none() {
            quiet += 1;
            let after = lab.pids().await?;
            ensure!(after == before, "round {round}: workers were lost: {before:?} became {after:?}");
        }
        ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0), "round {round}");
    }
    let resident = resident_kib(lab.daemon_pid(0)?)?;
    println!(
        "{rounds} kills, {quiet} of them without another fault: {} steps; {resident} KiB resident",
        watch.step
    );
    ensure!(resident < LARGEST_REST, "the daemon needs {resident} KiB");
    lab.stop().await
}

/// Longer than anybody may be silent for: when it wakes it has heard nobody, and blames nobody for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_stood_still_blames_nobody() -> Result<()> {
    const ASLEEP: Duration = Duration::from_secs(15);
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_step(5).await?;
    let before = lab.pids().await?;
    lab.signal_daemon(Signal::STOP)?;
    sleep(ASLEEP).await;
    lab.signal_daemon(Signal::CONT)?;
    watch.until_the_end().await?;
    let seen = watch.step;
    eventually("the daemon to lead again", async || Ok(lab.leads(0).await)).await?;
    watch.follow(lab.watch().await?.into_events());
    watch.until_step(seen + 3).await?;
    watch.until_whole(&mut lab, before.len()).await?;
    ensure!(lab.logged("daemon").contains("this daemon stood still"), "it noticed");
    ensure!(
        lab.pids().await? == before && lab.incidents().await?.is_empty(),
        "{:#?}",
        lab.incidents().await?
    );
    lab.stop().await
}

fn resident_kib(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
