//! ATTRIBUTED: a record says who saw what, what to do, and its phases follow each other. Whoever it blames is one that
//! something was done to. That each ends is asked when all faults have ended.

use super::Fact;
use crate::world::World;
use reknit_engine::{Incident, IncidentKind, JobName};
use reknit_layout::GpuId;
use std::collections::BTreeMap;

/// Whom each incident blames by now.
#[derive(Debug, Default)]
pub(super) struct Attributed(BTreeMap<(JobName, u64), (IncidentKind, Option<GpuId>)>);

impl Attributed {
    pub(super) fn see(&mut self, world: &mut World, fact: &Fact) -> Result<(), String> {
        let Fact::Incident(incident) = fact else { return Ok(()) };
        well_told(incident)?;
        let key = (incident.job.clone(), incident.id);
        let blamed = (incident.kind, incident.gpu.clone());
        let before = self.0.insert(key, blamed.clone());
        if before.is_none() {
            world.statistics.did(name_of(incident.kind));
        }
        if before.as_ref() == Some(&blamed) || incident.kind == IncidentKind::Planned {
            return Ok(());
        }
        let gpu = incident.gpu.as_ref().map(|gpu| world.gpu_number(gpu));
        match world.was_harmed(gpu) {
            true => Ok(()),
            false => Err(format!("nothing was done to whom it blames: {incident:?}")),
        }
    }
}

fn well_told(incident: &Incident) -> Result<(), String> {
    let Incident { detected, quiesced, fenced, planned, ready, committed, recovered, .. } = *incident;
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

fn name_of(kind: IncidentKind) -> &'static str {
    match kind {
        IncidentKind::WorkerKilled => "an incident: worker killed",
        IncidentKind::WorkerExited => "an incident: worker exited",
        IncidentKind::GpuLost => "an incident: GPU lost",
        IncidentKind::PlaneFailed => "an incident: plane failed",
        IncidentKind::Frozen => "an incident: worker frozen",
        IncidentKind::Slow => "an incident: worker slow",
        IncidentKind::NodeLost => "an incident: node lost",
        IncidentKind::Planned => "a planned change",
    }
}
