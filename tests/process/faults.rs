//! Five hundred steps with ten random faults: real signals, a real driver's word. `make chaos`; `SEED` chooses which.
//!
//! When a rank comes back is a matter of milliseconds here. That the same faults at the same operations give the same
//! bits over the whole run, the worker's test `chaos` shows.

use anyhow::{Context, Result, ensure};
use reknit_control_sim::Random;
use reknit_tests::job::TestJob;
use reknit_tests::lab::{Lab, LabOptions};
use reknit_tests::process::{freeze, kill_now};
use reknit_tests::{Watch, setting};
use std::collections::BTreeMap;

const STEPS: u64 = 500;
const FAULTS: u64 = 10;
/// Each fault has a stretch of the run for itself: it strikes and heals within it.
const STRETCH: u64 = STEPS / FAULTS;
/// Steps without a lost GPU, before it is given back.
const REDUCED: u64 = 5;
/// Of a loss, relative: the sums have another order.
const LIMIT: f64 = 1e-4;
const LAB: LabOptions = LabOptions { nodes: 2, gpus: 4, rejoin_hold_ms: 200, daemons: 1 };

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Kill,
    Freeze,
    LoseGpu,
}

impl Kind {
    /// What the daemon shall take it for.
    fn incident(self) -> &'static str {
        match self {
            Self::Kill => "worker_killed",
            Self::Freeze => "frozen",
            Self::LoseGpu => "gpu_lost",
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Strike {
    step: u64,
    kind: Kind,
    replica: u32,
    slot: u32,
}

impl Strike {
    fn random(random: &mut Random, number: u64) -> Self {
        let kinds = [Kind::Kill, Kind::Freeze, Kind::LoseGpu];
        Self {
            step: STRETCH * number + 5 + random.below(STRETCH / 5),
            kind: kinds[random.below(3) as usize],
            replica: random.below(LAB.nodes.into()) as u32,
            slot: random.below(LAB.gpus.into()) as u32,
        }
    }

    fn place(&self) -> String {
        format!("{}.0.{}", self.replica, self.slot)
    }

    /// Strikes, and waits until the job is whole again. Each replica fills a node, each slot a GPU of it.
    async fn on(self, lab: &mut Lab, watch: &mut Watch) -> Result<()> {
        let whole = [LAB.gpus; 2];
        let mut reduced = whole;
        reduced[self.replica as usize] -= 1;
        watch.until_step(self.step).await?;
        let (layouts, place) = (watch.layouts.len(), self.place());
        let pid = lab.pid(&place).await?;
        match self.kind {
            Kind::Kill => kill_now(pid).await?,
            Kind::Freeze => freeze(pid).await?,
            Kind::LoseGpu => lab.lose_gpu(self.replica, self.slot)?,
        }
        let struck = watch.step;
        watch.until("a layout without it", |seen| seen.layouts.len() > layouts).await?;
        ensure!(watch.degrees() == reduced, "{self:?}: {:?}", watch.degrees());
        if self.kind == Kind::LoseGpu {
            watch.steps(REDUCED).await?;
            ensure!(watch.degrees() == reduced, "{self:?}: {:?}", watch.degrees());
            lab.give_back_gpu(self.replica, self.slot)?;
        }
        watch.until_degrees(&whole).await?;
        ensure!(watch.layouts.len() == layouts + 2, "{self:?}: {:?}", watch.layouts);
        let [without, with] = [0, 1].map(|number| watch.layouts[layouts + number].resume_step);
        let kind = self.kind;
        println!(
            "  {kind:?} at {place} after step {struck}: without it from step {without}, with it from step {with}"
        );
        Ok(())
    }
}

/// What a run has left.
struct Run {
    losses: BTreeMap<u64, f64>,
    /// From which step on, and the degrees.
    layouts: Vec<(u64, Vec<u32>)>,
}

async fn train(strikes: &[Strike]) -> Result<Run> {
    let mut lab = Lab::start(LAB).await?;
    let mut watch = lab.watch().await?;
    // Long enough steps for a new process to come up within some of them.
    lab.submit(TestJob { steps: STEPS, batch: 48, ..TestJob::default() }).await?;
    watch.until_degrees(&[LAB.gpus; 2]).await?;
    for strike in strikes {
        strike.on(&mut lab, &mut watch).await?;
    }
    watch.until("the end", |seen| seen.phase == "Completed" || seen.phase == "Failed").await?;
    // The daemon has compared the digests of what all ranks hold alike.
    ensure!(watch.phase == "Completed", "{}", watch.explanation);
    watch.until("the account of the last step", |seen| seen.complete == STEPS).await?;
    ensure!((watch.samples_missing, watch.samples_repeated) == (0, 0), "samples were lost or repeated");
    ensure!(watch.losses.keys().copied().eq(1..=STEPS), "a step is missing: {:?}", watch.losses.keys());

    let incidents = lab.incidents().await?;
    let mut faults: Vec<_> = incidents.iter().filter(|incident| incident.kind != "planned").collect();
    faults.sort_by_key(|incident| incident.id);
    let blamed: Vec<_> = faults.iter().map(|fault| (fault.kind.as_str(), fault.place.clone())).collect();
    let made: Vec<_> = strikes.iter().map(|strike| (strike.kind.incident(), strike.place())).collect();
    ensure!(blamed == made, "{made:?} were taken for {blamed:?}");
    let lost = faults.iter().map(|incident| incident.steps_lost).max().unwrap_or_default();
    ensure!(lost <= 1, "{lost} steps were lost at once");
    let layouts = watch.layouts.iter().map(|layout| (layout.resume_step, layout.degrees.clone())).collect();
    let losses = std::mem::take(&mut watch.losses);
    lab.stop().await?;
    Ok(Run { losses, layouts })
}

impl Run {
    /// How many steps the runs took in the same layouts; their losses are the same to the bit.
    fn alike(&self, other: &Self) -> Result<u64> {
        let both = self.layouts.iter().zip(&other.layouts);
        let same = both.take_while(|(one, another)| one == another).count();
        let until = |run: &Self| run.layouts.get(same).map_or(STEPS, |(step, _)| *step);
        let alike = until(self).min(until(other));
        for (step, loss) in self.losses.range(..=alike) {
            let another = other.losses[step];
            ensure!(loss.to_bits() == another.to_bits(), "step {step}: {loss} and {another}");
        }
        Ok(alike)
    }

    fn apart(&self, other: &Self) -> Result<f64> {
        let pairs =
            self.losses.iter().map(|(step, loss)| Some((loss - other.losses.get(step)?).abs() / loss));
        let apart = pairs.collect::<Option<Vec<_>>>().context("every step has a loss in both")?;
        Ok(apart.into_iter().fold(0.0, f64::max))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes: make chaos"]
async fn five_hundred_steps_with_ten_random_faults_learn_the_same() -> Result<()> {
    let seed = setting("SEED", 1)?;
    let mut random = Random(seed);
    let strikes: Vec<_> = (0..FAULTS).map(|number| Strike::random(&mut random, number)).collect();
    let mut runs = Vec::new();
    for (name, strikes) in [("without faults", &[][..]), ("with them", &strikes), ("again", &strikes)] {
        println!("seed {seed}, {name}:");
        runs.push(train(strikes).await?);
    }
    let [clean, first, second] = runs.as_slice() else { unreachable!("three runs") };
    for (name, run) in [("with them", first), ("again", second)] {
        let apart = run.apart(clean)?;
        println!("{name}: {FAULTS} faults in {STEPS} steps, the largest difference of a loss is {apart:.1e}");
        ensure!(apart <= LIMIT, "{apart:e}");
    }
    println!("bit-equal: {} steps before the first fault", first.alike(clean)?);
    println!("and {} steps with the same faults, until a layout came a step later", first.alike(second)?);
    Ok(())
}
