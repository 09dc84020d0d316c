//! A policy's rows in words.

use super::row::{Limit, Rule, When, XidRow};
use super::{Class, Policies, Policy, Rejoin, Signal};
use serde_json::{Value, json};

/// A row that a name led to.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Row<'a> {
    Rule(&'a str, &'a Rule),
    /// `None`: no row names the number, and the row of unknown ones tells.
    Xid(Option<u64>, &'a XidRow),
}

/// The rows that `what` means: an XID's number, a rule's name, or a signal that rules judge by.
pub(super) fn find<'a>(policy: &'a Policy, what: &str) -> Vec<Row<'a>> {
    if let Some(row) = all(policy).into_iter().find(|row| row.key() == what) {
        return vec![row];
    }
    let digits = what.trim_start_matches(|c: char| c.is_ascii_alphabetic()).trim();
    let is_xid = !digits.is_empty()
        && matches!(&what[..what.len() - digits.len()].trim().to_ascii_lowercase()[..], "" | "xid");
    if let Some(number) = digits.parse().ok().filter(|_| is_xid) {
        return vec![match policy.xids.get(&number) {
            Some(row) => Row::Xid(Some(number), row),
            None => Row::Xid(None, &policy.unknown_xid),
        }];
    }
    let rules = policy.rules.iter().filter(|(name, rule)| *name == what || signal_name(rule.signal) == what);
    rules.map(|(name, rule)| Row::Rule(name, rule)).collect()
}

pub(super) fn all(policy: &Policy) -> Vec<Row<'_>> {
    let rules = policy.rules.iter().map(|(name, rule)| Row::Rule(name, rule));
    let xids = policy.xids.iter().map(|(number, row)| Row::Xid(Some(*number), row));
    rules.chain(xids).chain([Row::Xid(None, &policy.unknown_xid)]).collect()
}

pub(super) fn signal_name(signal: Signal) -> String {
    json!(signal).as_str().unwrap_or_default().to_owned()
}

impl Row<'_> {
    /// As it is called in the policy file.
    pub(super) fn key(&self) -> String {
        match self {
            Self::Rule(name, _) => format!("rule.{name}"),
            Self::Xid(Some(number), _) => format!("xid.{number}"),
            Self::Xid(None, _) => "xid.unknown".to_owned(),
        }
    }

    pub(super) fn class(&self) -> Class {
        match self {
            Self::Rule(_, rule) => rule.class,
            Self::Xid(_, row) => row.class,
        }
    }

    pub(super) fn cause(&self) -> &str {
        match self {
            Self::Rule(_, rule) => &rule.cause,
            Self::Xid(_, row) => &row.cause,
        }
    }

    fn rejoin(&self) -> Rejoin {
        match self {
            Self::Rule(_, rule) => rule.rejoin,
            Self::Xid(_, row) => row.rejoin(row.class),
        }
    }

    pub(super) fn rejoin_words(&self) -> String {
        let gate = if self.class().takes_out() { ", then through the rejoin gate" } else { "" };
        format!("{}{gate}", self.rejoin().words())
    }

    fn action(&self) -> &str {
        match self {
            Self::Rule(_, rule) => &rule.action,
            Self::Xid(_, row) => &row.action,
        }
    }

    fn source(&self) -> &str {
        match self {
            Self::Rule(_, rule) => &rule.source,
            Self::Xid(_, row) => &row.source,
        }
    }

    fn risk(&self) -> f64 {
        match self {
            Self::Rule(_, rule) => rule.risk,
            Self::Xid(_, row) => row.risk,
        }
    }

    /// The same row in another policy.
    pub(super) fn same_in<'a>(&self, other: &'a Policy) -> Option<Row<'a>> {
        match self {
            Self::Rule(name, _) => other.rules.get_key_value(*name).map(|(name, rule)| Row::Rule(name, rule)),
            Self::Xid(Some(number), _) => other.xids.get(number).map(|row| Row::Xid(Some(*number), row)),
            Self::Xid(None, _) => Some(Row::Xid(None, &other.unknown_xid)),
        }
    }

    pub(super) fn json(&self) -> Value {
        let mut value = match self {
            Self::Rule(_, rule) => json!(rule),
            Self::Xid(_, row) => json!(row),
        };
        value["row"] = json!(self.key());
        value["rejoin"] = json!(self.rejoin());
        value["rejoin_words"] = json!(self.rejoin_words());
        value
    }

    /// What would happen and why, a line each: what about, and the words.
    pub(super) fn words(&self, policies: &Policies, policy: &Policy) -> Vec<(&'static str, String)> {
        let class = self.class();
        let mut lines = vec![("means", self.cause().to_owned())];
        match self {
            Self::Rule(_, rule) => lines.push(("seen", rule_words(rule))),
            Self::Xid(_, row) => {
                lines.push((
                    "seen",
                    "at once, through NVML or the kernel log; within 2 s both count as one".to_owned(),
                ));
                lines.extend(xid_words(row));
            }
        }
        let shadow = if policy.enforce { "" } else { " (only told: this policy does not enforce)" };
        let meaning = match self {
            Self::Rule(_, Rule { shards_readable: Some(false), .. }) => {
                "dropped at once: its shards cannot be read from it, and come from other replicas"
            }
            Self::Rule(..) | Self::Xid(..) => class.meaning(),
        };
        lines.push(("class", format!("{}: the GPU is {meaning}{shadow}", class.name())));
        if class != Class::Ignore {
            lines.push(("rejoin", self.rejoin_words()));
        }
        if let (true, Some(hold)) = (class.takes_out(), policy.gate.hold(0)) {
            let hold = humantime::format_duration(hold);
            let within = humantime::format_duration(policy.gate.relapse_within());
            lines.push((
                "gate",
                format!(
                    "{hold} of healthy reads, twice as long with each relapse within {within}, by an operator after {}; \
                     never while the driver asks for recovery, a link is down or a row waits to be remapped",
                    policy.gate.manual_after
                ),
            ));
        }
        if self.risk() > 0.0 {
            let risk = &policy.risk;
            let half = humantime::format_duration(risk.half_life());
            lines.push((
                "risk",
                format!(
                    "{} points; half are forgotten in {half}, at {} the GPU is drained",
                    self.risk(),
                    risk.drain_at
                ),
            ));
        }
        lines.push(("action", self.action().to_owned()));
        lines.push(("source", self.source().to_owned()));
        for (name, other) in policies.architectures() {
            if let Some(differs) = self.same_in(other).filter(|row| row != self) {
                lines.push((
                    "differs",
                    format!("on {name}: {}, {}", differs.class().name(), differs.rejoin_words()),
                ));
            }
        }
        lines
    }
}

fn rule_words(rule: &Rule) -> String {
    let name = signal_name(rule.signal);
    let limit = match rule.limit {
        Limit::Above(limit) => format!("more than {limit}"),
        Limit::AtLeast(limit) => format!("{limit} or more"),
        Limit::AtMost(limit) => format!("{limit} or less"),
    };
    let value = rule.signal.unit().map_or_else(|| "told".to_owned(), |unit| format!("{limit} {unit}"));
    let when = match rule.when {
        When::Polls(1) => "at the first read".to_owned(),
        When::Polls(polls) => format!("in {polls} reads in a row"),
        When::Lasting(span) => format!("in every read for {span}"),
        When::Hits(hits) => format!("{} times within {}", hits.count, hits.within),
        When::Windows(windows) => {
            format!("in {} of the last {} windows of {}", windows.bad, windows.of, windows.length)
        }
    };
    let clear = rule.clear.map_or_else(String::new, |reads| format!("; gone after {reads} clean reads"));
    let grace =
        rule.boot_grace.map_or_else(String::new, |span| format!("; not judged for {span} after the boot"));
    format!("{name} is {value}, {when}{clear}{grace}")
}

fn xid_words(row: &XidRow) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    for word in &row.log {
        lines.push(("log", format!("`{}` in its line of the kernel log: {}", word.word, word.class.name())));
    }
    for then in &row.then {
        let numbers: Vec<String> = then.xid.iter().map(u64::to_string).collect();
        let within = row.settle.map(|settle| settle.to_string()).unwrap_or_default();
        lines.push((
            "then",
            format!(
                "XID {} within {within} belongs to it; both mean {}, rejoin {}",
                numbers.join(" or "),
                then.class.name(),
                then.rejoin.words()
            ),
        ));
    }
    if let Some(repeat) = &row.repeat {
        let (count, within) = (repeat.count, repeat.within);
        lines
            .push(("repeat", format!("{count} within {within}: {}; {}", repeat.class.name(), repeat.action)));
    }
    if let Some(class) = row.with_recovery_action {
        lines.push(("with", format!("a recovery action that the driver asks for: {}", class.name())));
    }
    if let Some(class) = row.with_link_down {
        lines.push(("with", format!("an NVLink that is down: {}", class.name())));
    }
    lines
}
