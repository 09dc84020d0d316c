//! `reknit incidents`

mod show;

use super::job::tell_if_stored;
use crate::Remote;
use crate::admin::{connect, refused};
use crate::failure::Failure;
use crate::output::{Format, or_none, print_lines, second_text};
use crate::table::Table;
use reknit_proto::v1::{GetJobRequest, Incident, Job, ListIncidentsRequest};
use serde_json::{Value, json};

/// Characters of what was seen in a row of the table: it fits a wide terminal. `--id` tells all.
const SEEN: usize = 44;

#[derive(Debug, clap::Args)]
pub(crate) struct IncidentsArgs {
    job: String,
    /// Everything of this one: who saw it first, the phases of the recovery, what it cost, what to do.
    #[arg(long, value_name = "N")]
    id: Option<u64>,
    /// Also those of earlier runs under the same name; JSON has them in any case.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    remote: Remote,
}

pub(crate) async fn run(args: &IncidentsArgs) -> Result<(), Failure> {
    let IncidentsArgs { job: name, id, all, remote } = args;
    let mut admin = connect(&remote.daemon).await?;
    let job = admin.get_job(GetJobRequest { name: name.clone() }).await.map_err(refused)?.into_inner();
    let request = ListIncidentsRequest { job: name.clone() };
    let incidents = admin.list_incidents(request).await.map_err(refused)?.into_inner().incidents;
    let lines = match (id, remote.format) {
        (Some(id), format) => {
            let found = incidents.iter().find(|incident| incident.id == *id);
            let incident = found.ok_or_else(|| {
                Failure::Failed(format!(
                    "job `{name}` has no incident {id}: `reknit incidents {name} --all` lists them; the newest 1000 are kept"
                ))
            })?;
            match format {
                Format::Table => show::as_lines(incident, state(incident, &job)),
                Format::Json => vec![of_job(incident, &job).to_string()],
            }
        }
        (None, Format::Table) => as_lines(&incidents, &job, *all),
        (None, Format::Json) => {
            let json: Value = incidents.iter().map(|incident| of_job(incident, &job)).collect();
            vec![json.to_string()]
        }
    };
    print_lines(&lines)?;
    tell_if_stored(std::slice::from_ref(&job));
    Ok(())
}

fn as_lines(incidents: &[Incident], job: &Job, all: bool) -> Vec<String> {
    let mut table = Table::new(["ID", "TIME", "KIND", "PLACE", "GPU", "MS", "STATE", "SEEN"]);
    let mut hidden = 0;
    for incident in incidents {
        if is_earlier(incident, job) && !all {
            hidden += 1;
            continue;
        }
        table.row([
            incident.id.to_string(),
            second_text(incident.detected_us),
            incident.kind.clone(),
            or_none(&incident.place),
            or_none(&gpu(incident)),
            milliseconds(incident).map_or("-".to_owned(), |ms| format!("{ms:.1}")),
            state(incident, job).to_owned(),
            shortened(&incident.signal),
        ]);
    }
    let mut lines = table.lines();
    if hidden > 0 {
        lines.push(format!("{hidden} of earlier runs of this name are left out: --all"));
    }
    lines
}

fn is_earlier(incident: &Incident, job: &Job) -> bool {
    incident.id <= job.earlier_incidents
}

/// How far it has come.
fn state(incident: &Incident, job: &Job) -> &'static str {
    let ended = match job.phase.as_str() {
        "Stopped" | "Completed" | "Failed" => true,
        _ => is_earlier(incident, job),
    };
    match (incident.told, incident.recovered_us != 0) {
        (true, true) => "over",
        (true, false) if ended => "told",
        (true, false) => "still so",
        (false, true) => "recovered",
        (false, false) if ended => "not recovered",
        (false, false) => {
            let reached = [
                ("quiescing", incident.quiesced_us),
                ("fencing", incident.fenced_us),
                ("planning", incident.planned_us),
                ("resharding", incident.ready_us),
            ];
            let under_way = reached.into_iter().find(|(_, end_us)| *end_us == 0);
            under_way.map_or("committing", |(name, _)| name)
        }
    }
}

/// `node-0/3`, as far as it is known.
fn gpu(incident: &Incident) -> String {
    match incident.index {
        Some(index) if !incident.node.is_empty() => format!("{}/{index}", incident.node),
        Some(_) | None if !incident.node.is_empty() => incident.node.clone(),
        Some(_) | None => incident.gpu.clone(),
    }
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= SEEN {
        return text.to_owned();
    }
    let kept: String = text.chars().take(SEEN - 3).collect();
    format!("{}...", kept.trim_end())
}

/// What of which GPU, for a line of `reknit events`.
pub(super) fn headline(incident: &Incident) -> String {
    let place = if incident.place.is_empty() { gpu(incident) } else { incident.place.clone() };
    let at = if place.is_empty() { String::new() } else { format!(" at {place}") };
    format!("incident {}: {}{at}: {}", incident.id, incident.kind, incident.signal)
}

/// From the first sign to the first step committed after it, or until what was told was over; `None` until then.
fn milliseconds(incident: &Incident) -> Option<f64> {
    (incident.recovered_us != 0)
        .then(|| incident.recovered_us.saturating_sub(incident.detected_us) as f64 / 1000.0)
}

fn of_job(incident: &Incident, job: &Job) -> Value {
    let mut json = as_json(incident);
    json["state"] = state(incident, job).into();
    json["earlier_run"] = is_earlier(incident, job).into();
    json
}

/// With the names and units of the protocol.
pub(super) fn as_json(incident: &Incident) -> Value {
    json!({
        "id": incident.id, "job": incident.job, "kind": incident.kind, "place": incident.place,
        "gpu": incident.gpu, "index": incident.index, "node": incident.node, "signal": incident.signal,
        "first_reporter": incident.first_reporter, "told": incident.told,
        "epoch_before": incident.epoch_before, "epoch_after": incident.epoch_after,
        "detected_us": incident.detected_us, "quiesced_us": incident.quiesced_us,
        "fenced_us": incident.fenced_us, "planned_us": incident.planned_us, "ready_us": incident.ready_us,
        "committed_us": incident.committed_us, "recovered_us": incident.recovered_us,
        "steps_lost": incident.steps_lost, "bytes_moved": incident.bytes_moved,
        "bytes_lower_bound": incident.bytes_lower_bound,
        "degrees_before": incident.degrees_before, "degrees_after": incident.degrees_after,
        "advice": incident.advice,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost() -> Incident {
        Incident {
            id: 7,
            kind: "gpu_lost".to_owned(),
            place: "0.0.1".to_owned(),
            node: "node-0".to_owned(),
            index: Some(1),
            detected_us: 1_796_008_398_123_456,
            signal: "XID 79: the GPU has fallen off the bus, as the kernel log says".to_owned(),
            ..Incident::default()
        }
    }

    fn running() -> Job {
        Job { phase: "Running".to_owned(), live: true, ..Job::default() }
    }

    #[test]
    fn a_row_tells_when_what_where_and_how_far() {
        let recovered = Incident { recovered_us: 1_796_008_398_399_856, ..lost() };
        let lines = as_lines(&[recovered], &running(), false);
        assert_eq!(
            lines[1],
            "7   2026-11-30T03:13:18Z  gpu_lost  0.0.1  node-0/1  276.4  recovered  XID 79: the GPU has fallen off the bus, a..."
        );
    }

    #[test]
    fn every_state_has_a_word() {
        let open = lost();
        let resharding = Incident { quiesced_us: 1, fenced_us: 2, planned_us: 3, ..open.clone() };
        let committing = Incident { ready_us: 4, ..resharding.clone() };
        let told = Incident { told: true, ..open.clone() };
        let over = Incident { recovered_us: 5, ..told.clone() };
        let job = running();
        let words = [&open, &resharding, &committing, &told, &over].map(|incident| state(incident, &job));
        assert_eq!(words, ["quiescing", "resharding", "committing", "still so", "over"]);
        assert_eq!(milliseconds(&open), None);
        let stopped = Job { phase: "Stopped".to_owned(), ..running() };
        assert_eq!(
            [&open, &told, &over].map(|incident| state(incident, &stopped)),
            ["not recovered", "told", "over"]
        );
    }

    #[test]
    fn earlier_runs_are_left_out_and_that_is_said() {
        let incidents = [Incident { id: 6, ..lost() }, lost()];
        let job = Job { earlier_incidents: 6, ..running() };
        let lines = as_lines(&incidents, &job, false);
        assert_eq!(
            (lines.len(), lines[2].as_str()),
            (3, "1 of earlier runs of this name are left out: --all")
        );
        let all = as_lines(&incidents, &job, true);
        assert!(
            all.len() == 3 && all[1].contains("not recovered") && all[2].contains("quiescing"),
            "{all:?}"
        );
        assert_eq!(of_job(&incidents[0], &job)["earlier_run"], true);
    }

    #[test]
    fn what_is_unknown_leaves_no_hole() {
        let suspicion = Incident { id: 3, kind: "plane_failed".to_owned(), ..Incident::default() };
        assert_eq!(headline(&suspicion), "incident 3: plane_failed: ");
        let no_place = Incident { place: String::new(), ..lost() };
        assert!(headline(&no_place).starts_with("incident 7: gpu_lost at node-0/1: XID"));
        let no_index = Incident { index: None, ..lost() };
        assert_eq!(gpu(&no_index), "node-0");
    }
}
