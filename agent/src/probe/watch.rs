//! One GPU's two threads: one reads it steadily, the other waits for its events.

use super::protocol::{Busy, GpuIdentity, ProbeLine, Reading};
use super::{nvml, say};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, EventSet, Nvml};
use std::process;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A GPU that reads as gone is read again this much later: a fault, not a glitch, if it is still gone.
const SECOND_LOOK: Duration = Duration::from_millis(30);
/// A wait that fails at once is tried again after a while that doubles.
const RETRY: Duration = Duration::from_millis(20);
const RETRY_LIMIT: Duration = Duration::from_secs(1);
const WAIT_MS: u32 = 1000;
/// Reads in a row that find no driver before the probe gives up: only a fresh process finds a new driver.
const BLIND_READS: u32 = 4;
/// As in sysexits.h.
const EX_UNAVAILABLE: i32 = 69;

/// A GPU being watched.
#[derive(Debug)]
pub(super) struct Watch {
    nvml: &'static Nvml,
    gpu: GpuIdentity,
    /// When the sampler's present call into the driver began.
    calling: Mutex<Option<Instant>>,
}

impl Watch {
    pub(super) fn new(nvml: &'static Nvml, gpu: GpuIdentity) -> Self {
        Self { nvml, gpu, calling: Mutex::new(None) }
    }

    /// The call that has not returned, if there is one.
    pub(super) fn busy(&self) -> Option<Busy> {
        let began = *self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        began.map(|began| Busy {
            gpu: self.gpu.uuid.clone(),
            call: "a read".to_owned(),
            ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
        })
    }

    fn set_calling(&self, began: Option<Instant>) {
        *self.calling.lock().unwrap_or_else(PoisonError::into_inner) = began;
    }

    /// Reads the GPU every `interval`, or at once when nudged.
    pub(super) fn sample(&self, interval: Duration, nudged: &Receiver<()>) {
        let mut device = None;
        let mut gone = 0_u32;
        let mut blind = 0_u32;
        loop {
            self.set_calling(Some(Instant::now()));
            let reading = self.read(&mut device);
            self.set_calling(None);
            (gone, blind) = match &reading {
                Reading::Gone { .. } => (gone + 1, 0),
                Reading::Blind { .. } => (0, blind + 1),
                Reading::Answers { .. } | Reading::ResetRequired | Reading::Suspect { .. } => (0, 0),
            };
            say(&ProbeLine::Reading { gpu: self.gpu.uuid.clone(), reading });
            if blind >= BLIND_READS {
                process::exit(EX_UNAVAILABLE);
            }
            if gone == 1 {
                // Not cut short by a nudge: two looks at the same moment are one.
                thread::sleep(SECOND_LOOK);
                continue;
            }
            match nudged.recv_timeout(interval) {
                Ok(()) | Err(RecvTimeoutError::Timeout) => {}
                // The listener never ends before the process does.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(interval),
            }
        }
    }

    fn read(&self, device: &mut Option<Device<'static>>) -> Reading {
        let held = device.take();
        let was_held = held.is_some();
        match self.read_with(held, device) {
            Ok(reading) => reading,
            // A handle goes stale when its GPU was away: judge only what a fresh one says.
            Err(NvmlError::InvalidArg) if was_held => match self.read_with(None, device) {
                Ok(reading) => reading,
                Err(error) => nvml::reading_of(&error),
            },
            Err(error) => nvml::reading_of(&error),
        }
    }

    fn read_with(
        &self,
        held: Option<Device<'static>>,
        device: &mut Option<Device<'static>>,
    ) -> Result<Reading, NvmlError> {
        let found = match held {
            Some(held) => held,
            None => nvml::resolve(self.nvml, &self.gpu)?,
        };
        let reading = nvml::read(&found)?;
        *device = Some(found);
        Ok(reading)
    }

    /// Posts the GPU's XID errors, and has it read at once when anything happens.
    pub(super) fn listen(&self, mut set: Option<EventSet<'static>>, nudge: &SyncSender<()>) {
        let mut retry = RETRY;
        loop {
            let was_open = set.is_some();
            let heard = match &set {
                Some(set) => nvml::wait(self.nvml, set, WAIT_MS),
                None => self.open(&mut set).map(|()| nvml::Heard::Nothing),
            };
            match heard {
                Ok(nvml::Heard::Nothing) => {
                    if was_open && retry > RETRY {
                        // The GPU was away: a set of before may be deaf to it.
                        set = None;
                    }
                    retry = RETRY;
                }
                Ok(nvml::Heard::Xid(xid)) => {
                    say(&ProbeLine::Xid { gpu: self.gpu.uuid.clone(), xid });
                    let _a_nudge_is_pending = nudge.try_send(());
                }
                Ok(nvml::Heard::Other) => {
                    let _a_nudge_is_pending = nudge.try_send(());
                }
                Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => {
                    tracing::warn!(gpu = %self.gpu.uuid, "this GPU gives no events");
                    // The nudge must stay open for as long as the sampler runs.
                    loop {
                        thread::park();
                    }
                }
                Err(_) => {
                    // The set is kept: the GPU's last words may still come through it.
                    if retry == RETRY {
                        let _a_nudge_is_pending = nudge.try_send(());
                    }
                    thread::sleep(retry);
                    retry = (retry * 2).min(RETRY_LIMIT);
                }
            }
        }
    }

    fn open(&self, set: &mut Option<EventSet<'static>>) -> Result<(), NvmlError> {
        let device = nvml::resolve(self.nvml, &self.gpu)?;
        *set = Some(nvml::listen(self.nvml, &device)?);
        Ok(())
    }
}
