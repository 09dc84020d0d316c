//! Workers that stop without dying, and workers that are slow.

use anyhow::{Context, Result, ensure};
use reknit_proto::v1::Incident;
use reknit_tests::job::TestJob;
use reknit_tests::lab::{Lab, LabOptions};
use reknit_tests::process::{freeze, kill_now, signal};
use rustix::process::Signal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_rank_is_named_and_the_others_go_on() -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_degrees(&[4, 4]).await?;
    let mut times = Vec::new();
    for (repeat, place) in ["0.0.1", "1.0.3", "0.0.0", "1.0.1", "0.0.2"].into_iter().enumerate() {
        watch.steps(20).await?;
        let mut expected = [4, 4];
        expected[usize::from(place.starts_with('1'))] = 3;
        let (pid, layouts) = (lab.pid(place).await?, watch.layouts.len());
        let frozen = Instant::now();
        freeze(pid).await?;
        watch.until("a layout without it", |seen| seen.layouts.len() > layouts).await?;
        ensure!(watch.degrees() == expected, "{place} was frozen, yet {:?}", watch.degrees());
        watch.steps(1).await?;
        let took = frozen.elapsed();
        watch.until("the incident", |seen| seen.incidents.iter().any(|i| i.kind == "frozen")).await?;
        let incident = watch.incidents.iter().find(|i| i.kind == "frozen").context("it was seen")?;
        ensure!(incident.place == place, "{place} was frozen, yet {incident:?}");
        ensure!(incident.signal.contains("others wait for it since"), "{}", incident.signal);
        println!(
            "repeat {repeat}: {} ms from SIGSTOP to a committed step: {}",
            took.as_millis(),
            incident.signal
        );
        times.push(took);
        // No false eviction, and the rank is knitted in again.
        watch.until_degrees(&[4, 4]).await?;
        ensure!(watch.layouts.len() == layouts + 2, "{:?}", watch.layouts);
        watch.incidents.clear();
    }
    println!("frozen rank to the next committed step: median {:?}, all {times:?}", middle(&mut times));
    // The bar is 1 s on a machine of its own.
    ensure!(middle(&mut times) < Duration::from_secs(3), "{times:?}");
    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0));
    lab.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_rank_is_only_told_where_policy_says_so() -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob { recovery: "on_hang = \"report\"", ..TestJob::default() }).await?;
    watch.until_degrees(&[4, 4]).await?;
    watch.steps(20).await?;
    let (pid, layouts) = (lab.pid("1.0.2").await?, watch.layouts.len());
    freeze(pid).await?;
    watch.until("the incident", |seen| !seen.incidents.is_empty()).await?;
    let incident = &watch.incidents[0];
    ensure!((incident.kind.as_str(), incident.place.as_str()) == ("frozen", "1.0.2"), "{incident:?}");
    let step = watch.step;
    signal(pid, Signal::CONT)?;
    watch.until("the end of the hang", |seen| seen.incidents.iter().any(|i| i.recovered_us > 0)).await?;
    watch.until_step(step + 20).await?;
    ensure!(watch.layouts.len() == layouts && watch.phase == "Running", "{:?}", watch.phase);
    ensure!(lab.pid("1.0.2").await? == pid, "the worker was replaced");
    let steps: Vec<_> = watch.losses.keys().copied().collect();
    ensure!(steps.windows(2).all(|pair| pair[0] + 1 == pair[1]), "a step is missing: {steps:?}");
    lab.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_freezes_amid_a_change_is_dropped_soon() -> Result<()> {
    let mut lab = Lab::start(LabOptions::default()).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob::default()).await?;
    watch.until_degrees(&[4, 4]).await?;
    watch.steps(20).await?;
    let (dies, freezes) = (lab.pid("0.0.1").await?, lab.pid("1.0.2").await?);
    let begun = Instant::now();
    // Before anybody can have waited for it for long, another one's death begins the change.
    freeze(freezes).await?;
    kill_now(dies).await?;
    watch.until_degrees(&[3, 3]).await?;
    watch.steps(1).await?;
    let took = begun.elapsed();
    println!("frozen amid a change to the next committed step: {took:?}");
    ensure!(took < Duration::from_secs(8), "it was only dropped after its time to stop: {took:?}");
    let silent = |incident: &Incident| incident.signal.contains("has said nothing for");
    watch.until("the incident", |seen| seen.incidents.iter().any(silent)).await?;
    watch.until_degrees(&[4, 4]).await?;
    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0));
    lab.stop().await
}

fn middle(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Stops and continues a process in turn, half of the time each, until it is dropped.
struct Brake {
    pid: u32,
    on: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Brake {
    fn new(pid: u32, turn: Duration) -> Self {
        let on = Arc::new(AtomicBool::new(true));
        let goes = Arc::clone(&on);
        let thread = std::thread::spawn(move || {
            while goes.load(Ordering::Relaxed) {
                for with in [Signal::STOP, Signal::CONT] {
                    let _the_test_notices_a_dead_worker = signal(pid, with);
                    std::thread::sleep(turn);
                }
            }
        });
        Self { pid, on, thread: Some(thread) }
    }
}

impl Drop for Brake {
    fn drop(&mut self) {
        self.on.store(false, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = signal(self.pid, Signal::CONT);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_rank_is_named_with_its_factor() -> Result<()> {
    let mut lab = Lab::start(LabOptions { nodes: 1, gpus: 3, ..LabOptions::default() }).await?;
    let mut watch = lab.watch().await?;
    lab.submit(TestJob { tensor: 3, data: 1, ..TestJob::default() }).await?;
    watch.until_degrees(&[3]).await?;
    watch.steps(20).await?;
    let (pid, layouts) = (lab.pid("0.0.2").await?, watch.layouts.len());
    let begun = Instant::now();
    let brake = Brake::new(pid, Duration::from_millis(2));
    let slow = |incident: &Incident| incident.kind == "slow" && incident.place == "0.0.2";
    watch.until("the straggler", |seen| seen.incidents.iter().any(slow)).await?;
    let incident = watch.incidents.iter().find(|i| slow(i)).context("it was seen")?;
    println!("named after {:?}: {}", begun.elapsed(), incident.signal);
    let factor: f64 = incident
        .signal
        .split(" times as long")
        .next()
        .and_then(|before| before.rsplit(' ').next())
        .context("a factor")?
        .parse()?;
    // Stopped half of the time, it computes twice as long; the scheduler blurs that.
    ensure!((1.3..=4.0).contains(&factor), "{}", incident.signal);
    ensure!(watch.layouts.len() == layouts, "only told");
    drop(brake);
    watch.until("its end", |seen| seen.incidents.iter().any(|i| slow(i) && i.recovered_us > 0)).await?;
    lab.stop().await
}
