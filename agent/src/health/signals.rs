//! From readings to signals: flags, growth since the reading before, rates.

use crate::clock::Millis;
use crate::policy::Signal;
use crate::probe::protocol::{FastSet, Reading, SlowSet};
use std::collections::VecDeque;
use std::time::Duration;

/// Clock event reasons. Source: `nvml.h`, `nvmlClocksEventReason*`.
const SOFTWARE_POWER_CAP: u64 = 0x4;
const HARDWARE_SLOWDOWN: u64 = 0x8;
const HARDWARE_THERMAL: u64 = 0x40;
const POWER_BRAKE: u64 = 0x80;
/// Under load PCIe links run at full speed; idle ones save power. This project's choice, in percent.
const LOAD: u32 = 50;
const GEN5: u32 = 5;

/// A signal's value in one reading. A signal that the reading does not tell has none.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Seen {
    pub(super) signal: Signal,
    pub(super) value: f64,
    pub(super) evidence: String,
}

impl Seen {
    pub(super) fn new(signal: Signal, value: f64, evidence: impl Into<String>) -> Self {
        Self { signal, value, evidence: evidence.into() }
    }

    fn flag(signal: Signal, is: bool, evidence: impl Into<String>) -> Self {
        Self::new(signal, if is { 1.0 } else { 0.0 }, evidence)
    }
}

/// What the answer as a whole says. A call that returned is not hung.
pub(super) fn of_answer(reading: &Reading) -> Vec<Seen> {
    let (said, evidence) = match reading {
        Reading::Answers { .. } => (None, ""),
        Reading::Gone { error } => (Some(Signal::Gone), error.as_str()),
        Reading::ResetRequired => (Some(Signal::ResetRequired), "NVML code 16"),
        Reading::Suspect { error } => (Some(Signal::Suspect), error.as_str()),
        Reading::Blind { error } => (Some(Signal::Blind), error.as_str()),
    };
    [Signal::Gone, Signal::ResetRequired, Signal::Suspect, Signal::Blind, Signal::Hung]
        .map(|signal| Seen::flag(signal, said == Some(signal), evidence))
        .into()
}

/// `baseline`: a bit for each link that was ever active.
pub(super) fn of_fast(
    before: Option<&(Millis, FastSet)>,
    now: Millis,
    fast: &FastSet,
    baseline: u32,
) -> Vec<Seen> {
    let mut seen = Vec::new();
    if let Some(action) = fast.recovery_action {
        let asked = Signal::of_recovery_action(action);
        for signal in [
            Signal::RecoveryReset,
            Signal::RecoveryReboot,
            Signal::RecoveryDrainP2p,
            Signal::RecoveryDrainAndReset,
            Signal::RecoveryImexDomain,
        ] {
            seen.push(Seen::flag(signal, asked == Some(signal), format!("recovery action {action}")));
        }
    }
    let before = before.map(|(at, fast)| (now.since(*at), fast));
    let count = |pick: fn(&FastSet) -> Option<u64>| grown(before, fast, pick);
    if let Some(Grown { from, to, .. }) = count(|fast| fast.ecc_uncorrected) {
        let evidence = format!("volatile uncorrected ECC count {from} -> {to}");
        seen.push(Seen::new(Signal::EccUncorrected, (to - from) as f64, evidence));
    }
    if let Some(grown) = count(|fast| fast.ecc_corrected) {
        let rate = grown.per(Duration::from_secs(1));
        seen.push(Seen::new(
            Signal::EccCorrectedRate,
            rate,
            format!("{rate:.0} corrected ECC errors a second"),
        ));
    }
    if let Some(active) = fast.links_active {
        let down = baseline & !active;
        let evidence = format!("NVLink {} inactive", numbers(down));
        seen.push(Seen::new(Signal::NvlinkDown, down.count_ones().into(), evidence));
    }
    if let Some(reasons) = fast.throttle {
        let slowed = reasons & (HARDWARE_SLOWDOWN | HARDWARE_THERMAL | POWER_BRAKE) != 0;
        let evidence = format!("clock event reasons {reasons:#x}");
        seen.push(Seen::flag(Signal::HardwareSlowdown, slowed, &evidence));
        seen.push(Seen::flag(Signal::SoftwarePowerCap, reasons & SOFTWARE_POWER_CAP != 0, &evidence));
    }
    if let (Some(temperature), Some(slowdown)) = (fast.temperature, fast.slowdown_temperature) {
        let margin = f64::from(slowdown) - f64::from(temperature);
        let evidence = format!("{temperature} C, slows down at {slowdown} C");
        seen.push(Seen::new(Signal::TemperatureMargin, margin, evidence));
    }
    seen.push(Seen::flag(Signal::PowerUnreadable, fast.power_unreadable, "the power reading fails"));
    seen
}

pub(super) fn of_slow(
    before: Option<&(Millis, SlowSet)>,
    now: Millis,
    slow: &SlowSet,
    utilization: Option<u32>,
    replays_in_a_minute: Option<u64>,
) -> Vec<Seen> {
    let mut seen = Vec::new();
    let flags = [
        (Signal::SramThreshold, slow.ecc_sram_threshold, "SRAM ECC threshold exceeded"),
        (Signal::MemoryUnrepairable, slow.memory_unrepairable, "memory is unrepairable"),
        (Signal::RemapPending, slow.remap_pending, "row remapping is pending"),
        (Signal::RemapFailure, slow.remap_failure, "row remapping failed"),
        (Signal::FabricRouteUnhealthy, slow.fabric_route_unhealthy, "fabric health: route unhealthy"),
        (
            Signal::FabricBandwidthDegraded,
            slow.fabric_bandwidth_degraded,
            "fabric health: degraded bandwidth",
        ),
    ];
    seen.extend(flags.into_iter().filter_map(|(signal, is, words)| Some(Seen::flag(signal, is?, words))));
    let retired = [slow.retired_single, slow.retired_double];
    if retired.iter().any(Option::is_some) {
        let pages: u32 = retired.into_iter().flatten().fold(0, u32::saturating_add);
        seen.push(Seen::new(Signal::RetiredPages, pages.into(), format!("{pages} pages retired")));
    }
    if let Some(pages) = slow.retired_double {
        let evidence = format!("{pages} pages retired for double-bit errors");
        seen.push(Seen::new(Signal::RetiredDoubleBit, pages.into(), evidence));
    }
    let before = before.map(|(at, slow)| (now.since(*at), slow));
    let count = |pick: fn(&SlowSet) -> Option<u64>| grown(before, slow, pick);
    let growth = [
        (Signal::RemappedRows, count(|slow| slow.remapped_rows.map(u64::from)), "remapped rows"),
        (Signal::NvlinkReplays, count(replays), "NVLink replays and recoveries"),
        (
            Signal::NvlinkRecoveryFailures,
            count(|slow| slow.link_recovery_failures),
            "failed NVLink recoveries",
        ),
    ];
    seen.extend(growth.into_iter().filter_map(|(signal, grown, words)| {
        let Grown { from, to, .. } = grown?;
        Some(Seen::new(signal, (to - from) as f64, format!("{words} {from} -> {to}")))
    }));
    if let Some(grown) = count(|slow| slow.link_crc_errors) {
        let rate = grown.per(Duration::from_secs(1));
        seen.push(Seen::new(Signal::NvlinkCrcRate, rate, format!("{rate:.0} NVLink CRC errors a second")));
    }
    if let Some(rate) = slow.link_ber {
        seen.push(Seen::new(Signal::NvlinkBitErrorRate, rate, format!("effective bit error rate {rate:e}")));
    }
    if let (Some(asked), Some(enforced)) = (slow.power_limit_mw, slow.power_limit_enforced_mw) {
        let below = asked.saturating_sub(enforced);
        let evidence = format!("power limit {enforced} mW in force, {asked} mW requested");
        seen.push(Seen::new(Signal::PowerLimitLowered, below.into(), evidence));
    }
    if let Some(replays) = replays_in_a_minute {
        let gen5 = slow.pcie_gen_max.or(slow.pcie_gen).is_some_and(|generation| generation >= GEN5);
        let signal = if gen5 { Signal::PcieReplaysGen5 } else { Signal::PcieReplaysGen4 };
        seen.push(Seen::new(signal, replays as f64, format!("{replays} PCIe replays in the last minute")));
    }
    seen.extend(pcie_degraded(slow, utilization));
    seen
}

fn replays(slow: &SlowSet) -> Option<u64> {
    match (slow.link_replays, slow.link_recoveries) {
        (None, None) => None,
        (replays, recoveries) => Some(replays.unwrap_or(0).saturating_add(recoveries.unwrap_or(0))),
    }
}

fn pcie_degraded(slow: &SlowSet, utilization: Option<u32>) -> Option<Seen> {
    let (now, full) = ((slow.pcie_gen?, slow.pcie_width?), (slow.pcie_gen_max?, slow.pcie_width_max?));
    let below = now.0 < full.0 || now.1 < full.1;
    let loaded = utilization.is_some_and(|percent| percent >= LOAD);
    let evidence = format!("PCIe Gen{} x{} of Gen{} x{} under load", now.0, now.1, full.0, full.1);
    Some(Seen::flag(Signal::PcieDegraded, below && loaded, evidence))
}

/// Counters that only a reset, or a driver that was loaded anew, makes smaller.
pub(super) fn counters_fell(before: &FastSet, fast: &FastSet) -> bool {
    let fell =
        |before: Option<u64>, now: Option<u64>| before.zip(now).is_some_and(|(before, now)| now < before);
    fell(before.ecc_uncorrected, fast.ecc_uncorrected) || fell(before.ecc_corrected, fast.ecc_corrected)
}

/// A counter's growth in the last minute.
#[derive(Debug, Default)]
pub(super) struct LastMinute {
    counts: VecDeque<(Millis, u64)>,
}

impl LastMinute {
    /// `None` without a reading before.
    pub(super) fn grown(&mut self, now: Millis, count: u64) -> Option<u64> {
        const MINUTE: Duration = Duration::from_secs(60);
        if self.counts.back().is_some_and(|(_, last)| count < *last) {
            // It began anew.
            self.counts.clear();
        }
        self.counts.push_back((now, count));
        while self.counts.get(1).is_some_and(|(at, _)| now.since(*at) >= MINUTE) {
            self.counts.pop_front();
        }
        let (_, first) = self.counts.front().filter(|_| self.counts.len() > 1)?;
        Some(count - first)
    }
}

struct Grown {
    from: u64,
    to: u64,
    in_time: Duration,
}

impl Grown {
    fn per(&self, time: Duration) -> f64 {
        // Two readings close together, such as after an event, would make a high rate of a few.
        let elapsed = self.in_time.max(Duration::from_secs(1));
        (self.to - self.from) as f64 * time.as_secs_f64() / elapsed.as_secs_f64()
    }
}

/// `None` without a reading before, and when the counter began anew.
fn grown<T>(before: Option<(Duration, &T)>, now: &T, pick: fn(&T) -> Option<u64>) -> Option<Grown> {
    let (in_time, before) = before?;
    let (from, to) = (pick(before)?, pick(now)?);
    (to >= from).then_some(Grown { from, to, in_time })
}

/// `0, 3` for bits 0 and 3.
fn numbers(bits: u32) -> String {
    let numbers = (0..u32::BITS).filter(|bit| bits & (1 << bit) != 0);
    numbers.map(|bit| bit.to_string()).collect::<Vec<_>>().join(", ")
}
