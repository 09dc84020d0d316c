//! One GPU's two threads: one reads it steadily and does what is asked of it, the other waits for its events.

use super::nvml::events::{Events, Heard};
use super::nvml::{self, Calls, Fault, Handle, Meaning};
use super::protocol::{Busy, GpuIdentity, ProbeLine, Reading};
use super::supervisor::Supervisor;
use nvml_wrapper::Nvml;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// A GPU that reads as gone is read again this much later: a fault, not a glitch, if it is still gone.
const SECOND_LOOK: Duration = Duration::from_millis(30);
/// Between two readings, however many events ask for one.
const LEAST_GAP: Duration = Duration::from_millis(20);
/// The slow set is read with every so many fast ones.
const SLOW_EVERY: u32 = 10;
/// What waits for a GPU whose call does not return. More is refused.
const QUEUED_ERRANDS: usize = 16;
/// A wait that fails at once is tried again after a while that doubles.
const RETRY: Duration = Duration::from_millis(20);
const RETRY_LIMIT: Duration = Duration::from_secs(1);
/// Events that are not to be had are asked for again this much later.
const RETRY_UNSUPPORTED: Duration = Duration::from_secs(60);
/// Reads in a row that find no driver before the GPU counts as blind.
const BLIND_READS: u32 = 4;

/// What the sampler is asked to do between its readings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Errand {
    /// Read both sets at once.
    Read,
    /// In milliwatts, or the GPU's default.
    SetPowerLimit(Option<u32>),
}

/// A GPU being watched.
#[derive(Debug)]
pub(super) struct Watch {
    nvml: &'static Nvml,
    gpu: GpuIdentity,
    supervisor: Arc<Supervisor>,
    errands: SyncSender<Errand>,
    /// A `Read` is among the errands.
    read_asked: AtomicBool,
    sampler_calls: Calls,
    listener_calls: Calls,
    answered: AtomicBool,
    blind: AtomicBool,
    /// What cannot be seen of this GPU, as told so far.
    gaps: Mutex<Vec<String>>,
    /// Woken when the GPU answers again.
    listener: OnceLock<Thread>,
}

impl Watch {
    /// A watch that takes errands, and the queue to start it with.
    pub(super) fn new(
        nvml: &'static Nvml,
        gpu: GpuIdentity,
        supervisor: Arc<Supervisor>,
    ) -> (Arc<Self>, Receiver<Errand>) {
        let (errands, queue) = sync_channel(QUEUED_ERRANDS);
        let watch = Self {
            nvml,
            gpu,
            supervisor,
            errands,
            read_asked: AtomicBool::new(false),
            sampler_calls: Calls::default(),
            listener_calls: Calls::default(),
            answered: AtomicBool::new(false),
            blind: AtomicBool::new(false),
            gaps: Mutex::default(),
            listener: OnceLock::new(),
        };
        (Arc::new(watch), queue)
    }

    /// Starts both threads.
    pub(super) fn start(
        self: &Arc<Self>,
        queue: Receiver<Errand>,
        events: Option<Events>,
        interval: Duration,
    ) {
        let (sampler, listener) = (self.clone(), self.clone());
        if !self.gpu.is_identified() {
            thread::spawn(move || sampler.await_answer(interval));
            return;
        }
        thread::spawn(move || sampler.sample(interval, &queue));
        let thread = thread::spawn(move || listener.listen(events));
        let _first = self.listener.set(thread.thread().clone());
    }

    /// Reports why a GPU that has no name does not answer, until it does: then it is found under its name.
    fn await_answer(&self, interval: Duration) {
        while let Err(fault) = nvml::answers_at(self.nvml, self.gpu.index, &self.sampler_calls) {
            let reading = fault.reading();
            self.supervisor.say(&ProbeLine::Reading { gpu: self.gpu.uuid.clone(), reading });
            thread::sleep(interval);
        }
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Of a GPU that had no name: it has one now, and is no longer watched here.
    pub(super) fn has_answered(&self) -> bool {
        self.answered.load(Ordering::Relaxed)
    }

    /// No driver was found for this GPU in so many reads that only a fresh process may find one.
    pub(super) fn is_blind(&self) -> bool {
        self.blind.load(Ordering::Relaxed)
    }

    pub(super) const fn gpu(&self) -> &GpuIdentity {
        &self.gpu
    }

    /// The call that has not returned for longest, if there is one.
    pub(super) fn busy(&self) -> Option<Busy> {
        let calls = [self.sampler_calls.overdue(), self.listener_calls.overdue()];
        let (call, taken) = calls.into_iter().flatten().max_by_key(|(_, taken)| *taken)?;
        Some(Busy {
            gpu: self.gpu.uuid.clone(),
            call: call.to_owned(),
            ms: u64::try_from(taken.as_millis()).unwrap_or(u64::MAX),
        })
    }

    /// Asks for both sets at once. Never waits.
    pub(super) fn read_now(&self) {
        if self.read_asked.swap(true, Ordering::Relaxed) {
            return;
        }
        match self.errands.try_send(Errand::Read) {
            Ok(()) => {}
            // The GPU hangs: it is read as soon as it does not.
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.read_asked.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Asks for a power limit; the answer goes to the supervisor. Never waits.
    pub(super) fn set_power_limit(&self, limit: Option<u32>) {
        match self.errands.try_send(Errand::SetPowerLimit(limit)) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                let busy = self.busy().map_or_else(String::new, |busy| format!(" in {}", busy.call));
                self.answer_power_limit(Err(format!("the GPU hangs{busy}; earlier orders wait")));
            }
        }
    }

    fn answer_power_limit(&self, set: Result<u32, String>) {
        self.supervisor.say(&ProbeLine::PowerLimit { gpu: self.gpu.uuid.clone(), set });
    }

    fn gap(&self, what: String) {
        self.gaps.lock().unwrap_or_else(PoisonError::into_inner).push(what.clone());
        self.say_gap(what);
    }

    /// What could not be seen is seen again.
    fn close_gap(&self, what: String) {
        self.gaps.lock().unwrap_or_else(PoisonError::into_inner).retain(|gap| *gap != what);
        self.supervisor.say(&ProbeLine::GapClosed { gpu: self.gpu.uuid.clone(), what });
    }

    /// Tells the gaps again: the supervisor forgets them at `Ready`.
    pub(super) fn repeat_gaps(&self) {
        let gaps = self.gaps.lock().unwrap_or_else(PoisonError::into_inner).clone();
        gaps.into_iter().for_each(|what| self.say_gap(what));
    }

    fn say_gap(&self, what: String) {
        self.supervisor.say(&ProbeLine::Gap { gpu: self.gpu.uuid.clone(), what });
    }

    /// Reads the GPU every `interval`, or at once when asked.
    fn sample(&self, interval: Duration, errands: &Receiver<Errand>) {
        let mut sampler = Sampler::default();
        let (mut gone, mut blind, mut since_slow) = (0_u32, 0_u32, SLOW_EVERY);
        let mut answered = true;
        loop {
            let due = Instant::now() + interval;
            since_slow = since_slow.saturating_add(1);
            let slow = since_slow >= SLOW_EVERY;
            let reading = sampler.read(self, slow);
            let answers = matches!(reading, Reading::Answers { .. });
            if answers
                && !answered
                && let Some(listener) = self.listener.get()
            {
                listener.unpark();
            }
            answered = answers;
            (gone, blind) = match &reading {
                Reading::Gone { .. } => (gone + 1, 0),
                Reading::Blind { .. } => (0, blind + 1),
                Reading::Answers { slow, .. } => {
                    if slow.is_some() {
                        since_slow = 0;
                    }
                    (0, 0)
                }
                Reading::ResetRequired | Reading::Suspect { .. } => (0, 0),
            };
            self.blind.store(blind >= BLIND_READS, Ordering::Relaxed);
            self.supervisor.say(&ProbeLine::Reading { gpu: self.gpu.uuid.clone(), reading });
            if gone == 1 {
                // Not cut short by an errand: two looks at the same moment are one.
                thread::sleep(SECOND_LOOK);
                continue;
            }
            thread::sleep(LEAST_GAP.min(interval));
            if self.errands_until(due, errands, &mut sampler) {
                since_slow = SLOW_EVERY;
            }
        }
    }

    /// Does what is asked until `due`. Returns early, and true, when a reading of both sets is asked for.
    fn errands_until(&self, due: Instant, errands: &Receiver<Errand>, sampler: &mut Sampler) -> bool {
        loop {
            match errands.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(Errand::Read) => {
                    self.read_asked.store(false, Ordering::Relaxed);
                    return true;
                }
                Ok(Errand::SetPowerLimit(limit)) => {
                    self.answer_power_limit(sampler.set_power_limit(self, limit));
                }
                // `self` holds a sender, so the queue never closes.
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return false,
            }
        }
    }

    /// Posts the GPU's XID errors, and has it read at once when anything happens.
    fn listen(&self, mut events: Option<Events>) {
        let calls = &self.listener_calls;
        let mut retry = RETRY;
        let mut told = None;
        loop {
            let was_open = events.is_some();
            let heard = match &events {
                Some(open) => open.wait(calls),
                None => Events::of(self.nvml, &self.gpu, calls).map(|opened| {
                    events = Some(opened);
                    Heard::Nothing
                }),
            };
            let fault = match heard {
                Ok(Heard::Nothing) => {
                    if was_open {
                        if retry > RETRY {
                            // The GPU was away: a set of before may be deaf to it.
                            events = None;
                        }
                        retry = RETRY;
                        if let Some(what) = told.take() {
                            self.close_gap(what);
                        }
                    }
                    continue;
                }
                Ok(Heard::Xid(xid)) => {
                    self.supervisor.say(&ProbeLine::Xid { gpu: self.gpu.uuid.clone(), xid });
                    self.read_now();
                    continue;
                }
                Ok(Heard::Other) => {
                    self.read_now();
                    continue;
                }
                Err(fault) => fault,
            };
            if retry == RETRY {
                self.read_now();
            }
            let (pause, lasting) = match fault.meaning {
                // Its readings say so. The set is kept: the GPU's last words may still come through it.
                Meaning::Gone | Meaning::ResetRequired | Meaning::NotFound => (retry, false),
                Meaning::Suspect | Meaning::Stale | Meaning::Blind => (retry, retry >= RETRY_LIMIT),
                Meaning::Withheld | Meaning::NoSuchCall | Meaning::NotTold => (RETRY_UNSUPPORTED, true),
            };
            if lasting {
                // It may be the set that is broken.
                events = None;
                if told.is_none() {
                    let what = format!("XID events: {}", fault.text);
                    self.gap(what.clone());
                    told = Some(what);
                }
            }
            thread::park_timeout(pause);
            retry = (retry * 2).min(RETRY_LIMIT);
        }
    }
}

/// What the sampler keeps between its readings.
#[derive(Debug, Default)]
struct Sampler {
    handle: Option<Handle>,
    /// Calls that only root may make, and those of them that the supervisor was told of.
    withheld: BTreeSet<&'static str>,
    told: BTreeSet<&'static str>,
}

impl Sampler {
    fn read(&mut self, watch: &Watch, slow: bool) -> Reading {
        let held = self.handle.take();
        let was_held = held.is_some();
        let reading = match self.read_with(held, watch, slow) {
            // A handle goes stale when its GPU was away: judge only what a fresh one says, and from anew.
            Err(fault) if was_held && fault.meaning == Meaning::Stale => {
                match self.read_with(None, watch, true) {
                    Ok(Reading::Answers { fast, slow, reset: _ }) => {
                        Reading::Answers { fast, slow, reset: true }
                    }
                    Ok(other) => other,
                    Err(fault) => fault.reading(),
                }
            }
            Ok(reading) => reading,
            Err(fault) => fault.reading(),
        };
        for call in self.withheld.difference(&self.told) {
            watch.gap(format!("{call}: NVML answers NoPermission; run the agent as root"));
        }
        self.told.extend(&self.withheld);
        reading
    }

    fn read_with(&mut self, held: Option<Handle>, watch: &Watch, slow: bool) -> Result<Reading, Fault> {
        let calls = &watch.sampler_calls;
        let (mut handle, fresh) = match held {
            Some(held) => (held, false),
            None => (Handle::resolve(watch.nvml, &watch.gpu, calls, &mut self.withheld)?, true),
        };
        let reading = handle.read(slow || fresh, calls, &mut self.withheld)?;
        self.handle = Some(handle);
        Ok(reading)
    }

    fn set_power_limit(&mut self, watch: &Watch, limit: Option<u32>) -> Result<u32, String> {
        let calls = &watch.sampler_calls;
        let handle = match self.handle.take() {
            Some(held) => Ok(held),
            None => Handle::resolve(watch.nvml, &watch.gpu, calls, &mut self.withheld),
        };
        let set = handle.and_then(|mut handle| {
            let set = handle.set_power_limit(limit, calls);
            // Also one that has gone stale: the next reading finds it so.
            self.handle = Some(handle);
            set
        });
        set.map_err(|fault: Fault| match fault.meaning {
            Meaning::Withheld => format!("{}; run the agent as root", fault.text),
            Meaning::Gone
            | Meaning::ResetRequired
            | Meaning::Suspect
            | Meaning::Stale
            | Meaning::Blind
            | Meaning::NotFound
            | Meaning::NoSuchCall
            | Meaning::NotTold => fault.text,
        })
    }
}
