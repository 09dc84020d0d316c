//! From the built-in table and a file that differs from it to a policy per architecture.

use super::class::Class;
use super::row::{Limit, Rule, When, XidRow};
use super::{Gate, Policy, Risk, Watchdog};
use reknit_layout::toml_file::{FileError, Invalid, describe, parse};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use toml::{Table, Value};

const BUILT_IN: &str = include_str!("default.toml");
/// The version of the policy's form that this agent knows.
const VERSION: i64 = 1;
const UNKNOWN: &str = "unknown";
/// As NVML's binding names them, in lower case; `unknown` is one that it does not know.
pub(super) const ARCHITECTURES: [&str; 10] =
    ["kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", UNKNOWN];
/// A policy file is a few kilobytes; more is a mistake.
const LARGEST: u64 = 1 << 20;

/// Why a policy file is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PolicyFileError {
    #[error("cannot read the policy file {path}: {why}")]
    Read { path: PathBuf, why: String },
    #[error(transparent)]
    Content(#[from] FileError),
}

/// The policies in force.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Policies {
    general: Arc<Policy>,
    by_architecture: BTreeMap<String, Arc<Policy>>,
}

impl Policies {
    /// The policy that the agent was built with.
    pub(crate) fn built_in() -> Result<Self, FileError> {
        Self::parse("", "the built-in policy")
    }

    /// The file's, or the built-in ones without a file.
    pub(crate) fn of(path: Option<&Path>) -> Result<Self, PolicyFileError> {
        match path {
            Some(path) => Ok(Self::load(path)?.0),
            None => Ok(Self::built_in()?),
        }
    }

    /// The file's policies and its text.
    pub(crate) fn load(path: &Path) -> Result<(Self, String), PolicyFileError> {
        let failed = |why: String| PolicyFileError::Read { path: path.to_owned(), why };
        // Opening anything else, such as a pipe, might never return.
        if !fs::metadata(path).map_err(|e| failed(e.to_string()))?.is_file() {
            return Err(failed("it is no file".to_owned()));
        }
        let mut text = String::new();
        let file = fs::File::open(path).map_err(|e| failed(e.to_string()))?;
        file.take(LARGEST + 1).read_to_string(&mut text).map_err(|e| failed(e.to_string()))?;
        if text.len() as u64 > LARGEST {
            return Err(failed(format!("it has more than {LARGEST} bytes")));
        }
        Ok((Self::parse(&text, &path.display().to_string())?, text))
    }

    /// `text` holds what differs from the built-in policy. `file` is only its name in errors.
    pub(crate) fn parse(text: &str, file: &str) -> Result<Self, FileError> {
        let mut own: Table = parse(text, file)?;
        let architectures = own.remove("arch");
        let merged = || -> Result<Self, Invalid> {
            let mut general: Table =
                BUILT_IN.parse().map_err(|e: toml::de::Error| invalid("", e.message()))?;
            merge(&mut general, own, &mut Vec::new())?;
            let mut by_architecture = BTreeMap::new();
            for (name, differs) in sections("arch", architectures)? {
                if !ARCHITECTURES.contains(&name.as_str()) {
                    let known = ARCHITECTURES.join(", ");
                    return Err(invalid(
                        &format!("arch.{name}"),
                        &format!("is no architecture: there are {known}"),
                    ));
                }
                let known = ["rule", "xid", "gate", "risk"];
                if let Some(key) = differs.keys().find(|key| !known.contains(&key.as_str())) {
                    let key = format!("arch.{name}.{key}");
                    return Err(invalid(
                        &key,
                        "is unknown: an architecture may have rule, xid, gate and risk",
                    ));
                }
                let mut table = general.clone();
                merge(&mut table, differs, &mut vec!["arch".to_owned(), name.clone()])?;
                let policy = Policy::of(table, &format!("arch.{name}."))?;
                by_architecture.insert(name, Arc::new(policy));
            }
            Ok(Self { general: Arc::new(Policy::of(general, "")?), by_architecture })
        };
        merged().map_err(|invalid| FileError::of(text, file, &invalid))
    }

    pub(crate) fn general(&self) -> &Policy {
        &self.general
    }

    pub(crate) fn for_architecture(&self, name: &str) -> &Arc<Policy> {
        self.by_architecture.get(name).unwrap_or(&self.general)
    }

    pub(crate) fn architectures(&self) -> impl Iterator<Item = (&str, &Policy)> {
        self.by_architecture.iter().map(|(name, policy)| (name.as_str(), policy.as_ref()))
    }
}

fn invalid(key: &str, problem: &str) -> Invalid {
    Invalid { key: key.to_owned(), problem: problem.to_owned() }
}

/// Sections, and the rows in them, are merged key by key; a row's key is replaced whole.
fn merge(base: &mut Table, over: Table, path: &mut Vec<String>) -> Result<(), Invalid> {
    for (key, value) in over {
        path.push(key.clone());
        match (base.get_mut(&key), value) {
            (Some(Value::Table(section)), Value::Table(differs)) if path.len() <= depth(path) => {
                merge(section, differs, path)?;
            }
            (Some(Value::Table(_)), _) if path.len() <= depth(path) => {
                return Err(invalid(&path.join("."), "must be a table"));
            }
            (_, value) => {
                base.insert(key, value);
            }
        }
        path.pop();
    }
    Ok(())
}

/// How many names lead to a row.
fn depth(path: &[String]) -> usize {
    if path.first().is_some_and(|first| first == "arch") { 4 } else { 2 }
}

fn sections(key: &str, value: Option<Value>) -> Result<BTreeMap<String, Table>, Invalid> {
    let table = match value {
        None => Table::new(),
        Some(Value::Table(table)) => table,
        Some(_) => return Err(invalid(key, "must be a table")),
    };
    let rows = table.into_iter().map(|(name, row)| match row {
        Value::Table(row) => Ok((name, row)),
        _ => Err(invalid(&format!("{key}.{name}"), "must be a table")),
    });
    rows.collect()
}

fn take<T: DeserializeOwned>(table: &mut Table, prefix: &str, key: &str) -> Result<T, Invalid> {
    let path = format!("{prefix}{key}");
    let value = table.remove(key).ok_or_else(|| invalid(&path, "is missing"))?;
    read(value, &path)
}

fn read<T: DeserializeOwned>(value: Value, path: &str) -> Result<T, Invalid> {
    let keys: Vec<String> = value.as_table().map(|table| table.keys().cloned().collect()).unwrap_or_default();
    value.try_into().map_err(|e: toml::de::Error| {
        let words = describe(e.message(), None);
        // The words quote an unknown key, and its line is the one to look at.
        let unknown = keys.iter().find(|key| words.starts_with(&format!("unknown key `{key}`")));
        let place = unknown.map_or_else(|| path.to_owned(), |key| format!("{path}.{key}"));
        invalid(&place, &format!(": {words}"))
    })
}

impl Policy {
    fn of(mut table: Table, prefix: &str) -> Result<Self, Invalid> {
        let version: i64 = take(&mut table, "", "version")?;
        if version != VERSION {
            return Err(invalid("version", &format!("is {version}: this agent knows version {VERSION}")));
        }
        let mut rules = BTreeMap::new();
        for (name, row) in sections(&format!("{prefix}rule"), table.remove("rule"))? {
            let path = format!("{prefix}rule.{name}");
            if !row.contains_key("signal") {
                let words =
                    "is no rule of the built-in policy, and a new one needs `signal` and all the rest";
                return Err(invalid(&path, words));
            }
            let rule: Rule = read(Value::Table(row), &path)?;
            check_rule(&rule, &path)?;
            rules.insert(name, rule);
        }
        let mut xids = BTreeMap::new();
        let mut unknown_xid = None;
        for (name, row) in sections(&format!("{prefix}xid"), table.remove("xid"))? {
            let path = format!("{prefix}xid.{name}");
            let row: XidRow = read(Value::Table(row), &path)?;
            check_xid(&row, &path)?;
            if name == UNKNOWN {
                unknown_xid = Some(row);
            } else {
                let number = name.parse().ok().filter(|number: &u64| number.to_string() == name);
                let number = number.ok_or_else(|| invalid(&path, "must be an XID's number or `unknown`"))?;
                xids.insert(number, row);
            }
        }
        let policy = Self {
            enforce: take(&mut table, prefix, "enforce")?,
            watchdog: take(&mut table, prefix, "watchdog")?,
            gate: take(&mut table, prefix, "gate")?,
            risk: take(&mut table, prefix, "risk")?,
            rules,
            xids,
            unknown_xid: unknown_xid.ok_or_else(|| invalid("xid.unknown", "is missing"))?,
        };
        if let Some(key) = table.keys().next() {
            let known = "allowed are version, enforce, watchdog, gate, risk, rule, xid, arch";
            return Err(invalid(key, &format!("is an unknown key: {known}")));
        }
        policy.watchdog.check()?;
        policy.gate.check(prefix)?;
        policy.risk.check(prefix)?;
        Ok(policy)
    }
}

fn positive(holds: bool, key: &str) -> Result<(), Invalid> {
    if holds { Ok(()) } else { Err(invalid(key, "must be more than 0")) }
}

fn row_class(class: Class, path: &str) -> Result<(), Invalid> {
    if class == Class::Healthy {
        return Err(invalid(path, "cannot have the class healthy: a row that means nothing is `ignore`"));
    }
    Ok(())
}

fn points(risk: f64, path: &str) -> Result<(), Invalid> {
    if risk.is_finite() && risk >= 0.0 {
        Ok(())
    } else {
        Err(invalid(&format!("{path}.risk"), "must be 0 or more"))
    }
}

/// Windows are kept one by one.
const MOST_WINDOWS: u32 = 10_000;

fn check_rule(rule: &Rule, path: &str) -> Result<(), Invalid> {
    row_class(rule.class, &format!("{path}.class"))?;
    points(rule.risk, path)?;
    let when = format!("{path}.when");
    match rule.when {
        When::Polls(polls) => positive(polls > 0, &when)?,
        When::Lasting(_) => {}
        When::Hits(hits) => {
            positive(hits.count > 0 && hits.within.0 > Duration::ZERO, &when)?;
            if hits.count > MOST_WINDOWS {
                return Err(invalid(&when, &format!("may count to {MOST_WINDOWS}")));
            }
        }
        When::Windows(windows) => {
            positive(windows.bad > 0 && windows.length.0 > Duration::ZERO, &when)?;
            if windows.bad > windows.of || windows.of > MOST_WINDOWS {
                return Err(invalid(&when, &format!("needs bad <= of, and of <= {MOST_WINDOWS}")));
            }
        }
    }
    let (Limit::Above(limit) | Limit::AtLeast(limit) | Limit::AtMost(limit)) = rule.limit;
    if !limit.is_finite() {
        return Err(invalid(&format!("{path}.limit"), "must be a finite number"));
    }
    positive(rule.clear != Some(0), &format!("{path}.clear"))
}

fn check_xid(row: &XidRow, path: &str) -> Result<(), Invalid> {
    points(row.risk, path)?;
    let more = [row.with_recovery_action, row.with_link_down, row.repeat.as_ref().map(|r| r.class)];
    let words = row.log.iter().map(|word| word.class);
    let then = row.then.iter().map(|then| then.class);
    let mut classes = [row.class].into_iter().chain(more.into_iter().flatten()).chain(words).chain(then);
    classes.try_for_each(|class| row_class(class, path))?;
    if let Some(repeat) = &row.repeat {
        positive(repeat.count > 0 && repeat.within.0 > Duration::ZERO, &format!("{path}.repeat"))?;
        if repeat.count > MOST_WINDOWS {
            return Err(invalid(&format!("{path}.repeat"), &format!("may count to {MOST_WINDOWS}")));
        }
    }
    if row.log.iter().any(|word| word.word.is_empty()) {
        return Err(invalid(&format!("{path}.log"), "has an empty word"));
    }
    if !row.then.is_empty() && row.settle.is_none_or(|settle| settle.0 == Duration::ZERO) {
        return Err(invalid(&format!("{path}.then"), "needs a `settle`: how long to wait for the other XID"));
    }
    Ok(())
}

impl Watchdog {
    fn check(&self) -> Result<(), Invalid> {
        positive(self.blind.0 > Duration::ZERO, "watchdog.blind")
    }
}

impl Gate {
    fn check(&self, prefix: &str) -> Result<(), Invalid> {
        positive(self.healthy_reads > 0, &format!("{prefix}gate.healthy_reads"))
    }
}

impl Risk {
    fn check(&self, prefix: &str) -> Result<(), Invalid> {
        positive(self.half_life.0 > Duration::ZERO, &format!("{prefix}risk.half_life"))?;
        let ordered = self.predict_at > 0.0 && self.predict_at <= self.drain_at && self.drain_at.is_finite();
        if ordered {
            Ok(())
        } else {
            Err(invalid(&format!("{prefix}risk"), "needs 0 < predict_at <= drain_at"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Rejoin;

    fn refused(text: &str) -> String {
        Policies::parse(text, "p.toml").expect_err(text).to_string()
    }

    #[test]
    fn the_built_in_policy_is_whole() {
        let policies = Policies::built_in().unwrap();
        let policy = policies.general();
        assert_eq!((policy.rules.len(), policy.xids.len()), (37, 65));
        assert_eq!(policy.xid(79).class, Class::Fatal);
        assert_eq!(policy.xid(45).class, Class::Ignore);
        assert_eq!(policy.xid(94).class, Class::RankDied);
        assert_eq!(policy.xid(4711).class, Class::Predict);
        assert!(policy.enforce);
        for (name, rule) in &policy.rules {
            assert!(!rule.source.is_empty() && !rule.action.is_empty() && !rule.cause.is_empty(), "{name}");
        }
    }

    #[test]
    fn a_file_holds_only_what_differs() {
        let text = "
            enforce = false
            [rule.gone]
            when = { polls = 5 }
            [xid.48]
            settle = \"3s\"
            [xid.4711]
            class = \"fatal\"
            cause = \"ours\"
            action = \"none\"
            source = \"experience\"
            [arch.ampere.rule.gone]
            class = \"drain\"
            [arch.ampere.gate]
            hold = \"1m\"
        ";
        let policies = Policies::parse(text, "p.toml").unwrap();
        let policy = policies.general();
        assert!(!policy.enforce);
        assert_eq!((policy.rules["gone"].when, policy.rules["gone"].class), (When::Polls(5), Class::Fatal));
        assert_eq!(policy.xid(48).settle.unwrap().0, Duration::from_secs(3));
        assert_eq!(policy.xid(48).then.len(), 2);
        assert_eq!(policy.xid(4711).rejoin(Class::Fatal), Rejoin::Reset);
        let ampere = policies.for_architecture("ampere");
        assert_eq!((ampere.rules["gone"].when, ampere.rules["gone"].class), (When::Polls(5), Class::Drain));
        assert_eq!(ampere.gate.hold(0), Some(Duration::from_secs(60)));
        assert_eq!(policies.for_architecture("hopper").gate.hold(0), Some(Duration::from_secs(5)));
    }

    #[test]
    fn a_bad_file_is_refused_with_the_place() {
        let bad = [
            ("\n\ncolour = 1", "p.toml: line 3: colour is an unknown key"),
            ("version = 2", "p.toml: line 1: version is 2: this agent knows version 1"),
            ("\n[rule.gone]\ncolour = 1", "p.toml: line 3: rule.gone.colour : unknown key `colour`"),
            ("[rule.gone]\nclass = \"maybe\"", "unknown value `maybe`"),
            ("[rule.gone]\nclass = \"healthy\"", "cannot have the class healthy"),
            ("[rule.gone]\nwhen = { polls = 0 }", "rule.gone.when must be more than 0"),
            ("[rule.gone]\nwhen = { often = 3 }", "unknown value `often`"),
            ("[rule.gone]\nwhen = { hits = { count = 1, within = \"1m\", x = 1 } }", "unknown key `x`"),
            ("[rule.gone]\nwhen = { windows = { bad = 3, of = 2, length = \"1m\" } }", "needs bad <= of"),
            ("[rule.mine]\nclass = \"fatal\"", "rule.mine is no rule of the built-in policy"),
            ("[rule.gone]\nsignal = \"smell\"", "unknown value `smell`"),
            ("[rule.gone]\nboot_grace = \"soon\"", "`soon` is no duration"),
            ("[rule.gone]\nrisk = -1", "rule.gone.risk must be 0 or more"),
            ("rule.gone = 3", "rule.gone must be a table"),
            ("rule = 3", "rule must be a table"),
            (
                "[xid.banana]\nclass = \"fatal\"\ncause = \"\"\naction = \"\"\nsource = \"\"",
                "must be an XID's number",
            ),
            (
                "[xid.007]\nclass = \"fatal\"\ncause = \"\"\naction = \"\"\nsource = \"\"",
                "must be an XID's number",
            ),
            ("[xid.63]\nthen = [{ xid = [1], class = \"drain\", rejoin = \"reset\" }]", "needs a `settle`"),
            ("[gate]\nhealthy_reads = 0", "gate.healthy_reads must be more than 0"),
            ("[risk]\npredict_at = 500", "needs 0 < predict_at <= drain_at"),
            ("[arch.amper]", "arch.amper is no architecture: there are kepler, maxwell"),
            (
                "[rule.gonne]\nboot_grace = \"1s\"",
                "rule.gonne is no rule of the built-in policy, and a new one needs",
            ),
            ("[arch.hopper]\nenforce = true", "arch.hopper.enforce is unknown"),
            ("[arch.hopper.gate]\nhealthy_reads = 0", "arch.hopper.gate.healthy_reads must be more"),
            ("[arch.hopper.xid.79]\nclass = 7", "arch.hopper.xid.79"),
            ("version = ", "p.toml: line 1"),
        ];
        for (text, words) in bad {
            let error = refused(text);
            assert!(error.contains(words), "{text}\n{error}\n{words}");
        }
    }
}
