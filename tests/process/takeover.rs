//! Three daemons on an etcd of three members: whoever dies, training goes on and another daemon is in charge soon.

use anyhow::{Context, Result, ensure};
use reknit_tests::Watch;
use reknit_tests::job::TestJob;
use reknit_tests::lab::{LEASE, Lab, LabOptions, eventually};
use reknit_tests::process::kill_now;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// From the leader's death to a stand-by in charge.
const TAKE_OVER: Duration = LEASE.saturating_add(Duration::from_secs(1));

async fn trio() -> Result<(Lab, Watch)> {
    let mut lab =
        Lab::start(LabOptions { daemons: 3, rejoin_hold_ms: 1000, ..LabOptions::default() }).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_step(5).await?;
    Ok((lab, watch))
}

/// A new leader may still wait for reports; once it has them all, each worker is the one it was.
/// The places where another process is, or none.
fn lost<'a>(before: &'a BTreeMap<String, u32>, after: &BTreeMap<String, u32>) -> Vec<&'a str> {
    let gone = before.iter().filter(|(place, pid)| after.get(*place) != Some(pid));
    gone.map(|(place, _)| place.as_str()).collect()
}

async fn same_workers(lab: &mut Lab, watch: &mut Watch, before: &BTreeMap<String, u32>) -> Result<()> {
    watch.until_whole(lab, before.len()).await?;
    let after = lab.pids().await?;
    ensure!(after == *before, "workers were lost: {before:?} became {after:?}");
    Ok(())
}

/// Waits for another leader than `old`, which died or was stopped at `since`, and follows its events.
async fn taken_over(lab: &Lab, watch: &mut Watch, old: usize, since: Instant, what: &str) -> Result<usize> {
    let new = lab.leader().await?;
    let took = since.elapsed();
    println!("{what}: another daemon in charge after {took:?}");
    ensure!(new != old, "the old leader leads");
    // The bar is the lease and a second, on a machine that does nothing else.
    ensure!(took <= 2 * TAKE_OVER, "{what}: {took:?}, the bar is {TAKE_OVER:?}");
    watch.follow(lab.watch().await?.into_events());
    Ok(new)
}

fn sound(watch: &Watch) -> Result<()> {
    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0), "samples were lost or repeated");
    Ok(())
}

/// Where in a recovery the leader is killed.
#[derive(Debug, Clone, Copy)]
enum Point {
    /// The survivors have not all stopped.
    Quiescing,
    /// The new layout is planned or prepared, and not stored.
    Resharding,
    /// It is stored, and no step was committed under it.
    Committed,
}

impl Point {
    fn reached(self, watch: &Watch, layouts: usize) -> bool {
        match self {
            Self::Quiescing => watch.phase == "Quiescing",
            Self::Resharding => watch.phase == "Resharding",
            Self::Committed => watch.layouts.len() > layouts,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_in_any_phase_of_a_recovery_is_replaced_and_the_recovery_ends() -> Result<()> {
    let (mut lab, mut watch) = trio().await?;
    for point in [Point::Quiescing, Point::Resharding, Point::Committed] {
        // A phase takes some milliseconds: the daemon's last events tell whether the kill came in time.
        for attempt in 0.. {
            ensure!(attempt < 8, "no kill landed in {point:?}");
            let old = lab.leader().await?;
            let before = lab.pids().await?;
            let layouts = watch.layouts.len();
            kill_now(lab.pid("1.0.2").await?).await?;
            let reached = |seen: &Watch| point.reached(seen, layouts) || seen.layouts.len() > layouts;
            watch.until("the recovery", reached).await?;
            lab.kill_daemon_at(old)?;
            let killed = Instant::now();
            let step = watch.step;
            watch.until_the_end().await?;
            let in_time = match point {
                Point::Quiescing => watch.phase == "Quiescing",
                Point::Resharding => watch.layouts.len() == layouts,
                Point::Committed => watch.step == step,
            };
            taken_over(&lab, &mut watch, old, killed, &format!("{point:?}")).await?;
            let seen = watch.step;
            watch.until_step(seen + 3).await?;
            watch.until_whole(&mut lab, before.len()).await?;
            let lost = lost(&before, &lab.pids().await?);
            ensure!(lost == ["1.0.2"], "{point:?}: workers {lost:?} were lost, only 1.0.2 was killed");
            sound(&watch)?;
            lab.spawn_daemon(old)?;
            if in_time {
                break;
            }
        }
    }
    lab.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_sleeps_through_its_lease_harms_nothing_and_all_may_restart_at_once() -> Result<()> {
    let (mut lab, mut watch) = trio().await?;
    let before = lab.pids().await?;
    let old = lab.leader().await?;
    lab.signal_daemon_at(old, Signal::STOP)?;
    let stopped = Instant::now();
    let new = taken_over(&lab, &mut watch, old, stopped, "leader stopped").await?;
    // Its sessions are still open: agents and workers leave it for the new one by themselves.
    watch.steps(5).await?;
    lab.signal_daemon_at(old, Signal::CONT)?;
    eventually("the old leader to know", async || Ok(!lab.leads(old).await)).await?;
    watch.steps(5).await?;
    ensure!(lab.leads(new).await && !lab.leads(old).await, "two daemons lead");
    same_workers(&mut lab, &mut watch, &before).await?;
    kill_now(lab.pid("0.0.3").await?).await?;
    watch.until_degrees(&[3, 4]).await?;
    watch.until_degrees(&[4, 4]).await?;
    watch.steps(2).await?;

    let before = lab.pids().await?;
    for number in 0..3 {
        lab.kill_daemon_at(number)?;
    }
    let killed = Instant::now();
    watch.until_the_end().await?;
    let seen = watch.step;
    (0..3).try_for_each(|number| lab.spawn_daemon(number))?;
    lab.leader().await?;
    println!("all daemons killed: one in charge after {:?}", killed.elapsed());
    watch.follow(lab.watch().await?.into_events());
    watch.until_step(seen + 5).await?;
    same_workers(&mut lab, &mut watch, &before).await?;
    sound(&watch)?;
    lab.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn training_outlives_etcds_leader_and_twenty_seconds_without_a_quorum() -> Result<()> {
    let (mut lab, mut watch) = trio().await?;
    let before = lab.pids().await?;
    let etcd = lab.etcd.as_mut().context("several daemons have an etcd")?;
    let member = etcd.leader().await?;
    etcd.kill_member(member)?;
    let killed = Instant::now();
    etcd.leader().await?;
    // A write by the daemon that leads: a GPU's worker dies and comes back.
    let leader = lab.leader().await?;
    println!("etcd's leader killed: daemon {leader} in charge after {:?}", killed.elapsed());
    watch.follow(lab.watch().await?.into_events());
    kill_now(lab.pid("1.0.1").await?).await?;
    watch.until_degrees(&[4, 3]).await?;
    watch.until_degrees(&[4, 4]).await?;
    let etcd = lab.etcd.as_mut().context("as above")?;
    etcd.start_member(member)?;
    etcd.leader().await?;
    let after = lab.pids().await?;
    ensure!(lost(&before, &after) == ["1.0.1"], "more than one worker was lost");

    let step = lab.job().await?.committed_step();
    etcd_quorum(&lab, Signal::STOP)?;
    // What is tested is that time.
    tokio::time::sleep(Duration::from_secs(20)).await;
    for number in 0..3 {
        ensure!(!lab.leads(number).await, "daemon {number} leads without a store");
    }
    etcd_quorum(&lab, Signal::CONT)?;
    let woken = Instant::now();
    lab.leader().await?;
    println!("etcd's quorum back: a daemon in charge after {:?}", woken.elapsed());
    watch.follow(lab.watch().await?.into_events());
    watch.until("steps made meanwhile", |seen| seen.step > step + 20).await?;
    watch.steps(3).await?;
    same_workers(&mut lab, &mut watch, &after).await?;
    sound(&watch)?;
    lab.stop().await
}

fn etcd_quorum(lab: &Lab, with: Signal) -> Result<()> {
    lab.etcd.as_ref().context("several daemons have an etcd")?.signal_quorum(with)
}
