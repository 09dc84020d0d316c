//! The probe: a child process, the only one that loads NVML. A driver that hangs or crashes takes the probe
//! with it and nothing else.

mod nvml;
pub(crate) mod protocol;
mod watch;

use crate::config::LogFormat;
use nvml::Found;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use protocol::{Failure, GpuIdentity, ProbeLine, ProbeOrder};
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;
use watch::Watch;

/// How often the supervisor is told that the probe lives.
const TICK: Duration = Duration::from_millis(250);
/// For a GPU to answer for the first time.
const FIRST_ANSWER: Duration = Duration::from_secs(5);
/// As in sysexits.h.
const EX_UNAVAILABLE: u8 = 69;

/// What the supervisor starts the probe with.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ProbeArguments {
    #[arg(long)]
    pub(crate) nvml_library: PathBuf,
    #[arg(long)]
    pub(crate) interval_ms: u64,
    #[arg(long, value_enum)]
    pub(crate) log: LogFormat,
}

/// Writes a whole line to the supervisor. When it is gone the probe ends.
fn say(line: &ProbeLine) {
    let Ok(mut text) = serde_json::to_vec(line) else {
        return;
    };
    text.push(b'\n');
    let mut out = io::stdout().lock();
    if out.write_all(&text).and_then(|()| out.flush()).is_err() {
        process::exit(0);
    }
}

/// Runs until the supervisor closes the probe's input.
pub(crate) fn run(arguments: &ProbeArguments) -> ExitCode {
    let Some(expected) = read_expected() else {
        return ExitCode::SUCCESS;
    };
    // From here on the driver may block any thread but this one, which sees the supervisor go.
    thread::spawn(end_with_the_supervisor);
    let (nvml, found) = match start(&arguments.nvml_library, expected) {
        Ok(started) => started,
        Err(error) => {
            say(&ProbeLine::Failed { reason: failure_of(&error), message: error.to_string() });
            return ExitCode::from(EX_UNAVAILABLE);
        }
    };
    say(&ProbeLine::Ready {
        driver: nvml.sys_driver_version().unwrap_or_default(),
        gpus: found.iter().map(|found| found.gpu.clone()).collect(),
        silent: found.iter().filter(|f| !f.answers).map(|f| f.gpu.uuid.clone()).collect(),
    });
    let interval = Duration::from_millis(arguments.interval_ms);
    let mut watches = Vec::new();
    for found in found {
        let watch = Arc::new(Watch::new(nvml, found.gpu));
        let (nudge, nudged) = mpsc::sync_channel(1);
        let (sampler, listener) = (watch.clone(), watch.clone());
        thread::spawn(move || sampler.sample(interval, &nudged));
        thread::spawn(move || listener.listen(found.events, &nudge));
        watches.push(watch);
    }
    loop {
        let busy = watches.iter().filter_map(|watch| watch.busy()).collect();
        say(&ProbeLine::Tick { busy });
        thread::sleep(TICK);
    }
}

fn read_expected() -> Option<Vec<GpuIdentity>> {
    let mut line = String::new();
    match io::stdin().lock().read_line(&mut line) {
        Ok(1..) => match serde_json::from_str(&line) {
            Ok(ProbeOrder::Expect { gpus }) => Some(gpus),
            Ok(ProbeOrder::ReadNow | ProbeOrder::SetPowerLimit { .. }) | Err(_) => None,
        },
        Ok(0) | Err(_) => None,
    }
}

fn end_with_the_supervisor() {
    let mut nothing = String::new();
    let _ended = io::stdin().lock().read_line(&mut nothing);
    process::exit(0);
}

/// The GPUs to watch: those that answer now, and those expected whose place no other GPU has taken.
fn start(library: &Path, expected: Vec<GpuIdentity>) -> Result<(&'static Nvml, Vec<Found>), NvmlError> {
    let nvml = nvml::load(library)?;
    let mut all = nvml::enumerate(nvml, FIRST_ANSWER)?;
    for old in expected {
        match all.iter_mut().find(|found| found.gpu.pci_bus_id == old.pci_bus_id) {
            // Indices shift when a GPU is missing; the first one seen stays its name.
            Some(found) if found.gpu.uuid == old.uuid => found.gpu.index = old.index,
            Some(_) => {}
            None => all.push(Found { gpu: old, answers: false, events: None }),
        }
    }
    all.sort_by_key(|found| found.gpu.index);
    Ok((nvml, all))
}

fn failure_of(error: &NvmlError) -> Failure {
    if matches!(error, NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_)) {
        Failure::Library
    } else {
        Failure::Driver
    }
}
