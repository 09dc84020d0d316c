//! A machine that has more to do than it can: whoever is only slow is not taken for hung. `make chaos`; `MINUTES` says how
//! long.

use anyhow::{Context, Result, ensure};
use reknit_proto::v1::Incident;
use reknit_tests::job::TestJob;
use reknit_tests::lab::{Lab, LabOptions};
use reknit_tests::process::freeze;
use reknit_tests::{Watch, setting};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// From SIGSTOP to a layout without the frozen rank.
const DROPPED_WITHIN: Duration = Duration::from_secs(1);
const BURST: Duration = Duration::from_secs(2);

/// Threads that only compute, two for each core, and bursts of what a build does: files written to the disk, many short
/// processes, all cores at once. Ends when dropped.
struct Load {
    on: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<u64>>>,
}

impl Load {
    fn start(folder: PathBuf) -> Result<Self> {
        let cores = std::thread::available_parallelism()?.get();
        let on = Arc::new(AtomicBool::new(true));
        let spin = |_| {
            let on = Arc::clone(&on);
            std::thread::spawn(move || spin(|| on.load(Ordering::Relaxed)))
        };
        let mut threads: Vec<_> = (0..2 * cores).map(spin).collect();
        let goes = Arc::clone(&on);
        threads.push(std::thread::spawn(move || {
            let mut bursts = 0;
            while goes.load(Ordering::Relaxed) {
                burst(&folder, cores)?;
                bursts += 1;
                std::thread::sleep(BURST);
            }
            Ok(bursts)
        }));
        Ok(Self { on, threads })
    }

    /// How many bursts there were.
    fn stop(mut self) -> Result<u64> {
        self.on.store(false, Ordering::Relaxed);
        let mut last = 0;
        for thread in self.threads.drain(..) {
            last = thread.join().ok().context("a thread of the load panicked")??;
        }
        Ok(last)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.on.store(false, Ordering::Relaxed);
    }
}

fn spin(mut goes: impl FnMut() -> bool) -> Result<u64> {
    let mut turns = 0;
    while goes() {
        turns = std::hint::black_box(turns + 1);
    }
    Ok(turns)
}

fn burst(folder: &std::path::Path, cores: usize) -> Result<()> {
    let end = Instant::now() + BURST;
    let busy: Vec<_> =
        (0..cores).map(|_| std::thread::spawn(move || spin(|| Instant::now() < end))).collect();
    let block = vec![1; 1 << 20];
    while Instant::now() < end {
        let mut file = std::fs::File::create(folder.join("written"))?;
        for _ in 0..32 {
            file.write_all(&block)?;
        }
        file.sync_data()?;
        for _ in 0..20 {
            ensure!(std::process::Command::new("true").status()?.success());
        }
    }
    for thread in busy {
        thread.join().ok().context("a thread of the load panicked")??;
    }
    Ok(())
}

/// Stops a rank; it must be named and dropped, and it comes back.
async fn find_frozen(lab: &mut Lab, watch: &mut Watch, place: &str, when: &str) -> Result<Duration> {
    let (pid, layouts) = (lab.pid(place).await?, watch.layouts.len());
    watch.incidents.clear();
    let mut reduced = [2, 2];
    reduced[usize::from(place.starts_with('1'))] = 1;
    let frozen = Instant::now();
    freeze(pid).await?;
    watch.until("a layout without it", |seen| seen.layouts.len() > layouts).await?;
    let took = frozen.elapsed();
    ensure!(watch.degrees() == reduced, "{place} was frozen, yet {:?}", watch.degrees());
    let hang = |incident: &&Incident| incident.kind == "frozen";
    watch.until("the incident", |seen| seen.incidents.iter().any(|incident| hang(&incident))).await?;
    let incident = watch.incidents.iter().find(hang).context("it was seen")?;
    ensure!(incident.place == place, "{incident:?}");
    println!("{when}: {place} frozen, dropped after {} ms: {}", took.as_millis(), incident.signal);
    watch.until_degrees(&[2, 2]).await?;
    watch.until_whole(lab, 4).await?;
    ensure!(watch.layouts.len() == layouts + 2, "{:?}", watch.layouts);
    watch.steps(20).await?;
    Ok(took)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "ten minutes: make chaos"]
async fn on_a_loaded_machine_nobody_is_taken_for_hung() -> Result<()> {
    let minutes = setting("MINUTES", 10)?;
    let mut lab = Lab::start(LabOptions { gpus: 2, ..LabOptions::default() }).await?;
    let mut watch = lab.watch().await?;
    let job = TestJob { steps: 100_000_000, tensor: 2, min_tensor: 1, ..TestJob::default() };
    lab.submit(job).await?;
    watch.until_degrees(&[2, 2]).await?;
    watch.steps(50).await?;
    let before = find_frozen(&mut lab, &mut watch, "1.0.1", "before").await?;

    let load = Load::start(lab.dir.path().to_owned())?;
    let (epoch, workers) = (lab.job().await?.epoch, lab.pids().await?);
    let (first, layouts) = (watch.step, watch.layouts.len());
    watch.incidents.clear();
    let (begun, end) = (Instant::now(), Instant::now() + Duration::from_secs(60 * minutes));
    // On such a machine one may well compute slowly for a while: that is told, and costs nothing.
    let blamed = |incident: &Incident| incident.kind != "slow";
    watch
        .until("the end of the load", |seen| {
            Instant::now() >= end || seen.layouts.len() > layouts || seen.incidents.iter().any(blamed)
        })
        .await?;
    // Its end is told too.
    let slow: Vec<_> = watch.incidents.iter().filter(|incident| incident.recovered_us == 0).collect();
    let (steps, told) = (watch.step - first, slow.len());
    println!("{:?} under load: {steps} steps; {told} times somebody was told to be slow", begun.elapsed());
    for slow in slow {
        println!("  {}", slow.signal);
    }
    ensure!(!watch.incidents.iter().any(blamed), "a false incident: {:#?}", watch.incidents);
    ensure!(watch.layouts.len() == layouts, "{:?}", watch.layouts);
    let job = lab.job().await?;
    ensure!((job.epoch, job.phase.as_str()) == (epoch, "Running"), "{job:?}");
    ensure!(lab.pids().await? == workers, "workers were replaced");
    let under = find_frozen(&mut lab, &mut watch, "0.0.1", "under load").await?;
    println!("{} bursts", load.stop()?);

    watch.steps(20).await?;
    let after = find_frozen(&mut lab, &mut watch, "1.0.0", "after").await?;
    ensure!(before <= DROPPED_WITHIN && after <= DROPPED_WITHIN, "{before:?} {under:?} {after:?}");
    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0));
    lab.stop().await
}
