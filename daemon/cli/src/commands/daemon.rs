//! `reknit daemon`

use crate::Remote;
use crate::admin::{Asked, Until, ask_each};
use crate::failure::Failure;
use crate::output::or_none;
use crate::table::Table;
use reknit_proto::v1::daemon::Role;
use serde_json::{Value, json};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum DaemonCommand {
    /// Each daemon given, and each that one of them names: which leads, since which term, which is in stand-by, which does not
    /// answer. The exit status is 69 when none leads.
    List {
        #[command(flatten)]
        remote: Remote,
    },
}

pub(crate) async fn run(command: DaemonCommand) -> Result<(), Failure> {
    match command {
        DaemonCommand::List { remote } => {
            let asked = ask_each(&remote.daemon, Until::AllAreAsked).await?;
            let json: Value = asked.iter().map(as_json).collect();
            remote.format.print(&json, &as_table(&asked))?;
            if asked.iter().any(Asked::leads) {
                Ok(())
            } else {
                Err(Failure::Unreachable(
                    "no daemon leads: training goes on, but no fault is recovered from".to_owned(),
                ))
            }
        }
    }
}

fn role(role: Role) -> &'static str {
    match role {
        Role::Leading => "leading",
        Role::StandBy => "stand_by",
        Role::Unspecified => "unknown",
    }
}

fn as_table(asked: &[Asked]) -> Table {
    let mut table = Table::new(["DAEMON", "ROLE", "TERM", "LEADER", "NOTE"]);
    for Asked { address, answer } in asked {
        let row = match answer {
            Ok((_, daemon)) => {
                let term = if daemon.term == 0 { "-".to_owned() } else { daemon.term.to_string() };
                let note = if daemon.address == *address {
                    String::new()
                } else {
                    format!("advertises {}", daemon.address)
                };
                [address.clone(), role(daemon.role()).to_owned(), term, or_none(&daemon.leader), note]
            }
            Err(silence) => {
                let none = || "-".to_owned();
                [address.clone(), "no answer".to_owned(), none(), none(), silence.to_string()]
            }
        };
        table.row(row);
    }
    table
}

fn as_json(Asked { address, answer }: &Asked) -> Value {
    match answer {
        Ok((_, daemon)) => json!({
            "daemon": address, "role": role(daemon.role()), "advertised": daemon.address,
            "leader": (!daemon.leader.is_empty()).then_some(&daemon.leader),
            "term": (daemon.term != 0).then_some(daemon.term), "problem": null,
        }),
        Err(silence) => json!({
            "daemon": address, "role": null, "advertised": null, "leader": null, "term": null,
            "problem": silence.to_string(),
        }),
    }
}
