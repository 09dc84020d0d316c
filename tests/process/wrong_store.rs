//! A daemon that is started with a store that knows no job.

use anyhow::{Result, ensure};
use reknit_tests::job::TestJob;
use reknit_tests::lab::{Lab, LabOptions, eventually};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_without_its_store_ends_no_worker() -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_step(5).await?;
    let before = lab.pids().await?;
    lab.kill_daemon()?;
    watch.until_the_end().await?;
    let (store, away) = (lab.store(), lab.store().with_extension("away"));
    std::fs::rename(&store, &away)?;

    lab.start_daemon().await?;
    eventually("the empty daemon to tell of the workers", async || {
        let told = lab.logged("daemon");
        Ok((0..2).all(|node| told.contains(&format!("node node-{node} runs 4 workers of"))))
    })
    .await?;
    lab.kill_daemon()?;
    std::fs::remove_dir_all(&store)?;
    std::fs::rename(&away, &store)?;

    lab.start_daemon().await?;
    watch.follow(lab.watch().await?.into_events());
    watch.until_step(watch.step + 3).await?;
    watch.until_whole(&mut lab, before.len()).await?;
    ensure!(lab.pids().await? == before, "workers were lost");
    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0));
    lab.stop().await
}
