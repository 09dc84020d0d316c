//! One GPU's health: its faults, its risk, its gate, and the verdict that follows.

use super::fault::{self, By, Fault, rejoin_words};
use super::gate::{Answer, GateState};
use super::hysteresis::Watch;
use super::risk::RiskScore;
use super::signals::{self, LastMinute, Seen};
use super::xids::XidHistory;
use super::{Transition, Verdict};
use crate::clock::Millis;
use crate::policy::{Class, Policy, Rejoin, Rule, Signal};
use crate::probe::protocol::{FastSet, Reading, SlowSet};
use reknit_layout::GpuId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// More faults at once than rows that a policy could reasonably have.
const MOST_FAULTS: usize = 256;

/// What must outlive the agent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Durable {
    pub(super) faults: Vec<Fault>,
    pub(super) gate: GateState,
    pub(super) risk: RiskScore,
    pub(super) xids: XidHistory,
    /// A bit for each NVLink that was ever active.
    pub(super) links: u32,
    /// An operator has said that these are all, whatever other GPUs have.
    pub(super) links_accepted: bool,
    /// Rules that hold and that an operator has forgiven.
    pub(super) released: BTreeSet<String>,
}

impl Durable {
    /// The node was booted since this was recorded.
    pub(super) fn was_booted(&mut self) {
        for fault in &mut self.faults {
            (fault.reset, fault.holds) = (true, false);
        }
    }
}

#[derive(Debug)]
pub(super) struct GpuHealth {
    pub(super) policy: Arc<Policy>,
    pub(super) durable: Durable,
    /// By rule.
    watches: BTreeMap<String, Watch>,
    pub(super) fast: Option<(Millis, FastSet)>,
    slow: Option<(Millis, SlowSet)>,
    pcie_replays: LastMinute,
    healthy_reads: u32,
    /// The last reading found it gone, or of no use without a reset.
    pub(super) away: bool,
    /// Nothing can be read at present.
    pub(super) unseen: Option<Verdict>,
    /// The last one that says nothing about the GPU.
    pub(super) ignored: Option<Verdict>,
    reported: Verdict,
    /// What else was true then.
    told: Told,
}

/// What a person must hear of beside the verdict itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Told {
    /// An XID says so: it explains more than a reading.
    by_xid: bool,
    /// The policy enforces it.
    enforced: bool,
    /// Only an operator brings the GPU back.
    needs_operator: bool,
}

impl GpuHealth {
    /// One that answered when it was enumerated starts healthy, unless an earlier start of the agent knew better.
    pub(super) fn new(policy: Arc<Policy>, durable: Durable, answered: bool) -> Self {
        let unseen = (!answered).then(|| Verdict::unknown("not read yet"));
        let mut health = Self {
            policy,
            durable,
            watches: BTreeMap::new(),
            fast: None,
            slow: None,
            pcie_replays: LastMinute::default(),
            healthy_reads: 0,
            away: false,
            unseen,
            ignored: None,
            reported: Verdict::healthy(""),
            told: Told::default(),
        };
        health.drop_unruled();
        let held = health.durable.faults.iter().filter(|fault| fault.holds);
        let held = held.filter_map(|fault| Some((fault.by.rule()?.to_owned(), Watch::held())));
        health.watches = held.collect();
        let (verdict, by_xid) = health.worst();
        health.reported = verdict.unwrap_or_else(|| Verdict::healthy(""));
        health.told = health.now_true(by_xid);
        health
    }

    /// A GPU that was never read yet: this is why.
    pub(super) fn keeps_silent(&mut self, evidence: &str) {
        if let Some(unseen) = self.unseen.as_mut().filter(|_| self.fast.is_none()) {
            evidence.clone_into(&mut unseen.evidence);
            if unseen.class == self.reported.class {
                evidence.clone_into(&mut self.reported.evidence);
            }
        }
    }

    pub(super) fn set_policy(&mut self, policy: Arc<Policy>) {
        self.policy = policy;
        self.drop_unruled();
    }

    /// Faults of rules that the policy does not have any more are never seen to be gone.
    fn drop_unruled(&mut self) {
        let policy = &self.policy;
        for fault in &mut self.durable.faults {
            if let By::Rule(name) = &fault.by {
                fault.holds &= policy.rules.get(name).is_some_and(|rule| rule.class != Class::Ignore);
            }
        }
    }

    pub(super) fn reported(&self) -> &Verdict {
        &self.reported
    }

    pub(super) fn risk(&self, now: Millis) -> f64 {
        self.durable.risk.total(now, self.policy.risk.half_life())
    }

    /// The links that are active now, if it is known.
    fn links_active(&self) -> Option<u32> {
        self.fast.as_ref().and_then(|(_, fast)| fast.links_active)
    }

    pub(super) fn link_is_down(&self) -> bool {
        self.links_active().is_some_and(|active| self.durable.links & !active != 0)
    }

    pub(super) fn asks_recovery(&self) -> bool {
        self.fast.as_ref().is_some_and(|(_, fast)| fast.recovery_action.is_some_and(|action| action != 0))
    }

    /// `siblings`: the links that are active on all other GPUs of this kind.
    pub(super) fn reading(&mut self, now: Millis, booted_at: Millis, reading: &Reading, siblings: u32) {
        let mut seen = signals::of_answer(reading);
        self.away = matches!(reading, Reading::Gone { .. } | Reading::ResetRequired);
        match reading {
            Reading::Answers { fast, slow, reset } => {
                self.unseen = None;
                let fell = self.fast.as_ref().is_some_and(|(_, before)| signals::counters_fell(before, fast));
                if *reset || fell {
                    self.was_reset();
                }
                let siblings = if self.durable.links_accepted { 0 } else { siblings };
                self.durable.links |= fast.links_active.map_or(0, |active| active | siblings);
                seen.extend(signals::of_fast(self.fast.as_ref(), now, fast, self.durable.links));
                if let Some(slow) = slow {
                    let replays = slow.pcie_replays.and_then(|count| self.pcie_replays.grown(now, count));
                    seen.extend(signals::of_slow(self.slow.as_ref(), now, slow, fast.utilization, replays));
                    self.slow = Some((now, slow.as_ref().clone()));
                }
                self.fast = Some((now, fast.clone()));
            }
            Reading::Gone { .. }
            | Reading::ResetRequired
            | Reading::Suspect { .. }
            | Reading::Blind { .. } => {}
        }
        let disturbed = self.judge(now, booted_at, &seen);
        self.turn_by_state(now);
        let healthy = matches!(reading, Reading::Answers { .. }) && !disturbed;
        if healthy {
            self.healthy_reads = self.healthy_reads.saturating_add(1);
        } else {
            self.healthy_reads = 0;
            self.durable.gate.disturbed();
        }
    }

    /// Compares signals with the rules. True when one speaks against the GPU, believed yet or not.
    pub(super) fn judge(&mut self, now: Millis, booted_at: Millis, seen: &[Seen]) -> bool {
        let policy = self.policy.clone();
        let mut disturbed = false;
        for (name, rule) in &policy.rules {
            let Some(seen) = seen.iter().find(|seen| seen.signal == rule.signal) else {
                continue;
            };
            let forgiven = self.durable.released.contains(name);
            let graced = rule.boot_grace.is_some_and(|grace| now.since(booted_at) < grace.0);
            let hit = rule.limit.hit(seen.value) && !graced;
            let clear = rule.clear.unwrap_or(policy.gate.healthy_reads);
            let holds = self.watches.entry(name.clone()).or_default().see(now, hit, rule.when, clear);
            if forgiven {
                if !holds {
                    self.durable.released.remove(name);
                }
                continue;
            }
            disturbed |= hit && rule.class >= Class::Unknown;
            if holds {
                if rule.signal.means_reset() {
                    self.was_reset();
                }
                self.rule_holds(now, name, rule, seen, hit);
            } else if let Some(fault) = self.fault_of_rule(name).filter(|fault| fault.holds) {
                fault.holds = false;
                fault.last_seen = now;
            }
        }
        disturbed
    }

    fn rule_holds(&mut self, now: Millis, name: &str, rule: &Rule, seen: &Seen, hit: bool) {
        let verdict = Verdict {
            class: rule.class,
            cause: rule.cause.clone(),
            evidence: seen.evidence.clone(),
            rejoin: rejoin_words(rule.rejoin, rule.class, &self.hold_words(now)),
            action: rule.action.clone(),
            shards_readable: rule.shards_readable.unwrap_or_else(|| rule.class.shards_readable()),
        };
        if rule.class == Class::Ignore {
            self.ignored = Some(verdict);
            return;
        }
        match self.fault_of_rule(name) {
            Some(fault) => {
                let onset = !fault.holds;
                fault.holds = true;
                // Readings that follow a hit and are clean keep its words; so do those that say the same again.
                if hit && fault.verdict.class != verdict.class {
                    fault.verdict = verdict;
                }
                if onset {
                    self.add_risk(now, &rule.cause, rule.risk);
                }
            }
            None => {
                self.add(Fault {
                    by: By::Rule(name.to_owned()),
                    verdict,
                    rejoin: rule.rejoin,
                    began: now,
                    last_seen: now,
                    settle: Duration::ZERO,
                    logged: false,
                    holds: true,
                    reset: false,
                });
                self.add_risk(now, &rule.cause, rule.risk);
            }
        }
    }

    pub(super) fn hold_words(&self, now: Millis) -> String {
        self.durable.gate.hold_words(now, &self.policy.gate)
    }

    pub(super) fn fault(&mut self, by: &By) -> Option<&mut Fault> {
        self.durable.faults.iter_mut().find(|fault| fault.by == *by)
    }

    fn fault_of_rule(&mut self, name: &str) -> Option<&mut Fault> {
        self.durable.faults.iter_mut().find(|fault| fault.by.rule() == Some(name))
    }

    pub(super) fn add(&mut self, fault: Fault) {
        // Whatever was read before it says nothing against it.
        self.healthy_reads = 0;
        self.durable.faults.push(fault);
        if self.durable.faults.len() > MOST_FAULTS {
            let mildest = self.durable.faults.iter().enumerate().min_by_key(|(_, f)| f.verdict.class);
            if let Some((at, _)) = mildest {
                self.durable.faults.remove(at);
            }
        }
    }

    pub(super) fn add_risk(&mut self, now: Millis, cause: &str, points: f64) {
        self.durable.risk.add(now, self.policy.risk.half_life(), cause, points);
    }

    fn was_reset(&mut self) {
        self.durable.faults.iter_mut().for_each(|fault| fault.reset = true);
    }

    /// An operator says that the GPU is well. What is wrong with it now stays, but for what only an operator lifts:
    /// that does not count again until it was gone.
    pub(super) fn release(&mut self) {
        for fault in &self.durable.faults {
            if let (By::Rule(name), Rejoin::Operator) = (&fault.by, fault.rejoin) {
                self.durable.released.insert(name.clone());
            }
        }
        let policy = self.policy.clone();
        let links = |name: &str| policy.rules.get(name).is_some_and(|rule| rule.signal == Signal::NvlinkDown);
        self.watches.retain(|name, _| !links(name));
        self.durable.faults.retain(|fault| match &fault.by {
            By::Rule(name) => fault.holds && fault.rejoin != Rejoin::Operator && !links(name),
            By::Xid(_) | By::Risk => false,
        });
        self.durable.links_accepted = true;
        self.durable.gate.release();
        self.durable.risk = RiskScore::default();
        if let Some(active) = self.links_active() {
            self.durable.links = active;
        }
    }

    fn judge_risk(&mut self, now: Millis) {
        let risk = &self.policy.risk;
        let (half_life, predict_at, drain_at) = (risk.half_life(), risk.predict_at, risk.drain_at);
        let total = self.durable.risk.total(now, half_life);
        let drained = self.fault(&By::Risk).is_some_and(|fault| fault.verdict.class == Class::Drain);
        let class = if total >= drain_at || (drained && total >= predict_at) {
            Class::Drain
        } else if total >= predict_at {
            Class::Predict
        } else {
            self.durable.faults.retain(|fault| fault.by != By::Risk);
            return;
        };
        let hold = self.hold_words(now);
        let rejoin = format!("when its risk score falls below {predict_at}");
        let words = self.durable.risk.words(now, half_life);
        let verdict = Verdict {
            class,
            cause: "the GPU is likely to fail soon".to_owned(),
            evidence: format!("risk score {total:.0}, drained at {drain_at}: {words}"),
            rejoin: if class.takes_out() { format!("{rejoin}, then {hold}") } else { rejoin },
            action: "have the GPU inspected".to_owned(),
            shards_readable: class.shards_readable(),
        };
        match self.fault(&By::Risk) {
            Some(fault) if fault.verdict.class == class => {}
            Some(fault) => fault.verdict = verdict,
            None => self.add(Fault {
                by: By::Risk,
                verdict,
                rejoin: Rejoin::Clear,
                began: now,
                last_seen: now,
                settle: Duration::ZERO,
                logged: false,
                holds: true,
                reset: false,
            }),
        }
    }

    /// Lifts what may be lifted and asks the gate.
    fn lift(&mut self, now: Millis) {
        let policy = self.policy.clone();
        if self.healthy_reads >= policy.gate.healthy_reads {
            self.durable.faults.retain(|fault| !fault.may_lift(now, &policy.gate));
        }
        let out = self.durable.faults.iter().filter(|fault| fault.verdict.class.takes_out());
        if let Some(worst) = fault::worst(out) {
            let verdict = worst.verdict.clone();
            self.durable.gate.shut(now, &policy.gate, &verdict);
        } else if self.durable.gate.out.is_some() && self.healthy_reads >= policy.gate.healthy_reads {
            let unready = self.unready();
            if let Answer::Wait(words) = self.durable.gate.ask(now, &policy.gate, unready)
                && let Some(out) = &mut self.durable.gate.out
            {
                out.rejoin = words;
            }
        }
    }

    fn unready(&self) -> Option<&'static str> {
        if self.asks_recovery() {
            Some("when the driver asks for no recovery action")
        } else if self.link_is_down() {
            Some("when its NVLinks are as they were")
        } else if self.slow.as_ref().is_some_and(|(_, slow)| slow.remap_pending == Some(true)) {
            Some("when no row waits to be remapped")
        } else if self.slow.as_ref().is_some_and(|(_, slow)| slow.retired_pending == Some(true)) {
            Some("when no page waits to be retired")
        } else {
            None
        }
    }

    /// And whether an XID says so.
    fn worst(&self) -> (Option<Verdict>, bool) {
        let fault = fault::worst(self.durable.faults.iter());
        let out = self.durable.gate.out.as_ref();
        let out = out.filter(|_| !fault.is_some_and(|fault| fault.verdict.class.takes_out()));
        let others = [self.unseen.as_ref(), out].into_iter().flatten().map(|verdict| (verdict, false));
        let fault = fault.map(|fault| (&fault.verdict, matches!(fault.by, By::Xid(_))));
        let worst = others.chain(fault).max_by_key(|(verdict, _)| verdict.class);
        worst.map_or((None, false), |(verdict, by_xid)| (Some(verdict.clone()), by_xid))
    }

    fn now_true(&self, by_xid: bool) -> Told {
        let needs_operator = self.durable.gate.needs_operator(&self.policy.gate);
        Told { by_xid, enforced: self.policy.enforce, needs_operator }
    }

    /// Settles what follows from all that was seen, and tells a change.
    pub(super) fn settle(&mut self, now: Millis, gpu: &GpuId) -> Option<Transition> {
        self.judge_risk(now);
        self.lift(now);
        let (verdict, by_xid) = self.worst();
        let verdict = verdict.unwrap_or_else(|| Verdict::healthy("reads healthy again"));
        let told = self.now_true(by_xid);
        let same = |of: fn(&Verdict) -> (Class, &str, &str, bool)| of(&verdict) == of(&self.reported);
        let known = match verdict.class {
            Class::Healthy => self.reported.class == Class::Healthy,
            Class::Ignore
            | Class::Predict
            | Class::RankDied
            | Class::Unknown
            | Class::Drain
            | Class::Fatal => {
                // The log's word may come after the reading that it explains, and says more.
                let explains = told.by_xid && !self.told.by_xid;
                let awaits = told.needs_operator && !self.told.needs_operator;
                same(|v| (v.class, &v.cause, &v.action, v.shards_readable))
                    && told.enforced == self.told.enforced
                    && !explains
                    && !awaits
            }
        };
        if known {
            // What is waited for may change quietly.
            self.reported.rejoin = verdict.rejoin;
            return None;
        }
        (self.reported, self.told) = (verdict.clone(), told);
        Some(Transition { gpu: gpu.clone(), at: now, verdict, enforced: told.enforced })
    }
}
