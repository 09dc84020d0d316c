//! One GPU's health: its faults, its risk, its gate, and the verdict that follows.

use super::fault::{self, By, Fault, rejoin_words};
use super::gate::{Answer, GateState};
use super::hysteresis::Watch;
use super::risk::RiskScore;
use super::signals::{self, Seen};
use super::xids::XidHistory;
use super::{Transition, Verdict};
use crate::clock::Millis;
use crate::policy::{Class, Policy, Rejoin, Rule};
use crate::probe::protocol::{FastSet, Reading, SlowSet};
use reknit_layout::GpuId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// A rule that goes on adds its risk again this often.
const RISK_AGAIN: Duration = Duration::from_secs(60);
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
    healthy_reads: u32,
    /// The last reading found it gone, or of no use without a reset.
    pub(super) away: bool,
    /// Nothing can be read at present.
    pub(super) unseen: Option<Verdict>,
    /// The last one that says nothing about the GPU.
    pub(super) ignored: Option<Verdict>,
    reported: Verdict,
    reported_by: Option<By>,
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
            healthy_reads: 0,
            away: false,
            unseen,
            ignored: None,
            reported: Verdict::healthy(""),
            reported_by: None,
        };
        health.drop_unruled();
        let (verdict, by) = health.worst();
        (health.reported, health.reported_by) = (verdict.unwrap_or_else(|| Verdict::healthy("")), by);
        health
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
                self.durable.links |= fast.links_active.map_or(0, |active| active | siblings);
                seen.extend(signals::of_fast(self.fast.as_ref(), now, fast, self.durable.links));
                if let Some(slow) = slow {
                    seen.extend(signals::of_slow(self.slow.as_ref(), now, slow, fast.utilization));
                    self.slow = Some((now, slow.as_ref().clone()));
                }
                if fast.recovery_action.is_some_and(|action| action != 0) {
                    // What it asks for has been done when it no longer asks.
                    self.was_reset();
                }
                self.fast = Some((now, fast.clone()));
            }
            Reading::Gone { .. } | Reading::ResetRequired => self.was_reset(),
            Reading::Suspect { .. } | Reading::Blind { .. } => {}
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
            let graced = rule.boot_grace.is_some_and(|grace| now.since(booted_at) < grace.0);
            let hit = rule.limit.hit(seen.value) && !graced;
            let clear = rule.clear.unwrap_or(policy.gate.healthy_reads);
            let held = self.fault(&By::Rule(name.clone())).is_some_and(|fault| fault.holds);
            let watch = self.watches.entry(name.clone()).or_insert_with(|| Watch::held(held));
            let holds = watch.see(now, hit, rule.when, clear);
            disturbed |= hit && rule.class.severity() >= Class::Unknown.severity();
            if holds {
                self.rule_holds(now, name, rule, seen, hit);
            } else if let Some(fault) = self.fault(&By::Rule(name.clone())).filter(|fault| fault.holds) {
                fault.holds = false;
                fault.last_seen = now;
            }
        }
        disturbed
    }

    fn rule_holds(&mut self, now: Millis, name: &str, rule: &Rule, seen: &Seen, hit: bool) {
        let by = By::Rule(name.to_owned());
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
        let risky = match self.fault(&by) {
            // Readings that follow a hit and are clean keep the words of the hit.
            Some(fault) if !hit => {
                fault.holds = true;
                return;
            }
            Some(fault) => {
                let again = now.since(fault.last_seen) >= RISK_AGAIN;
                fault.holds = true;
                if again || fault.verdict.class != verdict.class {
                    fault.last_seen = now;
                    fault.verdict = verdict;
                }
                again
            }
            None => {
                self.add(Fault {
                    by,
                    verdict,
                    rejoin: rule.rejoin,
                    began: now,
                    last_seen: now,
                    settle: Duration::ZERO,
                    holds: true,
                    reset: false,
                });
                true
            }
        };
        if risky {
            self.add_risk(now, &rule.cause, rule.risk);
        }
    }

    pub(super) fn hold_words(&self, now: Millis) -> String {
        self.durable.gate.hold_words(now, &self.policy.gate)
    }

    pub(super) fn fault(&mut self, by: &By) -> Option<&mut Fault> {
        self.durable.faults.iter_mut().find(|fault| fault.by == *by)
    }

    pub(super) fn add(&mut self, fault: Fault) {
        // Whatever was read before it says nothing against it.
        if self.durable.faults.len() < MOST_FAULTS {
            self.durable.faults.push(fault);
        }
        self.healthy_reads = 0;
    }

    pub(super) fn add_risk(&mut self, now: Millis, cause: &str, points: f64) {
        self.durable.risk.add(now, self.policy.risk.half_life(), cause, points);
    }

    fn was_reset(&mut self) {
        self.durable.faults.iter_mut().for_each(|fault| fault.reset = true);
    }

    /// An operator says that the GPU is well.
    pub(super) fn release(&mut self) {
        self.durable.faults.clear();
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
        } else {
            None
        }
    }

    fn worst(&self) -> (Option<Verdict>, Option<By>) {
        let fault = fault::worst(self.durable.faults.iter());
        let fault = fault.map(|fault| (&fault.verdict, Some(&fault.by)));
        let out = self.durable.gate.out.as_ref().filter(|_| !fault.is_some_and(|(v, _)| v.class.takes_out()));
        let others = [self.unseen.as_ref(), out].into_iter().flatten().map(|verdict| (verdict, None));
        let worst = others.chain(fault).max_by_key(|(verdict, _)| verdict.class.severity());
        worst.map_or((None, None), |(verdict, by)| (Some(verdict.clone()), by.cloned()))
    }

    /// Settles what follows from all that was seen, and tells a change.
    pub(super) fn settle(&mut self, now: Millis, gpu: &GpuId) -> Option<Transition> {
        self.judge_risk(now);
        self.lift(now);
        let (verdict, by) = self.worst();
        let verdict = verdict.unwrap_or_else(|| Verdict::healthy("reads healthy again"));
        // The log's word may come after the reading that it explains, and says more.
        let explains = matches!(by, Some(By::Xid(_))) && !matches!(self.reported_by, Some(By::Xid(_)));
        let same = |told: fn(&Verdict) -> (Class, &str, &str, bool)| told(&verdict) == told(&self.reported);
        let known = match verdict.class {
            Class::Healthy => self.reported.class == Class::Healthy,
            Class::Ignore
            | Class::Predict
            | Class::RankDied
            | Class::Unknown
            | Class::Drain
            | Class::Fatal => same(|v| (v.class, &v.cause, &v.action, v.shards_readable)),
        };
        if known && !explains {
            // What is waited for may change quietly, except that a person is.
            let told = self.reported.rejoin.starts_with(OPERATOR) || !verdict.rejoin.starts_with(OPERATOR);
            self.reported.rejoin.clone_from(&verdict.rejoin);
            if told {
                return None;
            }
        }
        (self.reported, self.reported_by) = (verdict.clone(), by);
        Some(Transition { gpu: gpu.clone(), at: now, verdict, enforced: self.policy.enforce })
    }
}

/// How the words begin when a person is waited for.
const OPERATOR: &str = "when an operator";
