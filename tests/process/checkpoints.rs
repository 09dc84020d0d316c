//! Real processes: what nobody holds any more comes from a checkpoint, on an operator's word.

use anyhow::{Context, Result, ensure};
use reknit_tests::job::TestJob;
use reknit_tests::lab::{Lab, LabOptions, eventually};
use reknit_tests::process::kill_now;

/// Its units are those of slot 2 in both replicas.
async fn lose_both_holders(lab: &mut Lab) -> Result<()> {
    let (one, other) = (lab.pid("0.0.2").await?, lab.pid("1.0.2").await?);
    let (one, other) = tokio::join!(kill_now(one), kill_now(other));
    one?;
    other
}

async fn a_checkpoint(lab: &Lab) -> Result<()> {
    eventually("a complete checkpoint", async || Ok(!lab.job().await?.checkpoints.is_empty())).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_live_holder_the_job_waits_and_goes_on_from_a_checkpoint_when_told() -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    let job = TestJob { dtype: "f64", checkpoint: "every_steps = 5", ..TestJob::default() };
    lab.submit(job).await?;
    a_checkpoint(&lab).await?;
    watch.steps(3).await?;
    lose_both_holders(&mut lab).await?;
    watch.until("the job to wait", |seen| seen.phase == "Waiting").await?;
    ensure!(watch.explanation.contains("`reknit job restore test`"), "{}", watch.explanation);
    let before = watch.losses.clone();

    let mut watch = lab.watch().await?;
    let (status, out, err) = lab.reknit(&["job", "restore", "test", "--step", "3"])?;
    ensure!(status == Some(1) && err.contains("no complete checkpoint of step 3"), "{status:?} {out} {err}");
    let (status, _, err) = lab.reknit(&["job", "restore", "test"])?;
    ensure!(status == Some(0), "{err}");
    watch.until("a layout", |seen| !seen.layouts.is_empty()).await?;
    let from = watch.layouts[0].resume_step;
    ensure!(from > 0 && from.is_multiple_of(5), "from step {from}");
    let last = before.keys().last().copied().context("it had trained")?;
    watch.until_step(last + 2).await?;
    for (step, loss) in before.range(from + 1..) {
        let again = watch.losses[step];
        ensure!((again - loss).abs() <= 1e-10 * loss.abs(), "step {step}: {loss} and then {again}");
    }
    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0));
    let incidents = lab.incidents().await?;
    let lost =
        incidents.iter().filter(|incident| incident.kind != "planned").map(|incident| incident.steps_lost);
    // The step in work, if there was one, is lost with those after the checkpoint.
    let expected = last - from..=last - from + 1;
    let most = lost.clone().max().context("incidents")?;
    ensure!(expected.contains(&most), "{:?}, {last} {from}", lost.collect::<Vec<_>>());

    let folder = lab.dir.path().join("checkpoints/test").display().to_string();
    let (status, out, err) = lab.reknit(&["checkpoint", "verify", &folder])?;
    ensure!(status == Some(0) && out.contains("whole"), "{out} {err}");
    let (_, out, _) = lab.reknit(&["checkpoint", "ls", &folder, "--format", "json"])?;
    let listed: serde_json::Value = serde_json::from_str(&out)?;
    let complete = listed.as_array().context("a list")?.iter().filter(|found| found["complete"] == true);
    ensure!((1..=3).contains(&complete.count()), "three are kept: {out}");
    lab.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_shall_act_goes_back_by_itself() -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let job = TestJob { checkpoint: "every_steps = 5\nrestore = \"act\"", ..TestJob::default() };
    lab.submit(job).await?;
    a_checkpoint(&lab).await?;
    let watch = lab.watch().await?;
    drop(watch);
    lose_both_holders(&mut lab).await?;
    let mut watch = lab.watch().await?;
    watch.until("training again", |seen| seen.phase == "Running" && seen.complete > 3).await?;
    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0));
    lab.stop().await
}
