//! Agents that die, share a name, or are asked for something, under the real daemon.

use anyhow::{Context, Result, ensure};
use reknit_proto::v1::{HealthClass, NodeLink};
use reknit_tests::job::TestJob;
use reknit_tests::lab::{Lab, LabOptions, eventually};
use rustix::process::Signal;
use std::collections::BTreeSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_killed_in_mid_training_costs_no_step_and_no_transition() -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_step(5).await?;
    let before = [lab.pid("0.0.0").await?, lab.pid("0.0.3").await?];

    // A frozen daemon acknowledges nothing: the agent dies between its report and the acknowledgement.
    lab.signal_daemon(Signal::STOP)?;
    lab.raise_xid(0, 0, 4711)?;
    eventually("the first transition to be sent", async || Ok(lab.logged("node-0").contains("XID 4711")))
        .await?;
    lab.kill_agent(0)?;
    lab.signal_daemon(Signal::CONT)?;
    // Nobody is there to see this one, but its probe's successor.
    lab.restart_agent(0)?;
    eventually(
        "another probe to read",
        async || Ok(lab.logged("node-0").matches("probe ready").count() == 2),
    )
    .await?;
    lab.raise_xid(0, 1, 4712)?;
    watch
        .until("both transitions", |seen| seen.healths.iter().any(|h| h.verdict().cause.contains("4712")))
        .await?;
    watch.steps(10).await?;

    let causes: Vec<_> = watch.healths.iter().map(|health| health.verdict().cause.as_str()).collect();
    for xid in ["4711", "4712"] {
        let told = causes.iter().filter(|cause| cause.contains(xid)).count();
        ensure!(told == 1, "XID {xid} was told {told} times: {causes:?}");
    }
    let numbers: Vec<_> = watch.healths.iter().map(|health| health.sequence).collect();
    ensure!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{numbers:?}");
    ensure!(before == [lab.pid("0.0.0").await?, lab.pid("0.0.3").await?], "the workers were not adopted");
    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0));
    ensure!((watch.degrees(), watch.layouts.len()) == (&[4, 4][..], 1), "{:?}", watch.layouts);
    ensure!(lab.incidents().await?.is_empty(), "{:?}", lab.incidents().await?);
    lab.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_agent_under_one_name_waits_for_the_first_to_be_gone() -> Result<()> {
    let mut lab = Lab::start(LabOptions { nodes: 1, ..LabOptions::default() }).await?;
    lab.second_agent(0, "second")?;
    let words = "another agent is connected as node-0: stop it, or give each its own --node";
    eventually("the second to be refused", async || Ok(lab.logged("second").contains(words))).await?;
    ensure!(!lab.logged("second").contains("session with the daemon open"));
    ensure!(lab.nodes().await?[0].connected);
    lab.kill_agent(0)?;
    eventually("the second to take over", async || {
        Ok(lab.logged("second").contains("session with the daemon open"))
    })
    .await?;
    eventually("its GPUs", async || Ok(lab.nodes().await?[0].link() == NodeLink::Connected)).await
}

fn asked(lab: &Lab, args: &[&str]) -> Result<String> {
    let (status, out, error) = lab.reknit(args)?;
    ensure!(status == Some(0), "reknit {args:?}: {status:?} {error}");
    Ok(out)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_quiesces_probes_and_limits_through_the_tool() -> Result<()> {
    let mut lab = Lab::start(LabOptions { nodes: 2, gpus: 4, ..LabOptions::default() }).await?;
    let said = asked(&lab, &["gpu", "power", "node-0/1", "350", "--for", "1m"])?;
    ensure!(said.contains("350 W for 1 min"), "{said}");
    ensure!(lab.driver_file(0)?.contains("350000"), "nothing was set");
    let said = asked(&lab, &["gpu", "power", "node-0/1", "default", "--format", "json"])?;
    ensure!(said.starts_with('{') && said.contains("default again"), "{said}");
    ensure!(!lab.driver_file(0)?.contains("350000"), "it was not taken back");
    ensure!(asked(&lab, &["node", "probe", "node-1"])?.contains("every GPU was read"));

    let said = asked(&lab, &["node", "quiesce", "node-0", "--for", "90s"])?;
    ensure!(said.contains("closed for 90 s"), "{said}");
    let list = asked(&lab, &["node", "list"])?;
    let rows: Vec<_> = list.lines().filter(|line| line.starts_with("node-0 ")).collect();
    ensure!(rows.len() == 4 && rows.iter().all(|row| row.contains("unknown")), "{list}");
    eventually("the list to say quiesced", async || {
        Ok(asked(&lab, &["node", "list", "--format", "json"])?.contains("\"observability\":\"quiesced\""))
    })
    .await?;
    ensure!(asked(&lab, &["node", "resume", "node-0"])?.contains("read again"));
    let (status, _, error) = lab.reknit(&["node", "resume", "node-0"])?;
    ensure!(status == Some(1) && error.contains("is not quiesced"), "{status:?} {error}");
    eventually("all healthy", async || {
        let nodes = lab.nodes().await?;
        Ok(nodes
            .iter()
            .flat_map(|node| &node.gpus)
            .all(|gpu| gpu.health().as_str_name().ends_with("HEALTHY")))
    })
    .await?;

    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_step(3).await?;
    let (status, _, error) = lab.reknit(&["node", "quiesce", "node-0"])?;
    ensure!(
        status == Some(1) && error.contains("workers run on node-0") && error.contains("--force"),
        "{error}"
    );
    asked(&lab, &["node", "quiesce", "node-0", "--force"])?;
    watch.steps(5).await?;
    ensure!(watch.degrees() == [4, 4], "a quiesce costs no worker");
    let told: BTreeSet<_> = watch.healths.iter().map(|health| health.verdict().cause.as_str()).collect();
    ensure!(told.iter().any(|cause| cause.starts_with("quiesced")), "{told:?}");

    // An agent that falls silent is told apart from one that is gone.
    lab.kill_agent(0)?;
    eventually("silence", async || {
        let list = asked(&lab, &["node", "list", "--format", "json"])?;
        Ok(list.contains("\"link\":\"silent\""))
    })
    .await?;
    watch.steps(3).await?;
    lab.restart_agent(0)?;
    let back = async || Ok(lab.nodes().await?.first().context("a node")?.link() == NodeLink::Connected);
    eventually("it is back", back).await?;
    watch.steps(3).await?;
    ensure!(watch.layouts.len() == 1, "{:?}", watch.layouts);
    lab.stop().await
}

/// One replica, so that whatever a GPU cannot send is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_is_likely_to_fail_is_drained_while_it_can_still_send() -> Result<()> {
    let mut lab = Lab::start(LabOptions { nodes: 1, ..LabOptions::default() }).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob { data: 1, ..TestJob::default() }).await?;
    watch.until_step(5).await?;
    // Each of these is harmless by itself; together they give 110 points.
    for xid in [92, 63, 160, 161, 157, 93, 121, 163] {
        lab.raise_xid(0, 2, xid)?;
    }
    watch.until_degrees(&[3]).await?;
    let drained = watch.step;
    watch.until_step(drained + 10).await?;

    let told: Vec<_> =
        watch.healths.iter().map(|health| (health.health(), health.verdict().cause.as_str())).collect();
    ensure!(told.first().is_some_and(|(class, _)| *class == HealthClass::Predict), "{told:?}");
    let likely = (HealthClass::Drain, "the GPU is likely to fail soon");
    ensure!(told.contains(&likely), "{told:?}");
    let incidents = lab.incidents().await?;
    ensure!(incidents.len() == 1, "{incidents:?}");
    ensure!((incidents[0].kind.as_str(), incidents[0].steps_lost) == ("planned", 0), "{incidents:?}");
    ensure!(incidents[0].bytes_moved > 0, "its slices were not sent: {incidents:?}");
    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0));
    lab.stop().await
}
