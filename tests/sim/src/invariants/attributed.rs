//! ATTRIBUTED: a record says who saw what, what to do, and its phases follow each other. That each ends is asked when
//! all faults have ended.

use super::Fact;
use reknit_engine::Incident;

pub(super) fn see(fact: &Fact) -> Result<(), String> {
    let Fact::Incident(incident) = fact else { return Ok(()) };
    let Incident { detected, quiesced, fenced, planned, ready, committed, recovered, .. } = **incident;
    let times = [Some(detected), quiesced, fenced, planned, ready, committed, recovered];
    if !times.iter().flatten().is_sorted() {
        return Err(format!("its times do not follow each other: {incident:?}"));
    }
    if incident.signal.is_empty() || incident.first_reporter.is_empty() {
        return Err(format!("it does not say who saw what: {incident:?}"));
    }
    if recovered.is_some() && incident.advice.is_empty() {
        return Err(format!("it ends without advice: {incident:?}"));
    }
    Ok(())
}
