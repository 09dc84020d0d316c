//! What happens, in one sentence; and what can be done where nothing is left to go on with.

use super::{MOST_NAMES, count, names};
use crate::output::bytes_text;
use crate::plan::answer::Answer;
use crate::plan::runs::{Run, runs};
use reknit_layout::{Axis, Contingency, Place, ReplicaId, StageId, Units};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub(super) fn sentence(answer: &Answer<'_>, next: &Contingency) -> String {
    let further = match next.gpu.unrecoverable {
        0 => "survives any 1 GPU: yes, every unit keeps a live holder".to_owned(),
        1 => format!("survives any 1 GPU: no, 1 of {} is the last to hold a unit", next.gpu.sets),
        fatal => format!("survives any 1 GPU: no, {fatal} of {} are the last to hold a unit", next.gpu.sets),
    };
    let parts = [step_time(answer), further, changes(answer), moved(answer)];
    format!("{}, the job goes on: {}", gone(answer), parts.join("; "))
}

/// `2 of 8 GPUs gone, 1 leaves`
fn gone(answer: &Answer<'_>) -> String {
    let losses = answer.losses;
    let (failed, drained) = (losses.failed.len(), losses.drained.len());
    let others = losses.gone.len() - failed - drained;
    let seated = seated_gone(answer, failed, drained);
    if others == 0 { seated } else { format!("{seated}, {} without a place gone", count(others, "GPU")) }
}

fn seated_gone(answer: &Answer<'_>, failed: usize, drained: usize) -> String {
    let all = count(answer.before.seats.iter().count(), "GPU");
    match (failed, drained) {
        (0, 0) => {
            let active = answer.seating.active();
            match active.filter(|(place, _)| answer.held(*place).is_none()).count() {
                0 => format!("all of {all} there"),
                back => format!("all of {all} there, {back} of them with nothing"),
            }
        }
        (failed, 0) => format!("{failed} of {all} gone"),
        (0, drained) => format!("{drained} of {all} {}", if drained == 1 { "leaves" } else { "leave" }),
        (failed, drained) => {
            format!("{failed} of {all} gone, {drained} {}", if drained == 1 { "leaves" } else { "leave" })
        }
    }
}

/// What becomes of the replicas that are not as the nominal layout, and which places have another GPU.
fn changes(answer: &Answer<'_>) -> String {
    let tensor = answer.job.parallel.tensor;
    let mut degrees: BTreeMap<ReplicaId, (u32, u32)> = BTreeMap::new();
    // With a group that was not whole before.
    let mut reduced = BTreeSet::new();
    for group in &answer.plan.layout.groups {
        let degree = group.degree();
        let range = degrees.entry(group.replica).or_insert((degree, degree));
        *range = (range.0.min(degree), range.1.max(degree));
        if answer.degree_before(group) < group.slots.len() {
            reduced.insert(group.replica);
        }
    }
    let held: BTreeSet<ReplicaId> = answer.before.holdings.keys().map(|place| place.replica).collect();
    let mut said = moves(answer);
    let mut replicas = Vec::new();
    for (replica, (least, most)) in degrees {
        match (least, most) {
            (0, _) if held.contains(&replica) => replicas.push(format!("replica {replica} stops training")),
            (0, _) => replicas.push(format!("replica {replica} does not train")),
            (least, most) if least == tensor && most == tensor => {
                if reduced.contains(&replica) {
                    replicas.push(format!("replica {replica} is whole again"));
                }
            }
            (least, most) if least == most => {
                replicas.push(format!("replica {replica} goes on with {least} of {tensor} slots"));
            }
            (least, _) => {
                replicas.push(format!(
                    "replica {replica} goes on with {least} of {tensor} slots at its smallest stage"
                ));
            }
        }
    }
    let more = replicas.len().saturating_sub(MOST_NAMES);
    said.extend(replicas.into_iter().take(MOST_NAMES));
    if more > 0 {
        let change = if more == 1 { "changes" } else { "change" };
        said.push(format!("{} {change} too", count(more, "more replica")));
    }
    if said.is_empty() { "every replica goes on as before".to_owned() } else { said.join(", ") }
}

/// Which places have another GPU than before.
fn moves(answer: &Answer<'_>) -> Vec<String> {
    let shift = &answer.shift;
    let mut said = Vec::new();
    match shift.spares.as_slice() {
        [] => {}
        [place] => said.push(format!("a spare takes {place}")),
        places => said.push(format!("spares take {}", names(places.iter().map(ToString::to_string)))),
    }
    let single = shift.single.iter().map(|(from, to)| format!("{from}'s GPU moves to {to}"));
    said.extend((!shift.single.is_empty()).then(|| names(single)));
    let groups = shift.exchanges.iter().map(|(stage, replicas)| {
        let replicas: Vec<_> = replicas.iter().map(ToString::to_string).collect();
        format!("stage {stage} of replicas {}", replicas.join(" and "))
    });
    said.extend((!shift.exchanges.is_empty()).then(|| format!("{} change places", names(groups))));
    said
}

fn moved(answer: &Answer<'_>) -> String {
    let transfers = &answer.plan.transfers;
    if transfers.is_empty() {
        return "nothing moves".to_owned();
    }
    let senders: BTreeSet<_> = transfers.iter().map(|transfer| &transfer.from).collect();
    let bytes = bytes_text(answer.plan.bytes_moved);
    format!("{bytes} are fetched from {}", count(senders.len(), "GPU"))
}

fn step_time(answer: &Answer<'_>) -> String {
    let (ratio, throughput) = (answer.plan.predicted.step_time_ratio, answer.plan.predicted.throughput_ratio);
    let time = if (ratio - 1.0).abs() < 0.005 {
        "a step takes as long as at full strength".to_owned()
    } else {
        format!("a step takes {ratio:.2} times as long as at full strength")
    };
    // Steps that are no longer may still be of fewer samples.
    if ratio < 1.005 && throughput < 0.995 {
        format!("{time}, at {throughput:.2} of the throughput")
    } else {
        time
    }
}

/// For stderr, on one line: what is lost.
pub(crate) fn unrecoverable(answer: &Answer<'_>) -> String {
    format!(
        "no live GPU holds {}: load a checkpoint, or wait for GPUs that hold them",
        names(lost_units(answer))
    )
}

/// `attn layers 0-3 units 3-5`
fn lost_units(answer: &Answer<'_>) -> Vec<String> {
    let runs = runs(answer.missing.iter().map(|(axis, units)| (*axis, units)));
    let text = |run: Run<&Units>| {
        let family = run.family;
        match run.layers {
            Some((start, end)) if end == start + 1 => format!("{family} layer {start} units {}", run.value),
            Some((start, end)) => format!("{family} layers {start}-{} units {}", end - 1, run.value),
            None => format!("{family} units {}", run.value),
        }
    };
    runs.into_iter().map(text).collect()
}

/// All that is to say where units are lost: which, and what can be done.
pub(super) fn lost(answer: &Answer<'_>) -> Vec<String> {
    const MOST_LOST: usize = 12;
    let lost = lost_units(answer);
    let mut lines = vec![
        format!("{}: the job cannot go on", gone(answer)),
        String::new(),
        "no live GPU holds".to_owned(),
    ];
    lines.extend(lost.iter().take(MOST_LOST).map(|units| format!("  {units}")));
    if lost.len() > MOST_LOST {
        lines.push(format!("  and {} more; --format json lists all", lost.len() - MOST_LOST));
    }
    lines.extend([String::new(), "choices".to_owned()]);
    let dir = &answer.job.checkpoint.dir;
    lines.push(if dir.is_empty() {
        "  load the newest checkpoint: this job keeps none ([checkpoint] dir is empty)".to_owned()
    } else {
        format!("  load the newest checkpoint of {dir}")
    });
    lines.push(format!("  wait for {}", awaited(answer)));
    lines
}

/// The GPUs whose return would bring back what is lost.
fn awaited(answer: &Answer<'_>) -> String {
    let held = last_holders(answer);
    // Stage by stage: both ends of a pipeline hold a vocabulary of their own.
    let mut lost: BTreeMap<(StageId, Axis), Units> = BTreeMap::new();
    let mut shared = lost.clone();
    for (place, units) in &held {
        for (axis, units) in units {
            let all = lost.entry((place.stage, *axis)).or_default();
            let twice = shared.entry((place.stage, *axis)).or_default();
            *twice = twice.union(&all.intersection(units));
            *all = all.union(units);
        }
    }
    let brings_all = |(place, units): (&Place, &BTreeMap<Axis, Units>)| {
        lost.iter().all(|((stage, axis), all)| *stage == place.stage && units.get(axis) == Some(all))
    };
    let needed = |(place, units): (&Place, &BTreeMap<Axis, Units>)| {
        units.iter().any(|(axis, own)| !own.difference(&shared[&(place.stage, *axis)]).is_empty())
    };
    let places = || names(held.keys().map(ToString::to_string));
    match held.len() {
        0 => "GPUs that hold them".to_owned(),
        1 => format!("the GPU that held them: {}", places()),
        _ if held.iter().all(brings_all) => format!("any one of the GPUs that held them: {}", places()),
        _ if held.iter().all(needed) => format!("all of the GPUs that held them: {}", places()),
        _ => format!("enough of the GPUs that held them: {}", places()),
    }
}

/// The failed places with what each held that no live GPU of the stage holds.
fn last_holders(answer: &Answer<'_>) -> BTreeMap<Place, BTreeMap<Axis, Units>> {
    let failed = &answer.losses.failed;
    let live = || answer.before.holdings.iter().filter(|(place, _)| !failed.contains(place));
    let newest = live().map(|(_, holding)| holding.step).max().unwrap_or_default();
    let mut gone: BTreeMap<StageId, BTreeMap<Axis, Units>> =
        answer.job.stages().map(|stage| (stage, answer.missing.clone())).collect();
    // Many slots hold the same.
    let mut seen = BTreeSet::new();
    for (place, holding) in live().filter(|(_, holding)| holding.step == newest) {
        if let Some(gone) = gone.get_mut(&place.stage)
            && seen.insert((place.stage, Arc::as_ptr(&holding.units)))
        {
            for (axis, units) in gone {
                *units = units.difference(&holding.of(*axis));
            }
        }
    }
    let mut holders = BTreeMap::new();
    for place in failed {
        let holding = answer.before.holdings.get(place).filter(|holding| holding.step >= newest);
        let (Some(holding), Some(gone)) = (holding, gone.get(&place.stage)) else { continue };
        let units = gone.iter().map(|(axis, gone)| (*axis, holding.of(*axis).intersection(gone)));
        let units: BTreeMap<_, _> = units.filter(|(_, units)| !units.is_empty()).collect();
        if !units.is_empty() {
            holders.insert(*place, units);
        }
    }
    holders
}
