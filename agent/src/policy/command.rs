//! `reknit-agent policy`: is a policy file good, and what would happen.

use super::explain::{Row, all, find, signal_name};
use super::{Policies, Policy, PolicyFileError};
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::PathBuf;

#[derive(Debug, Clone, Args)]
pub(crate) struct PolicyArguments {
    #[command(subcommand)]
    command: PolicyCommand,
}

#[derive(Debug, Clone, Subcommand)]
enum PolicyCommand {
    /// Check a policy file, and say where it differs from the built-in policy.
    Check {
        file: PathBuf,
        #[arg(long, value_enum, default_value = "table")]
        format: Format,
    },
    /// Say in words what would happen at an XID or a signal, and why. Without one: every row in a line.
    Explain {
        /// An XID's number such as 79, or a rule's or signal's name such as nvlink_down.
        what: Option<String>,
        /// The policy file; the built-in policy without one.
        #[arg(long, env = "REKNIT_POLICY", value_name = "FILE")]
        policy: Option<PathBuf>,
        /// For GPUs of this architecture, such as hopper.
        #[arg(long)]
        arch: Option<String>,
        #[arg(long, value_enum, default_value = "table")]
        format: Format,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    #[value(alias = "text")]
    Table,
    /// For programs.
    Json,
}

/// Why a command has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PolicyCommandError {
    #[error(transparent)]
    File(#[from] PolicyFileError),
    /// The answer itself says what is wrong.
    #[error("{0}")]
    Told(String),
    #[error("`{0}` is no architecture; there are: {known}", known = super::file::ARCHITECTURES.join(", "))]
    Architecture(String),
    #[error("`{what}` is no XID, rule or signal; there are: {known}")]
    Unknown { what: String, known: String },
}

/// The text to print.
pub(crate) fn run(arguments: PolicyArguments) -> Result<String, PolicyCommandError> {
    match arguments.command {
        PolicyCommand::Check { file, format } => {
            let policies = match (Policies::load(&file), format) {
                (Ok((policies, _)), _) => policies,
                (Err(e), Format::Table) => return Err(e.into()),
                (Err(e), Format::Json) => {
                    let file = file.display().to_string();
                    let answer = json!({ "file": file, "valid": false, "error": e.to_string() });
                    return Err(PolicyCommandError::Told(line(&answer)));
                }
            };
            let built_in = Policies::built_in().map_err(PolicyFileError::from)?;
            let changes = changes(built_in.general(), policies.general());
            let per_architecture = policies
                .architectures()
                .map(|(name, policy)| (name.to_owned(), self::changes(policies.general(), policy)))
                .collect::<Vec<_>>();
            let enforce = policies.general().enforce;
            Ok(match format {
                Format::Json => line(&json!({
                    "file": file.display().to_string(), "valid": true, "enforce": enforce,
                    "differs": changes, "arch": per_architecture.into_iter().collect::<std::collections::BTreeMap<_, _>>(),
                })),
                Format::Table => {
                    let mut text = format!("{}: valid\n", file.display());
                    if !enforce {
                        text.push_str("enforce = false: verdicts are told, and nothing happens\n");
                    }
                    if changes.is_empty() && per_architecture.is_empty() {
                        text.push_str("as the built-in policy\n");
                    }
                    for change in changes {
                        let _ = writeln!(text, "{change}");
                    }
                    for (name, changes) in per_architecture {
                        for change in changes {
                            let _ = writeln!(text, "on {name}: {change}");
                        }
                    }
                    text
                }
            })
        }
        PolicyCommand::Explain { what, policy, arch, format } => {
            let policies = Policies::of(policy.as_deref())?;
            if let Some(unknown) =
                arch.as_ref().filter(|name| !super::file::ARCHITECTURES.contains(&name.as_str()))
            {
                return Err(PolicyCommandError::Architecture(unknown.clone()));
            }
            let policy = arch.as_deref().map_or(policies.general(), |name| policies.for_architecture(name));
            let Some(what) = what else {
                return Ok(table_of_all(policy, format));
            };
            let rows = find(policy, &what);
            if rows.is_empty() {
                let known =
                    policy.rules.iter().flat_map(|(name, rule)| [name.clone(), signal_name(rule.signal)]);
                let known: std::collections::BTreeSet<String> = known.collect();
                let known = known.into_iter().collect::<Vec<_>>().join(", ");
                return Err(PolicyCommandError::Unknown { what, known });
            }
            Ok(match format {
                Format::Json => line(&Value::from(rows.iter().map(Row::json).collect::<Vec<_>>())),
                Format::Table => in_words(&policies, policy, &what, &rows),
            })
        }
    }
}

fn line(value: &Value) -> String {
    format!("{value}\n")
}

fn in_words(policies: &Policies, policy: &Policy, what: &str, rows: &[Row<'_>]) -> String {
    let mut text = String::new();
    for row in rows {
        let _ = match row {
            Row::Xid(None, _) => writeln!(text, "XID {what}: no row names it, so [xid.unknown] tells"),
            Row::Xid(Some(number), _) => writeln!(text, "XID {number} [{}]", row.key()),
            Row::Rule(name, _) => writeln!(text, "{name} [{}]", row.key()),
        };
        for (about, words) in row.words(policies, policy) {
            let _ = writeln!(text, "  {about:<8}{words}");
        }
    }
    text
}

fn table_of_all(policy: &Policy, format: Format) -> String {
    let rows = all(policy);
    match format {
        Format::Json => line(&Value::from(rows.iter().map(Row::json).collect::<Vec<_>>())),
        Format::Table => {
            let width = rows.iter().map(|row| row.key().len()).max().unwrap_or(0);
            let mut text = format!("{:<width$}  {:<9}  {}\n", "ROW", "CLASS", "MEANS");
            for row in rows {
                let _ = writeln!(text, "{:<width$}  {:<9}  {}", row.key(), row.class().name(), row.cause());
            }
            text
        }
    }
}

/// Where `new` differs from `old`, a line each.
fn changes(old: &Policy, new: &Policy) -> Vec<String> {
    let mut changes = Vec::new();
    for row in all(new) {
        match row.same_in(old) {
            None => changes.push(format!("{}: new, {}", row.key(), row.class().name())),
            Some(before) if before != row => {
                changes.extend(keys_that_differ(&before.json(), &row.json(), &row.key()))
            }
            Some(_) => {}
        }
    }
    let sections = [
        ("watchdog", json!(old.watchdog), json!(new.watchdog)),
        ("gate", json!(old.gate), json!(new.gate)),
        ("risk", json!(old.risk), json!(new.risk)),
    ];
    for (name, old, new) in sections {
        changes.extend(keys_that_differ(&old, &new, name));
    }
    changes
}

fn keys_that_differ(old: &Value, new: &Value, row: &str) -> Vec<String> {
    let keys = new.as_object().into_iter().flatten();
    let differ = keys.filter(|(key, value)| old.get(key.as_str()) != Some(value) && *key != "rejoin_words");
    differ
        .map(|(key, value)| format!("{row}.{key}: {} -> {value}", old.get(key).unwrap_or(&Value::Null)))
        .collect()
}
