//! The health of this node's GPUs: what the probe and the kernel log tell, put together.

use crate::clock::{Clock, Millis};
use crate::files;
use crate::health::{Boot, Memory, Tracker, Transition, XidSeen};
use crate::kernel_log::LogNews;
use crate::kernel_log::xid_line::{self, BusId, XidLine};
use crate::policy::Policies;
use crate::probe::protocol::{GpuIdentity, ProbeLine};
use crate::sight::Sight;
use reknit_layout::GpuId;
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::time::Duration;
use tracing::{info, warn};

const ONE_LINE_IN: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct NodeHealth {
    clock: Clock,
    boot: Boot,
    pub(crate) tracker: Tracker,
    pub(crate) gpus: BTreeMap<GpuId, GpuIdentity>,
    pub(crate) sight: Sight,
    /// Older lines of the kernel log do not count.
    pub(crate) log_since: Option<Millis>,
    /// The lines that are seen are not old ones.
    log_is_live: bool,
    /// Taken so far.
    pub(crate) readings: u64,
    /// The last XID of the kernel log that was passed on to our own.
    logged: Option<(GpuId, u64, Millis)>,
}

/// What follows from news.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    pub(crate) transitions: Vec<Transition>,
    /// No GPU answers this probe.
    pub(crate) replace_probe: bool,
    /// There is something to see that the probe's next reading would tell too late.
    pub(crate) read_now: bool,
    /// The list of GPUs changed.
    pub(crate) gpus_changed: bool,
}

impl Heard {
    fn of(transitions: impl IntoIterator<Item = Transition>) -> Self {
        Self { transitions: transitions.into_iter().collect(), ..Self::default() }
    }
}

impl NodeHealth {
    pub(crate) fn new(clock: Clock, policies: Policies, memory: Memory) -> Self {
        let boot = this_boot(clock.now());
        Self {
            tracker: Tracker::new(policies, boot.clone(), memory),
            clock,
            boot,
            gpus: BTreeMap::new(),
            sight: Sight::default(),
            log_since: None,
            log_is_live: false,
            readings: 0,
            logged: None,
        }
    }

    pub(crate) fn boot_id(&self) -> &str {
        &self.boot.id
    }

    pub(crate) fn now(&self) -> Millis {
        self.clock.now()
    }

    pub(crate) fn line(&mut self, line: ProbeLine) -> Heard {
        let now = self.now();
        match line {
            ProbeLine::Ready { gpus, silent, driver: _ } => self.found(gpus, &silent),
            ProbeLine::Reading { gpu, reading } => {
                self.readings += 1;
                self.sight.reading(now, &gpu, &reading);
                Heard::of(self.tracker.reading(now, &gpu, &reading))
            }
            ProbeLine::Xid { gpu, xid } => {
                info!(%gpu, xid, "XID");
                Heard::of(self.tracker.xid(now, &gpu, &XidSeen { number: xid, log: None }))
            }
            ProbeLine::Gap { gpu, what } => {
                warn!(%gpu, what, "not everything can be seen");
                self.sight.gap(&gpu, what);
                Heard::default()
            }
            ProbeLine::GapClosed { gpu, what } => {
                info!(%gpu, what, "can be seen again");
                self.sight.gap_closed(&gpu, &what);
                Heard::default()
            }
            ProbeLine::Tick { busy } => {
                let (transitions, replace_probe) = self.tracker.hung(now, &busy);
                Heard { transitions, replace_probe, ..Heard::default() }
            }
            // The keeper ends with the one; the other is an answer to who asked for it.
            ProbeLine::Failed { .. } | ProbeLine::PowerLimit { .. } => Heard::default(),
        }
    }

    /// GPUs that an earlier start has seen: none answers now, and the daemon shall know of them.
    pub(crate) fn not_found_yet(&mut self, known: Vec<GpuIdentity>) {
        for gpu in known {
            self.tracker.watch(&gpu, false);
            self.gpus.insert(gpu.uuid.clone(), gpu);
        }
    }

    fn found(&mut self, found: Vec<GpuIdentity>, silent: &[GpuId]) -> Heard {
        let found: BTreeMap<GpuId, GpuIdentity> =
            found.into_iter().map(|gpu| (gpu.uuid.clone(), gpu)).collect();
        self.sight.ready(found.keys());
        let gpus_changed = found != self.gpus;
        if gpus_changed {
            for gone in self.gpus.keys().filter(|gpu| !found.contains_key(gpu)) {
                self.tracker.forget(gone);
            }
            for gpu in found.values() {
                self.tracker.watch(gpu, !silent.contains(&gpu.uuid));
            }
            self.gpus = found;
        }
        Heard { gpus_changed, ..Heard::default() }
    }

    /// Nothing can be read until another probe is ready.
    pub(crate) fn ended(&mut self, why: &str) -> Heard {
        let cause = format!("the node is blind: {why}");
        let heard = Heard::of(self.tracker.blind(self.now(), &cause));
        self.sight.ended(cause);
        heard
    }

    pub(crate) fn log(&mut self, news: LogNews) -> Heard {
        match news {
            LogNews::Opened => {
                self.sight.no_kernel_log = None;
                self.log_is_live = false;
            }
            LogNews::CaughtUp => self.log_is_live = true,
            LogNews::Unreadable { why } => {
                warn!(why, "no kernel log");
                self.sight.no_kernel_log = Some(why);
            }
            LogNews::Line { text, at_us, cursor: _ } => {
                if let Some(line) = xid_line::parse(&text) {
                    // What is written now has happened now.
                    let at_us = at_us.filter(|_| !self.log_is_live);
                    let at = at_us.map(|us| self.boot.at.after(Duration::from_micros(us)));
                    return self.logged(at, &line);
                }
            }
        }
        Heard::default()
    }

    /// A line may be old: of before the agent's start, or of its absence.
    fn logged(&mut self, at: Option<Millis>, line: &XidLine) -> Heard {
        let now = self.now();
        let at = at.map_or(now, |at| at.min(now));
        if self.log_since.is_some_and(|since| at < since) {
            return Heard::default();
        }
        let place = |gpu: &GpuIdentity| BusId::parse(&gpu.pci_bus_id);
        let Some(gpu) = self.gpus.values().find(|gpu| place(gpu) == Some(line.bus)) else {
            warn!(bus = %line.bus, xid = line.xid, "the kernel log tells an XID of a GPU that this node does not have");
            return Heard::default();
        };
        // Some come as a burst of lines.
        let same = |(uuid, xid, told): &(GpuId, u64, Millis)| {
            *uuid == gpu.uuid && *xid == line.xid && now.since(*told) < ONE_LINE_IN
        };
        if !self.logged.as_ref().is_some_and(same) {
            info!(gpu = %gpu.uuid, xid = line.xid, rest = line.rest, "XID in the kernel log");
            self.logged = Some((gpu.uuid.clone(), line.xid, now));
        }
        let seen = XidSeen { number: line.xid, log: Some(&line.rest) };
        let mut heard = Heard::of(self.tracker.xid(at, &gpu.uuid, &seen));
        heard.read_now = true;
        heard
    }
}

/// This boot of the node.
fn this_boot(now: Millis) -> Boot {
    // Finer than /proc/uptime: lines of the kernel log are placed in time by it.
    let uptime = clock_gettime(ClockId::Boottime);
    let uptime = Duration::try_from(uptime).unwrap_or_default();
    Boot { id: files::boot_id().unwrap_or_default(), at: now.before(uptime) }
}
