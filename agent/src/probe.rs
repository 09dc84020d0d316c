//! The probe: a child process, the only one that loads NVML. A driver that hangs or crashes takes the probe
//! with it and nothing else.

mod nvml;
pub(crate) mod protocol;
mod supervisor;
mod watch;

use crate::config::LogFormat;
use nvml::Found;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use protocol::{GpuIdentity, ProbeLine, ProbeOrder};
use rustix::process::{Signal, getpid, kill_process};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::thread;
use std::time::Duration;
use supervisor::{Orders, Supervisor};
use watch::Watch;

/// How often the supervisor is told that the probe lives.
const TICK: Duration = Duration::from_millis(250);
/// For a GPU to answer for the first time.
const FIRST_ANSWER: Duration = Duration::from_secs(2);
/// As in sysexits.h.
const EX_USAGE: u8 = 64;

/// What the supervisor starts the probe with.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ProbeArguments {
    #[arg(long)]
    pub(crate) nvml_library: PathBuf,
    #[arg(long)]
    pub(crate) interval_ms: u64,
    #[arg(long, value_enum)]
    pub(crate) log: LogFormat,
    /// Say only what went wrong.
    #[arg(long)]
    pub(crate) quiet: bool,
}

/// With every so many readings it is looked for GPUs that were not there before.
const SCOUT_EVERY: u32 = 10;

/// The GPUs being watched.
type Watches = RwLock<Vec<Arc<Watch>>>;

/// Runs until the supervisor closes the socket, or SIGTERM ends it, which is left to the kernel: no clean-up
/// can hang.
pub(crate) fn run(arguments: &ProbeArguments) -> ExitCode {
    let (supervisor, mut orders) = match supervisor::connect() {
        Ok((supervisor, orders)) => (Arc::new(supervisor), orders),
        Err(error) => {
            tracing::error!(%error, "the probe is started by the agent, with a socket as its standard input");
            return ExitCode::from(EX_USAGE);
        }
    };
    // Operators find the probe by this name in their tools.
    let _only_a_name = rustix::thread::set_name(c"reknit-probe");
    let Some(ProbeOrder::Expect { gpus: expected }) = orders.next() else {
        return ExitCode::SUCCESS;
    };
    // From here on the driver may block any thread but this one, which sees the supervisor go.
    let watches = Arc::new(Watches::default());
    let (ordered, to) = (watches.clone(), supervisor.clone());
    thread::spawn(move || obey(orders, &ordered, &to));
    let (nvml, found) = match start(&arguments.nvml_library, expected) {
        Ok(started) => started,
        Err(error) => {
            let message = words_of(&error, &arguments.nvml_library);
            supervisor.say(&ProbeLine::Failed { message });
            end();
        }
    };
    let party = Party {
        nvml,
        driver: nvml.sys_driver_version().unwrap_or_default(),
        interval: Duration::from_millis(arguments.interval_ms),
        watches: watches.clone(),
        supervisor: supervisor.clone(),
    };
    party.admit(found);
    thread::spawn(move || party.scout());
    loop {
        let watched = read(&watches);
        let busy = watched.iter().filter_map(|watch| watch.busy()).collect();
        // Only a fresh process finds a driver that went away and came back.
        let blind = !watched.is_empty() && watched.iter().all(|watch| watch.is_blind());
        drop(watched);
        supervisor.say(&ProbeLine::Tick { busy });
        if blind {
            supervisor.say(&ProbeLine::Failed { message: "no GPU finds its driver".to_owned() });
            end();
        }
        thread::sleep(TICK);
    }
}

fn read(watches: &Watches) -> RwLockReadGuard<'_, Vec<Arc<Watch>>> {
    watches.read().unwrap_or_else(PoisonError::into_inner)
}

/// Brings GPUs under watch: those that are there at the start, and those that come later.
struct Party {
    nvml: &'static Nvml,
    driver: String,
    interval: Duration,
    watches: Arc<Watches>,
    supervisor: Arc<Supervisor>,
}

impl Party {
    /// Orders for the GPUs are taken from `Ready` on, and their readings follow it.
    fn admit(&self, found: Vec<Found>) {
        let silent = found.iter().filter(|f| !f.answers).map(|f| f.gpu.uuid.clone()).collect();
        let mut to_start = Vec::new();
        let mut watches = self.watches.write().unwrap_or_else(PoisonError::into_inner);
        watches.retain(|watch| !watch.has_answered());
        for found in found {
            let (watch, queue) = Watch::new(self.nvml, found.gpu, self.supervisor.clone());
            watches.push(watch.clone());
            to_start.push((watch, queue, found.events));
        }
        let gpus = watches.iter().map(|watch| watch.gpu().clone()).collect();
        drop(watches);
        self.supervisor.say(&ProbeLine::Ready { driver: self.driver.clone(), gpus, silent });
        read(&self.watches).iter().for_each(|watch| watch.repeat_gaps());
        for (watch, queue, events) in to_start {
            watch.start(queue, events, self.interval);
        }
    }

    /// A GPU that did not answer at the start, or was not there, has no name until it does.
    fn scout(&self) {
        loop {
            thread::sleep(self.interval.saturating_mul(SCOUT_EVERY));
            let mut known: Vec<GpuIdentity> = read(&self.watches).iter().map(|w| w.gpu().clone()).collect();
            // Whoever had no name so far may have its place.
            known.retain(GpuIdentity::is_identified);
            let mut found = nvml::newcomers(self.nvml, &known);
            for newcomer in &mut found {
                let gpu = &mut newcomer.gpu;
                tracing::info!(gpu = %gpu.uuid, place = gpu.pci_bus_id, "another GPU is there");
                gpu.index = free_index(gpu.index, known.iter());
            }
            if !found.is_empty() || read(&self.watches).iter().any(|watch| watch.has_answered()) {
                self.admit(found);
            }
        }
    }
}

/// Indices shift when a GPU is missing, and those given stay.
fn free_index<'a>(wanted: u32, given: impl Iterator<Item = &'a GpuIdentity> + Clone) -> u32 {
    let taken = |index| given.clone().any(|gpu| gpu.index == index);
    if taken(wanted) { (0..).find(|index| !taken(*index)).unwrap_or(wanted) } else { wanted }
}

/// Ends the process at once: no clean-up of the driver's library, which may hang.
fn end() -> ! {
    loop {
        let _sent = kill_process(getpid(), Signal::KILL);
        thread::park();
    }
}

/// Passes orders to the GPUs' threads, and ends the probe with its supervisor. Never waits for a GPU.
fn obey(mut orders: Orders, watches: &Watches, supervisor: &Supervisor) {
    while let Some(order) = orders.next() {
        let watches = read(watches);
        match order {
            // A probe that just started reads both sets anyway.
            ProbeOrder::ReadNow => watches.iter().for_each(|watch| watch.read_now()),
            ProbeOrder::SetPowerLimit { gpu, limit } => {
                match watches.iter().find(|watch| watch.gpu().uuid == gpu) {
                    Some(watch) => watch.set_power_limit(limit),
                    None => {
                        let set = Err("this GPU is not watched".to_owned());
                        supervisor.say(&ProbeLine::PowerLimit { gpu, set });
                    }
                }
            }
            ProbeOrder::Expect { .. } => tracing::warn!("GPUs to expect can be named only at the start"),
        }
    }
    end();
}

/// The GPUs to watch: those that answer now, and those expected whose place no other GPU has taken.
fn start(library: &Path, expected: Vec<GpuIdentity>) -> Result<(&'static Nvml, Vec<Found>), NvmlError> {
    let nvml = nvml::load(library)?;
    let mut all = nvml::enumerate(nvml, FIRST_ANSWER)?;
    for old in expected.iter().cloned() {
        match all.iter_mut().find(|found| found.gpu.pci_bus_id == old.pci_bus_id) {
            // Indices shift when a GPU is missing; the first one seen stays its name.
            Some(found) if found.gpu.uuid == old.uuid => found.gpu.index = old.index,
            Some(_) => {}
            None => {
                // It is one of those that do not answer, most likely the one at its place.
                let place = all.iter().position(|f| !f.gpu.is_identified() && f.gpu.index == old.index);
                let place = place.or_else(|| all.iter().position(|f| !f.gpu.is_identified()));
                place.map(|place| all.remove(place));
                all.push(Found { gpu: old, answers: false, events: None });
            }
        }
    }
    let mut given = expected;
    given.retain(|old| all.iter().any(|found| found.gpu.uuid == old.uuid));
    for found in &mut all {
        if given.iter().all(|old| old.uuid != found.gpu.uuid) {
            found.gpu.index = free_index(found.gpu.index, given.iter());
            given.push(found.gpu.clone());
        }
    }
    all.sort_by_key(|found| found.gpu.index);
    Ok((nvml, all))
}

fn words_of(error: &NvmlError, library: &Path) -> String {
    if matches!(error, NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_)) {
        format!(
            "cannot load the NVML library {}: {error}; install the NVIDIA driver, or give the library's path with \
             --nvml-library",
            library.display()
        )
    } else {
        format!("NVML cannot be used: {error}")
    }
}
