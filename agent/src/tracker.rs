//! From readings and events to each GPU's class. Pure: plain data in, transitions out.

use crate::policy::{EventRow, HealthClass, Policy, Rejoin, Signal};
use crate::probe::protocol::{Busy, Reading};
use reknit_layout::GpuId;
use std::collections::BTreeMap;
use std::time::Instant;

/// A class and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) class: HealthClass,
    pub(crate) cause: String,
    pub(crate) evidence: String,
    pub(crate) action: String,
}

impl Verdict {
    fn healthy(cause: &str) -> Self {
        Self {
            class: HealthClass::Healthy,
            cause: cause.to_owned(),
            evidence: String::new(),
            action: String::new(),
        }
    }

    fn unknown(cause: &str) -> Self {
        Self {
            class: HealthClass::Unknown,
            cause: cause.to_owned(),
            evidence: String::new(),
            action: "none; the agent keeps trying".to_owned(),
        }
    }
}

/// A GPU's class changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Transition {
    pub(crate) gpu: GpuId,
    pub(crate) verdict: Verdict,
}

/// Every GPU's health.
#[derive(Debug)]
pub(crate) struct Tracker {
    policy: Policy,
    gpus: BTreeMap<GpuId, GpuHealth>,
}

#[derive(Debug)]
struct GpuHealth {
    reported: Verdict,
    /// What was reported is an event's verdict, not a reading's.
    told_by_event: bool,
    /// What the last reads say, once it is believed.
    condition: Option<Verdict>,
    /// What an event said, until its rejoin rule lifts it.
    latched: Option<Latched>,
    /// Nothing can be read at present.
    unseen: Option<Verdict>,
    /// Reads in a row with the same signal.
    repeated: Option<(Signal, u32)>,
    healthy_reads: u32,
    ecc_uncorrected: Option<u64>,
}

#[derive(Debug)]
struct Latched {
    verdict: Verdict,
    rejoin: Rejoin,
    /// The GPU was away or unusable since the event.
    outage: bool,
    last_seen: Instant,
}

impl Tracker {
    pub(crate) fn new(policy: Policy) -> Self {
        Self { policy, gpus: BTreeMap::new() }
    }

    /// From now on watches a GPU. One that answered when it was enumerated starts healthy. Returns false
    /// if it is watched already.
    pub(crate) fn watch(&mut self, gpu: &GpuId, answered: bool) -> bool {
        if self.gpus.contains_key(gpu) {
            return false;
        }
        let unseen = (!answered).then(|| Verdict::unknown("not read yet"));
        let health = GpuHealth {
            reported: unseen.clone().unwrap_or_else(|| Verdict::healthy("")),
            told_by_event: false,
            condition: None,
            latched: None,
            unseen,
            repeated: None,
            healthy_reads: 0,
            ecc_uncorrected: None,
        };
        self.gpus.insert(gpu.clone(), health);
        true
    }

    pub(crate) fn forget(&mut self, gpu: &GpuId) {
        self.gpus.remove(gpu);
    }

    pub(crate) fn health(&self, gpu: &GpuId) -> Option<&Verdict> {
        self.gpus.get(gpu).map(|health| &health.reported)
    }

    pub(crate) fn reading(&mut self, now: Instant, gpu: &GpuId, reading: &Reading) -> Option<Transition> {
        let health = self.gpus.get_mut(gpu)?;
        let (signal, evidence) = match reading {
            Reading::Answers { fast, slow: _, reset: _ } => {
                health.count_ecc(now, &self.policy, fast.ecc_uncorrected);
                let action = fast.recovery_action.unwrap_or(0);
                let signal = Signal::of_recovery_action(action);
                (signal, format!("recovery action {action}"))
            }
            Reading::Gone { error } => (Some(Signal::Gone), error.clone()),
            Reading::ResetRequired => (Some(Signal::ResetRequired), "NVML code 16".to_owned()),
            Reading::Suspect { error } => (Some(Signal::Suspect), error.clone()),
            Reading::Blind { error } => (Some(Signal::Blind), error.clone()),
        };
        match signal {
            Some(signal) => health.signal(&self.policy, signal, &evidence),
            None => health.healthy_read(now, &self.policy),
        }
        health.transition(gpu)
    }

    pub(crate) fn xid(&mut self, now: Instant, gpu: &GpuId, xid: u64) -> Option<Transition> {
        let health = self.gpus.get_mut(gpu)?;
        let row = self.policy.xid(xid);
        let cause = format!("XID {xid}: {}", row.cause);
        health.event(now, &self.policy, row, cause, format!("XID {xid}"));
        health.transition(gpu)
    }

    /// Calls that have not returned. True when no GPU answers: then the node is blind and none is blamed.
    pub(crate) fn hung(&mut self, busy: &[Busy]) -> (Vec<Transition>, bool) {
        let stuck = |limit: u128| busy.iter().filter(move |b| u128::from(b.ms) >= limit);
        let blind_after = self.policy.blind.as_millis();
        if !self.gpus.is_empty() && stuck(blind_after).count() == self.gpus.len() {
            return (Vec::new(), true);
        }
        let mut transitions = Vec::new();
        for call in stuck(self.policy.hung.as_millis()) {
            if let Some(health) = self.gpus.get_mut(&call.gpu) {
                let evidence = format!("a call has not returned for {} s", call.ms / 1000);
                health.signal(&self.policy, Signal::Hung, &evidence);
                transitions.extend(health.transition(&call.gpu));
            }
        }
        (transitions, false)
    }

    /// The probe is gone: nothing is known of GPUs, except of those that were bad.
    pub(crate) fn blind(&mut self, cause: &str) -> Vec<Transition> {
        let mut transitions = Vec::new();
        for (gpu, health) in &mut self.gpus {
            health.unseen = Some(Verdict::unknown(cause));
            transitions.extend(health.transition(gpu));
        }
        transitions
    }
}

impl GpuHealth {
    fn signal(&mut self, policy: &Policy, signal: Signal, evidence: &str) {
        self.healthy_reads = 0;
        let count = match self.repeated {
            Some((same, count)) if same == signal => count + 1,
            Some(_) | None => 1,
        };
        self.repeated = Some((signal, count));
        match signal {
            Signal::Blind | Signal::Suspect => {}
            Signal::Gone
            | Signal::ResetRequired
            | Signal::Hung
            | Signal::RecoveryReset
            | Signal::RecoveryReboot
            | Signal::RecoveryDrainP2p
            | Signal::RecoveryDrainAndReset => {
                if let Some(latched) = &mut self.latched {
                    latched.outage = true;
                }
            }
        }
        let row = policy.condition(signal);
        if count < row.reads {
            return;
        }
        self.unseen = None;
        self.condition = row.class.health().map(|class| Verdict {
            class,
            cause: row.cause.clone(),
            evidence: evidence.to_owned(),
            action: row.action.clone(),
        });
    }

    fn healthy_read(&mut self, now: Instant, policy: &Policy) {
        self.unseen = None;
        self.repeated = None;
        self.healthy_reads = self.healthy_reads.saturating_add(1);
        if self.healthy_reads < policy.healthy_reads {
            return;
        }
        self.condition = None;
        self.latched = self.latched.take().filter(|latched| match latched.rejoin {
            Rejoin::Reads => false,
            Rejoin::Outage => !latched.outage,
            Rejoin::Quiet => now.saturating_duration_since(latched.last_seen) < policy.quiet,
        });
    }

    fn count_ecc(&mut self, now: Instant, policy: &Policy, count: Option<u64>) {
        let before = std::mem::replace(&mut self.ecc_uncorrected, count);
        if let (Some(before), Some(count)) = (before, count)
            && count > before
        {
            let row = &policy.uncorrected_ecc;
            let evidence = format!("volatile uncorrected ECC count {before} -> {count}");
            self.event(now, policy, row, row.cause.clone(), evidence);
        }
    }

    fn event(&mut self, now: Instant, policy: &Policy, row: &EventRow, cause: String, evidence: String) {
        let Some(class) = row.class.health() else {
            return;
        };
        self.healthy_reads = 0;
        if let Some(latched) = &mut self.latched
            && latched.verdict.class.severity() > class.severity()
        {
            latched.last_seen = now;
            return;
        }
        self.latched = Some(Latched {
            verdict: Verdict { class, cause, evidence, action: row.action.clone() },
            rejoin: policy.rejoin(class),
            // The GPU may be read as gone before its last words arrive.
            outage: self.repeated.is_some(),
            last_seen: now,
        });
    }

    /// The worst of what holds. Of two that are equally bad the event tells more than the reading.
    fn transition(&mut self, gpu: &GpuId) -> Option<Transition> {
        let latched = self.latched.as_ref().map(|latched| &latched.verdict);
        let holding = [self.unseen.as_ref(), self.condition.as_ref(), latched];
        let worst = holding.into_iter().flatten().max_by_key(|verdict| verdict.class.severity());
        let verdict = worst.map_or_else(|| Verdict::healthy("reads healthy again"), Clone::clone);
        // The log's word may come after the reading that it explains, and says more.
        let explains = latched.is_some_and(|latched| *latched == verdict) && !self.told_by_event;
        if verdict.class == self.reported.class && !explains {
            return None;
        }
        self.told_by_event = latched.is_some_and(|latched| *latched == verdict);
        self.reported = verdict.clone();
        Some(Transition { gpu: gpu.clone(), verdict })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::protocol::FastSet;
    use std::time::Duration;

    fn answers() -> Reading {
        let fast = FastSet { recovery_action: Some(0), ecc_uncorrected: Some(0), ..FastSet::default() };
        Reading::Answers { fast, slow: None, reset: false }
    }

    fn gone() -> Reading {
        Reading::Gone { error: "NVML code 15".to_owned() }
    }

    fn suspect() -> Reading {
        Reading::Suspect { error: "NVML code 999".to_owned() }
    }

    /// A tracker of GPUs `a` and `b`, both healthy.
    fn tracker() -> (Tracker, GpuId, GpuId, Instant) {
        let mut tracker = Tracker::new(Policy::built_in().unwrap());
        let (a, b) = (GpuId::from("a"), GpuId::from("b"));
        assert!(tracker.watch(&a, true) && tracker.watch(&b, true));
        (tracker, a, b, Instant::now())
    }

    fn class(transition: Option<Transition>) -> Option<HealthClass> {
        transition.map(|transition| transition.verdict.class)
    }

    #[test]
    fn gone_once_is_a_glitch_and_twice_a_fault() {
        let (mut tracker, a, b, now) = tracker();
        assert_eq!(tracker.reading(now, &a, &gone()), None);
        assert_eq!(tracker.reading(now, &a, &answers()), None);
        assert_eq!(tracker.reading(now, &a, &gone()), None);
        let fatal = tracker.reading(now, &a, &gone()).unwrap();
        assert_eq!(fatal.verdict.class, HealthClass::Fatal);
        assert_eq!(tracker.reading(now, &a, &gone()), None, "told once");
        assert_eq!(tracker.health(&b).unwrap().class, HealthClass::Healthy);
        assert_eq!(tracker.reading(now, &a, &answers()), None, "once is a glitch");
        let healthy = tracker.reading(now, &a, &answers());
        assert_eq!(class(healthy), Some(HealthClass::Healthy));
    }

    #[test]
    fn an_xid_after_the_reading_explains_it_once() {
        let (mut tracker, a, _, now) = tracker();
        assert_eq!(tracker.reading(now, &a, &gone()), None);
        assert_eq!(class(tracker.reading(now, &a, &gone())), Some(HealthClass::Fatal));
        let explained = tracker.xid(now, &a, 79).unwrap();
        assert_eq!(explained.verdict.cause, "XID 79: GPU has fallen off the bus");
        assert_eq!(tracker.xid(now, &a, 79), None, "told once");
        assert_eq!(tracker.reading(now, &a, &gone()), None);
    }

    #[test]
    fn xid_79_condemns_at_once_and_only_an_outage_lifts_it() {
        let (mut tracker, a, _, now) = tracker();
        let fatal = tracker.xid(now, &a, 79).unwrap();
        assert_eq!(fatal.verdict.cause, "XID 79: GPU has fallen off the bus");
        for _ in 0..10 {
            assert_eq!(tracker.reading(now, &a, &answers()), None);
        }
        for reading in [gone(), gone(), answers()] {
            assert_eq!(tracker.reading(now, &a, &reading), None);
        }
        let healthy = tracker.reading(now, &a, &answers());
        assert_eq!(class(healthy), Some(HealthClass::Healthy));
    }

    #[test]
    fn an_event_that_comes_after_the_outage_began_knows_of_it() {
        let (mut tracker, a, _, now) = tracker();
        assert_eq!(tracker.reading(now, &a, &gone()), None);
        assert_eq!(class(tracker.xid(now, &a, 79)), Some(HealthClass::Fatal));
        assert_eq!(tracker.reading(now, &a, &answers()), None);
        let healthy = tracker.reading(now, &a, &answers());
        assert_eq!(class(healthy), Some(HealthClass::Healthy));
    }

    #[test]
    fn a_worse_event_outranks_a_milder_one_and_never_the_other_way() {
        let (mut tracker, a, _, now) = tracker();
        assert_eq!(class(tracker.xid(now, &a, 48)), Some(HealthClass::RankDied));
        assert_eq!(class(tracker.xid(now, &a, 95)), Some(HealthClass::Fatal));
        assert_eq!(tracker.xid(now, &a, 94), None);
        assert_eq!(tracker.xid(now, &a, 45), None);
        assert_eq!(tracker.health(&a).unwrap().cause, "XID 95: uncontained memory error");
    }

    #[test]
    fn a_prediction_is_forgotten_when_all_stays_quiet() {
        let (mut tracker, a, _, now) = tracker();
        assert_eq!(class(tracker.xid(now, &a, 63)), Some(HealthClass::Predict));
        let soon = now + Duration::from_secs(599);
        for _ in 0..3 {
            assert_eq!(tracker.reading(soon, &a, &answers()), None);
        }
        let later = now + Duration::from_secs(600);
        let healthy = tracker.reading(later, &a, &answers());
        assert_eq!(class(healthy), Some(HealthClass::Healthy));
    }

    #[test]
    fn contradictory_answers_are_debounced_and_condemn_nobody() {
        let (mut tracker, a, _, now) = tracker();
        for _ in 0..2 {
            assert_eq!(tracker.reading(now, &a, &suspect()), None);
        }
        let unknown = tracker.reading(now, &a, &suspect());
        assert_eq!(class(unknown), Some(HealthClass::Unknown));
    }

    #[test]
    fn a_blind_node_forgets_what_was_well_and_keeps_what_was_not() {
        let (mut tracker, a, b, now) = tracker();
        tracker.xid(now, &a, 79);
        let blind = tracker.blind("the probe is gone");
        let told: Vec<_> = blind.iter().map(|t| (&t.gpu, t.verdict.class)).collect();
        assert_eq!(told, [(&b, HealthClass::Unknown)]);
        let healthy = tracker.reading(now, &b, &answers());
        assert_eq!(class(healthy), Some(HealthClass::Healthy));
        assert_eq!(tracker.health(&a).unwrap().class, HealthClass::Fatal);
    }

    #[test]
    fn one_hung_gpu_is_blamed_and_a_hung_driver_is_not() {
        let (mut tracker, a, b, now) = tracker();
        let busy = |gpu: &GpuId, seconds: u64| Busy {
            gpu: gpu.clone(),
            call: "a read".to_owned(),
            ms: seconds * 1000,
        };
        assert_eq!(tracker.hung(&[busy(&a, 14)]), (Vec::new(), false));
        assert_eq!(tracker.hung(&[busy(&a, 20), busy(&b, 3)]), (Vec::new(), true));
        let (transitions, blind) = tracker.hung(&[busy(&a, 15), busy(&b, 2)]);
        assert!(!blind);
        assert_eq!(transitions.len(), 1);
        assert_eq!(transitions[0].gpu, a);
        assert_eq!(transitions[0].verdict.class, HealthClass::Fatal);
        tracker.reading(now, &a, &answers());
        let healthy = tracker.reading(now, &a, &answers());
        assert_eq!(class(healthy), Some(HealthClass::Healthy));
    }
}
