//! `reknit incidents`

use crate::Remote;
use crate::admin::{connect, refused};
use crate::failure::Failure;
use crate::table::Table;
use reknit_proto::v1::{Incident, ListIncidentsRequest};
use serde_json::{Value, json};

pub(crate) async fn list(job: &str, remote: &Remote) -> Result<(), Failure> {
    let request = ListIncidentsRequest { job: job.to_owned() };
    let answer = connect(&remote.daemon).await?.list_incidents(request).await.map_err(refused)?;
    let incidents = answer.into_inner().incidents;
    let json: Value = incidents.iter().map(as_json).collect();
    remote.format.print(&json, &as_table(&incidents))
}

fn as_table(incidents: &[Incident]) -> Table {
    let mut table =
        Table::new(["ID", "KIND", "PLACE", "NODE", "SEEN", "DEGREES", "MS", "STEPS LOST", "ADVICE"]);
    for incident in incidents {
        table.row([
            incident.id.to_string(),
            incident.kind.clone(),
            incident.place.clone(),
            incident.node.clone(),
            incident.signal.clone(),
            degrees(incident),
            milliseconds(incident).map_or("open".to_owned(), |ms| format!("{ms:.1}")),
            incident.steps_lost.to_string(),
            incident.advice.clone(),
        ]);
    }
    table
}

fn degrees(incident: &Incident) -> String {
    format!("{:?} -> {:?}", incident.degrees_before, incident.degrees_after)
}

/// From the first sign to the first step committed after it; `None` until then.
fn milliseconds(incident: &Incident) -> Option<f64> {
    (incident.recovered_us != 0)
        .then(|| incident.recovered_us.saturating_sub(incident.detected_us) as f64 / 1000.0)
}

/// With the names and units of the protocol.
pub(super) fn as_json(incident: &Incident) -> Value {
    json!({
        "id": incident.id, "job": incident.job, "kind": incident.kind, "place": incident.place,
        "gpu": incident.gpu, "node": incident.node, "signal": incident.signal,
        "first_reporter": incident.first_reporter,
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

    #[test]
    fn an_open_incident_has_no_length() {
        let open = Incident { detected_us: 5_000, ..Incident::default() };
        let closed = Incident { recovered_us: 6_500, ..open.clone() };
        assert_eq!(milliseconds(&open), None);
        assert_eq!(milliseconds(&closed), Some(1.5));
        assert!(as_table(&[open]).lines()[1].contains("open"));
    }
}
