//! XID errors: told twice, by NVML and by the kernel log; some mean more together, or when they come again.

use super::fault::{By, Fault, rejoin_words, turned_action};
use super::gpu::GpuHealth;
use super::{Verdict, XidSeen};
use crate::clock::Millis;
use crate::policy::{Class, XidRow};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// The same XID of the same GPU within this time is the same error: NVML and the kernel log both tell it, and
/// some come as a burst of lines.
const SAME: Duration = Duration::from_secs(2);

/// More kinds of XIDs at once than there are.
const MOST_RECENT: usize = 256;

/// Which XIDs were seen when.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct XidHistory {
    /// The latest of those that are still told twice.
    recent: BTreeMap<u64, Millis>,
    /// Of those whose row counts them.
    times: BTreeMap<u64, VecDeque<Millis>>,
}

impl XidHistory {
    /// True when it is another telling of one that was seen.
    fn told_before(&mut self, now: Millis, number: u64) -> bool {
        // The kernel log may tell of what is long past.
        self.recent.retain(|_, at| now.apart(*at) < SAME);
        if self.recent.len() >= MOST_RECENT {
            self.recent.pop_first();
        }
        match self.recent.entry(number) {
            std::collections::btree_map::Entry::Occupied(_) => true,
            std::collections::btree_map::Entry::Vacant(new) => {
                new.insert(now);
                false
            }
        }
    }

    /// Counts one more, and says whether they are as many as the row asks for.
    fn repeats(&mut self, now: Millis, number: u64, row: &XidRow) -> bool {
        let Some(repeat) = &row.repeat else {
            return false;
        };
        let times = self.times.entry(number).or_default();
        times.push_back(now);
        let count = repeat.count as usize;
        while times.len() > count || times.front().is_some_and(|at| now.apart(*at) > repeat.within.0) {
            times.pop_front();
        }
        times.len() >= count
    }
}

impl GpuHealth {
    pub(super) fn xid(&mut self, now: Millis, seen: &XidSeen<'_>) {
        let policy = self.policy.clone();
        let number = seen.number;
        let row = policy.xid(number);
        let word = seen.log.and_then(|log| row.log.iter().find(|word| has_word(log, &word.word)));
        let by = By::Xid(number);
        let again = self.durable.xids.told_before(now, number);
        // A burst may say something of this GPU after it spoke of a peer.
        let more = word.is_some_and(|word| word.class != Class::Ignore) && self.fault(&by).is_none();
        if again && !more {
            self.told_again(now, row, number, word.map(|word| word.class), seen.log);
            return;
        }
        let repeats = !again && self.durable.xids.repeats(now, number, row);
        if !again {
            // One entry for all that are unknown: there is no end of numbers.
            let known = policy.xids.contains_key(&number);
            let cause =
                if known { format!("XID {number}: {}", row.cause) } else { format!("XIDs {}", row.cause) };
            self.add_risk(now, &cause, row.risk);
        }
        if !repeats && self.belongs_to_another(now, number) {
            return;
        }
        let mut class = word.map_or(row.class, |word| word.class);
        let worded = word.is_some_and(|word| word.class != row.class);
        let turned = turned_action(row.rejoin(class)).filter(|_| worded);
        let mut action = turned.map_or_else(|| row.action.clone(), str::to_owned);
        if let Some(repeat) = row.repeat.as_ref().filter(|_| repeats) {
            class = class.max(repeat.class);
            action.clone_from(&repeat.action);
        }
        let verdict = Verdict {
            class,
            cause: format!("XID {number}: {}", row.cause),
            evidence: evidence(number, seen.log),
            rejoin: rejoin_words(row.rejoin(class), class, &self.hold_words(now)),
            action,
            shards_readable: class.shards_readable(),
        };
        if class == Class::Ignore {
            self.ignored = Some(verdict);
            return;
        }
        // Not lifted while it may still be told again.
        let settle = row.settle.map_or(SAME, |settle| settle.0.max(SAME));
        let away = self.away;
        match self.fault(&by) {
            Some(fault) => {
                fault.last_seen = now;
                fault.reset = away;
                if class >= fault.verdict.class {
                    fault.verdict = verdict;
                    fault.rejoin = row.rejoin(class);
                    fault.logged = seen.log.is_some();
                }
            }
            None => self.add(Fault {
                by,
                verdict,
                rejoin: row.rejoin(class),
                began: now,
                last_seen: now,
                settle,
                logged: seen.log.is_some(),
                holds: false,
                // The GPU may be read as gone before its last words arrive.
                reset: away,
            }),
        }
        self.turn_by_state(now);
    }

    /// The log's line may bring the word that NVML's event lacks, and a burst a worse one.
    fn told_again(&mut self, now: Millis, row: &XidRow, number: u64, word: Option<Class>, log: Option<&str>) {
        let hold = self.hold_words(now);
        let Some(fault) = self.fault(&By::Xid(number)) else {
            return;
        };
        let by_number = !fault.logged;
        if log.is_some() && by_number {
            fault.verdict.evidence = evidence(number, log);
            fault.logged = true;
        }
        match word {
            Some(Class::Ignore) if by_number => {
                let ignored = Verdict { class: Class::Ignore, ..fault.verdict.clone() };
                self.durable.faults.retain(|fault| fault.by != By::Xid(number));
                self.ignored = Some(ignored);
            }
            Some(class) if class > fault.verdict.class => {
                fault.turn(class, row.rejoin(class), &hold);
            }
            Some(_) | None => {}
        }
    }

    /// Whether an earlier XID waits for this one, and says what both mean.
    fn belongs_to_another(&mut self, now: Millis, number: u64) -> bool {
        let policy = self.policy.clone();
        let hold = self.hold_words(now);
        for fault in &mut self.durable.faults {
            let By::Xid(first) = fault.by else {
                continue;
            };
            let then = policy.xid(first).then.iter().find(|then| then.xid.contains(&number));
            if let Some(then) = then.filter(|_| now.apart(fault.began) <= fault.settle) {
                fault.turn(then.class, then.rejoin, &hold);
                fault.last_seen = now;
                fault.verdict.cause.push_str(&format!(", then XID {number}: {}", policy.xid(number).cause));
                return true;
            }
        }
        false
    }

    /// Makes XIDs worse that mean more when the driver asks for recovery, or when a link is down.
    pub(super) fn turn_by_state(&mut self, now: Millis) {
        let policy = self.policy.clone();
        let hold = self.hold_words(now);
        let (asks, down) = (self.asks_recovery(), self.link_is_down());
        for fault in &mut self.durable.faults {
            let By::Xid(number) = fault.by else {
                continue;
            };
            let row = policy.xid(number);
            let reasons = [
                (asks, row.with_recovery_action, "the driver asks for recovery"),
                (down, row.with_link_down, "an NVLink is down"),
            ];
            for (_, class, why) in reasons.into_iter().filter(|(is, ..)| *is) {
                if let Some(class) = class.filter(|class| *class > fault.verdict.class) {
                    fault.turn(class, row.rejoin(class), &hold);
                    fault.verdict.evidence.push_str(&format!("; {why}"));
                }
            }
        }
    }
}

fn evidence(number: u64, log: Option<&str>) -> String {
    match log {
        Some(log) => format!("kernel log: Xid {number}, {log}"),
        None => format!("XID {number}"),
    }
}

/// Whether `word` stands in `text` by itself, in whatever case: `Fatal` is not in `Nonfatal` nor in `Non-fatal`;
/// `LINK_DOWN` is in `NETIR_LINK_DOWN`.
fn has_word(text: &str, word: &str) -> bool {
    let (text, word) = (text.to_ascii_lowercase(), word.to_ascii_lowercase());
    let joins = |c: char| c.is_alphanumeric() || c == '-';
    text.match_indices(&word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(joins) && !after.is_some_and(joins)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stand_by_themselves() {
        assert!(has_word("RLW_CTRL Fatal XC0 i0 Link 04", "Fatal"));
        assert!(has_word("RLW_CTRL, FATAL", "Fatal"));
        assert!(!has_word("RLW_CTRL Nonfatal XC0 i0 Link 04", "Fatal"));
        assert!(!has_word("RLW_CTRL Non-Fatal XC0", "Fatal"));
        assert!(has_word("NETIR_LINK_DOWN Link 08", "LINK_DOWN"));
        assert!(!has_word("", "Fatal"));
    }
}
